"""Outputs of grammars that were enforced only in part, checked against what the user asked for."""

from __future__ import annotations

from graft.grammar.errors import GrammarError
from graft.grammar.router import check_output
from graft.grammar.spec import GrammarSpec
from graft.grammar.vocabulary import Vocabulary
from graft.models.running import Running
from graft.models.tokenizer import Tokenizer


def require_checkable(spec: GrammarSpec | None) -> None:
    """Refuse a loosely enforced schema that nobody could check the output against.

    Raises
    ------
    GrammarError
        Naming what the checker cannot read, before a token is made.
    """
    if spec is not None and spec.partial:
        check_output(spec.schema, "null")


class Validation:
    """Sets `Output.validated` of what has ended.

    The check runs on the engine's thread, beside the rounds in flight.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def __call__(self, running: Running) -> None:
        """Check the text of a request whose grammar was enforced loosely, however it ended."""
        grammar, output = running.grammar, running.output
        if grammar is None or not grammar.done() or grammar.exception() is not None:
            return  # there is no text
        spec = grammar.result().spec  # what a router has made of the request's
        if not spec.partial:
            return
        text = self._guided_text(running, spec)
        if text is None:
            return
        try:
            output.validated = check_output(spec.schema, text)
        except GrammarError as error:
            output.validated, output.error = False, output.error or str(error)

    def _guided_text(self, running: Running, spec: GrammarSpec) -> str | None:
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
