"""State of one request from submission to its final output."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.models.request import Output, Request
from graft.models.text.stop import StopFinder
from graft.models.text.stream import IncrementalDecoder
from graft.sampling.params import SamplingParams

__all__ = ["RequestState"]


@dataclass(eq=False)
class RequestState:
    """An unfinished request: waiting, prefilling, running or preempted.

    `Admission` creates the state, `Scheduler` queues and finishes the request, and `SlotManager`
    gives it a slot and KV-cache pages. A slot is the index of the request's state on the device. A
    preempted request keeps this object and returns to the queue. When it gets a slot again, its
    prompt and its output so far are prefilled.

    Invariants
    ----------
    1. ``slot == -1`` exactly while the request has no slot. It then owns no KV-cache pages.
    2. ``epoch`` changes whenever the request gets a slot. The slot and epoch of each request are
       recorded when a round is launched. The results of the round are discarded for a request whose
       slot or epoch has changed since.
    3. ``output.tokens`` only grows. `take_new_tokens` returns each token once, and the strings
       returned by `append_tokens` and `finish_text` concatenate to ``output.text``.

    Parameters
    ----------
    request
        Request as submitted.
    output
        Output under construction; returned to the caller when the request finishes.
    prompt
        Token ids of the prompt.
    max_tokens
        Maximum number of tokens to generate, including a final stop id.
    stop_ids
        Token ids that end the output.
    decoder
        Converts output tokens to text incrementally.
    submission
        Number of the submission, unique within an engine. It identifies the request's events.
    grammar
        Future of the compiled grammar; None for an unconstrained request.

    Attributes
    ----------
    matcher
        Grammar matcher. It is created before the request gets a slot and dropped when the request
        leaves the slot. None at other times and for an unconstrained request.
    queue_number
        Sequence number in the queue; -1 while the request is not waiting. It is less than -1, and
        thus precedes all other numbers, if the request was preempted because pages ran out. Numbers
        are never reused.
    bypass_count
        Number of times another request was given a slot while this one was first in the queue.
    prefix_keys
        Prefix-cache keys of the full pages; None until first computed.
    prefix_hits
        Number of full pages of this request in the prefix cache, and how many of these pages no
        slot uses. The numbers are valid while the cache has the version `prefix_version`.
    prefix_version
        Version of the prefix cache when `prefix_hits` was computed; None: not computed yet.
    slot
        Request slot; -1 while the request has none.
    epoch
        Number of the current slot assignment; unique among 2**31 - 1 consecutive assignments.
    start_position
        Position of the request's last token at the time the request got its slot.
    start_output
        Output tokens at the time the request got its slot. Empty unless the request was
        preempted or comes from another engine.
    reserved_positions
        Number of positions for which the slot has pages.
    draft_capacity
        Maximum number of drafts that the request can have in its next round. 0 right after the
        request has got its slot, because nothing has been drafted for it yet.
    undrafted_tokens
        Number of tokens at the end of the output that the drafter has not processed. These are the
        tokens of the round in which the device ended the request.
    params
        Sampling parameters of the latest slot assignment, with seed, verification mode and all stop
        ids; default values before the first one.
    stalled_rounds
        Number of consecutive rounds, up to the last one read, in which no token was committed.
    stalled_since
        Time (`time.monotonic`) at which the host read the first of the `stalled_rounds`.
    submitted_at
        Time (`time.monotonic`) of submission.
    closing_end
        Position before which the output must be complete (`GuidedRequest.closing_end`); -1 if mask
        rows have no budget. `plan_closing` sets it before the request gets a slot.
    stays_on_host
        Whether the request must not be promoted (`Promotion`), because kernels have failed to do
        its grammar steps.
    """

    request: Request
    output: Output
    prompt: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    decoder: IncrementalDecoder
    submission: int = -1
    grammar: Future[CompiledGrammar] | None = None
    matcher: Matcher | None = None
    queue_number: int = -1
    bypass_count: int = 0
    prefix_keys: list[bytes] | None = None
    prefix_hits: tuple[int, int] = (0, 0)
    prefix_version: tuple[int, int] | None = None
    slot: int = -1
    epoch: int = 0
    start_position: int = 0
    start_output: tuple[int, ...] = ()
    reserved_positions: int = 0
    draft_capacity: int = 0
    undrafted_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    stalled_rounds: int = 0
    stalled_since: float = 0.0
    submitted_at: float = field(default_factory=time.monotonic)
    closing_end: int = -1
    stays_on_host: bool = False
    _emitted_tokens: int = field(default=0, repr=False)
    _emitted_text: list[str] = field(default_factory=list, repr=False)
    _emitted_chars: int = field(default=0, repr=False)
    _pending_text: str = field(default="", repr=False)
    _stop_finder: StopFinder | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._stop_finder = StopFinder(self.request.stop) if self.request.stop else None

    @property
    def id(self) -> str:
        """Request id."""
        return self.output.id

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far. These tokens are prefilled when the request gets a slot."""
        return [*self.prompt, *self.output.tokens]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in prompt and output."""
        return len(self.prompt) + len(self.output.tokens)

    @property
    def position_limit(self) -> int:
        """Exclusive upper bound of the request's positions."""
        return len(self.prompt) + self.max_tokens

    @property
    def age_s(self) -> float:
        """Seconds since submission."""
        return time.monotonic() - self.submitted_at

    @property
    def preemption_key(self) -> tuple[int, float]:
        """Sort key for preemption: the running request with the greatest key is preempted first.

        This is the request with the lowest priority. If several requests have this priority, it is
        the last one that was submitted.
        """
        return -self.request.priority, self.submitted_at

    def make_matcher(self) -> Matcher | None:
        """Return a matcher advanced to the end of the output; None without a grammar.

        Raises
        ------
        GrammarError
            If the grammar failed to compile or rejects a token of the output.
        """
        if self.grammar is None:
            return None
        compiled = self.grammar.result()
        return compiled.matcher(
            self.stop_ids, self.output.tokens, self.request.max_reasoning_tokens
        )

    def satisfies_grammar(self) -> bool:
        """Return whether the output without its last token, a stop id, satisfies the grammar.

        A matcher accepts stop ids without text (``matcher.stop_ids``) only where the grammar can
        end. If the last token is one of them, the output therefore satisfies the grammar. A stop id
        with text may occur anywhere, because the grammar treats it as ordinary text. If the last
        token is such an id, a new matcher checks whether the grammar can end before it.
        """
        if self.grammar is None or self.matcher is None:
            return True
        *tokens, last = self.output.tokens
        if last in self.matcher.stop_ids:
            return True
        matcher = self.grammar.result().matcher(self.stop_ids, tokens)
        return any(matcher.accept(stop_id) for stop_id in matcher.stop_ids)

    def append_tokens(self, tokens: list[int]) -> tuple[str, bool]:
        """Append the tokens that a round committed, up to the end of the first stop string.

        Returns
        -------
        text : str
            Text to emit. A suffix that may be the beginning of a stop string is held back.
        stopped : bool
            Whether a stop string ended the request.
        """
        if self._stop_finder is None:
            self._append(tokens)
            return self._emit(), False
        stop_after = self.request.stop_after
        if stop_after is None:
            stop_after = self.request.min_tokens
        for token in tokens:
            text = self._append([token])
            stop_begin = self._stop_finder.feed(text)
            if stop_begin is not None and len(self.output.tokens) > stop_after:
                end = stop_begin - self._emitted_chars
                self._pending_text = self._pending_text[:end]
                return self._emit(), True
        return self._emit(held=self._stop_finder.held), False

    def take_new_tokens(self) -> tuple[int, ...]:
        """Return the output tokens that no event has reported yet, and mark them as reported."""
        first = self._emitted_tokens
        self._emitted_tokens = len(self.output.tokens)
        return tuple(self.output.tokens[first:])

    def finish_text(self) -> str:
        """Return the text that has not been emitted yet, and set ``output.text``.

        ``output.reason`` must be set. With reason "moved" nothing is emitted, because another
        engine continues the text. In all other cases, only an incomplete last character is omitted.
        """
        is_moved = self.output.reason == "moved"
        held = len(self._pending_text) if is_moved else 0
        text = self._emit(held)
        self.output.text = "".join(self._emitted_text)
        return text

    def _append(self, tokens: list[int]) -> str:
        """Append tokens to the output and return their text. Stop ids produce no text."""
        self.output.tokens.extend(tokens)
        visible = [token for token in tokens if token not in self.stop_ids]
        text = self.decoder.push(visible)
        self._pending_text += text
        return text

    def _emit(self, held: int = 0) -> str:
        """Return the text that has not been emitted, except for its last `held` characters."""
        end = len(self._pending_text) - held
        text = self._pending_text[:end]
        self._pending_text = self._pending_text[end:]
        self._emitted_text.append(text)
        self._emitted_chars += len(text)
        return text
