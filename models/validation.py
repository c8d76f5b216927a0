"""Outputs of grammars that were enforced only in part, checked against what the user asked for."""

from __future__ import annotations

from concurrent.futures import Future

from graft.grammar.errors import GrammarError
from graft.grammar.judge import Judge
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.models.running import Running
from graft.models.tokenizer import Tokenizer


class Validation:
    """Sets `Output.validated` of what has ended, in a process that can be killed.

    No check holds up a round or the output of another request: patterns of a schema may keep Python
    busy for ever. What could not be checked in time is not valid, and its error says so.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, judge: Judge | None = None
    ):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._judge = Judge() if judge is None else judge

    def require_checkable(self, spec: Spec | None) -> Future[bool] | None:
        """Has a loosely enforced schema tried, before a token is made for it.

        Returns
        -------
        Future or None
            It raises ``GrammarError``, naming what cannot be checked; None: nothing to check.
        """
        if spec is None or not spec.partial:
            return None
        return self._judge.satisfies(spec.source or spec.text, "null")

    def __call__(self, running: Running) -> Future[None] | None:
        """Check the text of a request whose grammar was enforced loosely, however it ended.

        Returns
        -------
        Future or None
            Done when the output is marked, never where it was cancelled; None: it is not marked.
        """
        grammar = running.grammar
        if grammar is None or not grammar.done() or grammar.exception() is not None:
            return None  # there is no text
        spec = grammar.result().spec  # what a router has made of the request's
        text = self._guided_text(running, spec) if spec.partial else None
        if text is None:
            return None
        output, marked = running.output, Future[None]()

        def mark(verdict: Future[bool]) -> None:
            if not marked.set_running_or_notify_cancel():
                return  # nobody waits any more
            error = verdict.exception()
            output.validated = error is None and verdict.result()
            if error is not None:
                output.error = output.error or str(error)
            marked.set_result(None)

        try:
            self._judge.satisfies(spec.source or spec.text, text).add_done_callback(mark)
        except GrammarError as error:  # of a judge that is closed
            output.validated, output.error = False, output.error or str(error)
            return None
        return marked

    def close(self) -> None:
        """Kill the process; what is being checked is marked as not valid."""
        self._judge.close()

    def _guided_text(self, running: Running, spec: Spec) -> str | None:
        """What stands after the marker, if there is one; None when the grammar never began."""
        tokens, text, marker = running.output.tokens, running.output.text, spec.marker
        if marker is None:
            return text
        ids = marker.ids(self._vocabulary)
        at = next((i for i, token in enumerate(tokens) if token in ids), None)
        if at is not None:
            after = [t for t in tokens[at + 1 :] if t not in running.stop_ids]
            return self._tokenizer.decode(after)
        return text.partition(marker.text)[2] if marker.text and marker.text in text else None
