"""What a user asks of the engine and what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graft.grammar.statement import GrammarSpec
from graft.models.errors import RequestError

#: Finish reasons, in the order of the REASON_* codes of cudagraph/kernels/graft.cuh.
DEVICE_REASONS = ("", "stop", "length", "dead_end", "error")
MAX_STOP_IDS = 8
VERIFY_MODES = ("rejection", "coupled")


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Exactly one of `prompt`, `messages` and `tokens` is given.

    Parameters
    ----------
    prompt : text, wrapped as one user message when the tokenizer has a chat template.
    messages : chat messages, rendered through the tokenizer's chat template.
    tokens : token ids, taken as they are.
    grammar : what the output must match; None leaves it free.
    schema : handed to the chat template as `schema`; by default the schema of a JSON-schema
        grammar, so that a template which shows the schema to the model can do so.
    max_tokens : most tokens to generate, stop id included; None uses all the room there is.
    temperature : 0 (below 1e-5) decodes greedily.
    top_k, top_p, min_p : filters, applied in this order after mask and temperature; 0, 1 and 0
        switch them off.
    seed : 64-bit key of the request's random numbers; None draws one and reports it.
    verify : "rejection" or "coupled"; None takes the engine's default.
    stop : strings that end the output (and are cut from it); not with a grammar, whose output a
        cut would break.
    stop_ids : ids that end the output beside the model's own.
    id : the name under which outputs and events come back; None gives it a number.
    """

    prompt: str | None = None
    messages: Sequence[dict[str, str]] | None = None
    tokens: Sequence[int] | None = None
    grammar: GrammarSpec | None = None
    schema: object | None = None
    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    verify: str | None = None
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    id: str | None = None


@dataclass
class Output:
    """The finished (or failed) answer to one request.

    Attributes
    ----------
    tokens : generated ids, a final stop id included.
    text : decoded output without the stop id, cut at a stop string.
    reason : "stop", "stop_string", "length", "dead_end", "cancelled", "refused" or "error".
    error : the sentence that says why, for "refused" and "error".
    finished : ended by itself: a stop id, and for a guided request a terminated grammar.
    rounds : rounds in which this request committed at least one token.
    drafted, accepted : drafts tested for it, and drafts accepted.
    preempted : times it lost its slot and went on later.
    jumps, jumped_tokens : times that forced text was appended outright, and the tokens appended.
    rounds_saved : rounds fewer than without them, at the least: as many as the appended tokens
        would have taken had every draft been accepted, less those whose tokens were dropped.
    exact : False where appended text could have been spelled in other tokens: the text is the same,
        but the tokens are not distributed as the model's own.
    validated : None where the grammar was enforced exactly (or there was none). Where a part of a
        schema could not be enforced and `GrammarSpec.partial` allowed that, whether the text, as it
        ended, satisfies the schema; False, and `error` says why, where no check could tell within
        seconds.
    """

    id: str
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    error: str | None = None
    seed: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    jumps: int = 0
    jumped_tokens: int = 0
    rounds_saved: int = 0
    exact: bool = True
    validated: bool | None = None

    @property
    def finished(self) -> bool:
        return self.reason == "stop"


@dataclass(frozen=True)
class Event:
    """One step of a streaming request: the tokens that a round committed, or a jump appended.

    `text` is the newly readable text: bytes of an unfinished character are held back, and so is
    what may be the beginning of a stop string. With `Engine(jump_forward=True)` the last 4 `tokens`
    of a guided request come late: a jump may rewrite them. Its text does not.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    output: Output | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended; `output` is then its whole answer."""
        return self.output is not None


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return value


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise RequestError(f"{name} must be a number from {low} to {high}, got {value!r}")
    if open_low and value == low:
        raise RequestError(f"{name} must be above {low}, got {value!r}")
    return float(value)


def check_request(request: Request, vocab_size: int) -> None:
    """Refuse a request whose options make no sense, before anything runs for it.

    Raises
    ------
    RequestError
        Naming the option and its value.
    """
    given = [
        name for name in ("prompt", "messages", "tokens") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        raise RequestError(
            f"give exactly one of prompt, messages and tokens, got {' and '.join(given) or 'none'}"
        )
    if request.id is not None and not isinstance(request.id, str):
        raise RequestError(f"id must be text, got {request.id!r}")
    if request.prompt is not None and not isinstance(request.prompt, str):
        raise RequestError(f"prompt must be text, got {type(request.prompt).__name__}")
    try:
        (request.prompt or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt is not Unicode text: {error}") from error
    if request.messages is not None and not (
        isinstance(request.messages, (list, tuple))
        and all(isinstance(message, Mapping) for message in request.messages)
    ):
        raise RequestError(f"messages must be a list of objects, got {request.messages!r}")
    for name in ("stop", "stop_ids", "tokens"):
        if not isinstance(getattr(request, name), (Sequence, type(None))):
            raise RequestError(f"{name} must be a list, got {getattr(request, name)!r}")
    if request.grammar is not None and not isinstance(request.grammar, GrammarSpec):
        raise RequestError(
            f"grammar must be a GrammarSpec or None, got {type(request.grammar).__name__}"
        )
    if request.max_tokens is not None:
        _integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    _real("temperature", request.temperature, 0.0, 1e4)
    _integer("top_k", request.top_k, 0, 2**31 - 1)
    _real("top_p", request.top_p, 0.0, 1.0, open_low=True)
    _real("min_p", request.min_p, 0.0, 1.0)
    if request.seed is not None:
        _integer("seed", request.seed, 0, 2**64 - 1)
    if request.verify is not None and request.verify not in VERIFY_MODES:
        raise RequestError(f"verify must be one of {VERIFY_MODES}, got {request.verify!r}")
    if isinstance(request.stop, str) or not all(isinstance(s, str) and s for s in request.stop):
        raise RequestError(f"stop must be a list of non-empty strings, got {request.stop!r}")
    if request.stop and request.grammar is not None:
        raise RequestError("a stop string would cut a guided output in two; use one or the other")
    for token in request.stop_ids:
        _integer("each of stop_ids", token, 0, vocab_size - 1)
    for token in request.tokens or ():
        _integer("each of tokens", token, 0, vocab_size - 1)
