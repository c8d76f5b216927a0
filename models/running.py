"""A request on its way through the engine: from submission to its output."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.models.request import Output, Request
from graft.models.text import IncrementalDecoder, StopFinder
from graft.sampling.adjust import NOTHING, Adjust


@dataclass(eq=False)
class Running:
    """Everything the engine knows about one unfinished request.

    Attributes
    ----------
    grammar : what it waits for outside the batch.
    adjust : what is done to its logits, but for the output so far.
    place : its place among those waiting, -1 while it does not wait; never used twice.
    slot : where it sits, -1 while it waits.
    epoch : number of this stay in a slot; never used twice.
    position : of the last token known when it joined its slot.
    before : tokens it had generated before that, when it was preempted.
    reserved : positions for which its slot has pages.
    stalls, stalled_at : rounds on end in which it committed nothing, and when the first of them was
        read, by `time.monotonic`.
    submitted : when it was, by `time.monotonic`.
    """

    request: Request
    output: Output
    prompt: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    decoder: IncrementalDecoder
    grammar: Future[CompiledGrammar] | None = None
    adjust: Adjust = NOTHING
    matcher: Matcher | None = None
    place: int = -1
    slot: int = -1
    epoch: int = 0
    position: int = 0
    before: tuple[int, ...] = ()
    reserved: int = 0
    stalls: int = 0
    stalled_at: float = 0.0
    submitted: float = field(default_factory=time.monotonic)
    _streamed: int = field(default=0, repr=False)  # tokens that somebody was told of
    _texts: list[str] = field(default_factory=list, repr=False)  # that somebody was told of
    _told: int = field(default=0, repr=False)  # their characters
    _untold: str = field(default="", repr=False)
    _stops: StopFinder | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._stops = StopFinder(self.request.stop) if self.request.stop else None

    @property
    def id(self) -> str:
        return self.output.id

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far: what a slot's caches must hold for it to go on."""
        return [*self.prompt, *self.output.tokens]

    @property
    def length(self) -> int:
        """How many those are."""
        return len(self.prompt) + len(self.output.tokens)

    @property
    def limit(self) -> int:
        """Exclusive end of its positions."""
        return len(self.prompt) + self.max_tokens

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self.submitted

    def make_matcher(self) -> Matcher | None:
        """A matcher that has taken the output; None for a free request.

        Raises
        ------
        GrammarError
            When the grammar could not be compiled, or refuses a token.
        """
        if self.grammar is None:
            return None
        return self.grammar.result().matcher(self.stop_ids, self.output.tokens)

    def push(self, tokens: list[int]) -> tuple[str, bool]:
        """Take a round's tokens, up to the one that completes a stop string.

        Returns
        -------
        tuple
            The text to emit, and whether a stop string ended the request.
        """
        if self._stops is None:
            self._take(tokens)
            return self._tell(), False
        for token in tokens:
            begin = self._stops.feed(self._take([token]))
            if begin is not None:
                self._untold = self._untold[: begin - self._told]
                return self._tell(), True
        return self._tell(self._stops.held), False

    def hand_out(self) -> tuple[int, ...]:
        """Tokens that nobody has been told of."""
        first, self._streamed = self._streamed, len(self.output.tokens)
        return tuple(self.output.tokens[first:])

    def flush(self) -> str:
        """The rest of the text, once nothing can follow; sets the output's."""
        if self.output.reason != "stop_string":
            self._untold += self.decoder.finish(cut=self.output.reason != "stop")
        text = self._tell()
        self.output.text = "".join(self._texts)
        return text

    def _take(self, tokens: list[int]) -> str:
        self.output.tokens.extend(tokens)
        text = self.decoder.push([t for t in tokens if t not in self.stop_ids])
        self._untold += text
        return text

    def _tell(self, held: int = 0) -> str:
        """All text but the last `held` characters, as far as nobody has been told of it."""
        end = len(self._untold) - held
        text, self._untold = self._untold[:end], self._untold[end:]
        self._texts.append(text)
        self._told += len(text)
        return text
