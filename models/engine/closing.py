"""Outputs that always close: the decision whether a request's mask rows are limited by a budget.

A grammar's matcher that knows its distance can fill mask rows for a budget (`Matcher.fill`): such a
row has only those tokens after which the text can be complete within `max_tokens`. The page of
`graft.grammar` describes these rows.
"""

from __future__ import annotations

from graft.grammar.matcher import Matcher
from graft.models.engine.request_state import RequestState
from graft.models.errors import RequestError

__all__ = ["plan_closing"]


def plan_closing(state: RequestState, matcher: Matcher) -> None:
    """Set `RequestState.closing_end` and `Output.closing` of a request that is about to get a slot.

    Parameters
    ----------
    state
        Request with a grammar.
    matcher
        Matcher of the grammar, advanced to the end of the output.

    Raises
    ------
    RequestError
        The request has no output yet, and the shortest complete text exceeds `max_tokens`, or
        ``closing="require"`` and completeness cannot be guaranteed.
    """
    state.closing_end = -1
    closing = state.request.closing
    # Free text that `max_tokens` cuts off must not look complete, so it is not closed by default.
    if closing == "off" or (closing == "auto" and matcher.compiled.has_free_text):
        return
    distance = matcher.distance()
    obstacle = _find_obstacle(state, matcher, distance)
    if obstacle and closing == "require" and not state.output.tokens:
        raise RequestError(f"closing is 'require', but {obstacle}", param="closing")
    budget = state.position_limit - state.num_tokens
    if distance is not None and distance > budget and not state.output.tokens:
        raise RequestError(
            f"max_tokens is {budget}, but a complete output of this grammar needs {distance} "
            "tokens; increase max_tokens, or set closing='off' to allow incomplete outputs",
            param="max_tokens",
        )
    if distance is not None and distance <= budget:
        state.closing_end = state.position_limit
    is_bound = state.closing_end >= 0 and not obstacle
    state.output.closing = "guaranteed" if is_bound else "not guaranteed"


def _find_obstacle(state: RequestState, matcher: Matcher, distance: int | None) -> str:
    """Return why an output may remain incomplete although its rows have budgets; "" if none."""
    if distance is None:
        return "the matcher of this grammar does not know how many tokens complete its text"
    request = state.request
    if request.banned_ids or request.allowed_ids is not None:
        return "banned_ids or allowed_ids may exclude the tokens that complete the text"
    if set(state.stop_ids) - set(matcher.stop_ids):
        return "stop_ids has an id with text, which may end the output anywhere"
    return ""
