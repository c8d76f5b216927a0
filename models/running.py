"""A request on its way through the engine: from submission to its output."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from graft.grammar.errors import GrammarError
from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.models.request import Output, Request


class TextDecoder(Protocol):
    """Turns tokens into text as they come; `IncrementalDecoder` is one."""

    def push(self, ids: list[int]) -> str: ...
    def finish(self) -> str: ...


@dataclass(eq=False)
class Running:
    """Everything the engine knows about one unfinished request.

    Attributes
    ----------
    grammar : what it waits for outside the batch.
    slot : where it sits, -1 while it waits.
    epoch : number of this stay in a slot; never used twice.
    position : of the last token known when it joined its slot.
    before : tokens it had generated before that, when it was preempted.
    stalls, stalled_at : rounds on end in which it committed nothing, and when the first of them was
        read, by `time.monotonic`.
    """

    request: Request
    output: Output
    prompt: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    decoder: TextDecoder
    grammar: Future[CompiledGrammar] | None = None
    matcher: Matcher | None = None
    slot: int = -1
    epoch: int = 0
    position: int = 0
    before: tuple[int, ...] = ()
    stalls: int = 0
    stalled_at: float = 0.0
    _emitted: int = field(default=0, repr=False)
    _streamed: int = field(default=0, repr=False)

    @property
    def id(self) -> str:
        return self.output.id

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far: what a slot's caches must hold for it to go on."""
        return [*self.prompt, *self.output.tokens]

    @property
    def limit(self) -> int:
        """Exclusive end of its positions."""
        return len(self.prompt) + self.max_tokens

    @property
    def ready(self) -> bool:
        """Whether nothing stands between the request and a slot."""
        return self.grammar is None or self.grammar.done()

    def make_matcher(self) -> Matcher | None:
        """A matcher that has taken the output; None for a free request.

        Raises
        ------
        GrammarError
            When the grammar could not be compiled, or refuses a token.
        """
        if self.grammar is None:
            return None
        compiled = self.grammar.result()
        matcher = compiled.backend.matcher(compiled, self.stop_ids)
        for index, token in enumerate(self.output.tokens):
            if not matcher.accept(token):
                raise GrammarError(f"the grammar refused token {token}, number {index}, again")
        return matcher

    def push(self, tokens: list[int]) -> tuple[str, bool]:
        """Take a round's tokens, up to the one that completes a stop string.

        Returns
        -------
        tuple
            The text to emit, and whether a stop string ended the request.
        """
        if not self.request.stop:
            self._take(tokens)
            return self._emit(len(self.output.text)), False
        for token in tokens:
            self._take([token])
            found = (self.output.text.find(stop) for stop in self.request.stop)
            cut = min((at for at in found if at >= 0), default=-1)
            if cut >= 0:
                self.output.text = self.output.text[:cut]
                return self._emit(cut), True
        return self._emit(len(self.output.text) - self._held_back()), False

    def hand_out(self) -> tuple[int, ...]:
        """Tokens that nobody has been told of."""
        first, self._streamed = self._streamed, len(self.output.tokens)
        return tuple(self.output.tokens[first:])

    def _take(self, tokens: list[int]) -> None:
        self.output.tokens.extend(tokens)
        self.output.text += self.decoder.push([t for t in tokens if t not in self.stop_ids])

    def flush(self) -> str:
        """The rest of the text, once nothing can follow."""
        if self.output.reason != "stop_string":
            self.output.text += self.decoder.finish()
        return self._emit(len(self.output.text))

    def _held_back(self) -> int:
        """Length of the longest end of the text that may grow into a stop string."""
        text = self.output.text
        lengths = (
            n for stop in self.request.stop for n in range(len(stop) - 1, 0, -1)
            if text.endswith(stop[:n])
        )  # fmt: skip
        return max(lengths, default=0)

    def _emit(self, end: int) -> str:
        end = max(end, self._emitted)
        text, self._emitted = self.output.text[self._emitted : end], end
        return text
