"""A round's grammar work by the stock Python APIs, used the usual way.

Each subject plays recorded moves. A round has three stages: masks for verification, commit of what
was accepted, and masks for drafting, one for each draft. The usual way fills rows 0 .. K-1 while
drafting, rolls back, and fills rows 0 .. K again for verification.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from graft.grammar import GrammarBackend
from graft.tools.rounds_streams import Document, Episode, Move

__all__ = ["LLGuidanceLoop", "LLGuidancePar", "Subject", "XGrammarBatch", "XGrammarLoop"]


class Subject(Protocol):
    """One way to do the grammar work of recorded rounds.

    Attributes
    ----------
    verify, draft : int32 ``[slots, K+1, words]``, the rows made for verification and for drafting,
        where `keep` is set.
    fills : mask rows filled so far.
    """

    name: str
    verify: np.ndarray
    draft: np.ndarray
    keep: bool
    fills: int

    def begin(self, episode: Episode) -> None:
        """Make the matchers of an episode and bring them to the end of its prefixes."""

    def play(self, moves: Sequence[Move]) -> int:
        """Play one round; nanoseconds of grammar work."""

    def close(self) -> None:
        """Let go of everything."""


class _Stock:
    """What the stock subjects share: the stages, with matchers by slot."""

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, threads: int = 1):
        self._backend, self._length, self._threads = backend, draft_length, threads
        self._stop = backend.vocabulary.stop_ids[0]
        words = backend.vocabulary.words
        self.verify = np.zeros((slots, draft_length + 1, words), np.int32)
        self.draft = np.zeros_like(self.verify)
        self.keep = True  # it always does
        self.fills = 0
        self._width = draft_length + 1
        self._matchers: list[Any] = []

    def begin(self, episode: Episode) -> None:
        self._matchers = []
        for document, prefix in zip(episode.documents, episode.prefixes, strict=True):
            matcher = self._matcher(document)
            self._accept_all(matcher, prefix)
            self._matchers.append(matcher)

    def close(self) -> None:
        self._matchers = []

    def play(self, moves: Sequence[Move]) -> int:
        start = time.perf_counter_ns()
        self._verify_stage(moves)
        moves = [move for move in moves if move.tokens[-1] != self._stop]
        self._draft_stage(moves)
        return time.perf_counter_ns() - start

    def _matcher(self, document: Document) -> Any:
        raise NotImplementedError

    def _accept_all(self, matcher: Any, tokens: Sequence[int]) -> None:
        raise NotImplementedError

    def _verify_stage(self, moves: Sequence[Move]) -> None:
        raise NotImplementedError

    def _draft_stage(self, moves: Sequence[Move]) -> None:
        raise NotImplementedError


class XGrammarLoop(_Stock):
    """XGrammar, one matcher after the other."""

    name = "XGrammar, plain loop"

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, threads: int = 1):
        from graft.grammar.backends.xgrammar import library

        super().__init__(backend, slots, draft_length, threads)
        self._types = library()
        words = self.verify.shape[-1]
        self._rows, self._draft_rows = self.verify.reshape(-1, words), self.draft.reshape(-1, words)

    def _matcher(self, document: Document) -> Any:
        return self._types.GrammarMatcher(document.compiled.native, None, False, -1, None)

    def _accept_all(self, matcher: Any, tokens: Sequence[int]) -> None:
        for token in tokens:
            matcher.accept_token(token, False)

    def _verify_stage(self, moves: Sequence[Move]) -> None:
        rows, stop = self._rows, self._stop
        for move in moves:
            matcher, row = self._matchers[move.slot], move.slot * self._width
            matcher.fill_next_token_bitmask(rows, row, False)
            self.fills += 1
            for draft in move.tested:
                matcher.accept_token(draft, False)
                row += 1
                if draft != stop:
                    matcher.fill_next_token_bitmask(rows, row, False)
                    self.fills += 1
        for move in moves:
            matcher = self._matchers[move.slot]
            if len(move.tested) > move.accepted:
                matcher.rollback(len(move.tested) - move.accepted)
            for token in move.tokens[move.accepted :]:
                matcher.accept_token(token, False)

    def _draft_stage(self, moves: Sequence[Move]) -> None:
        rows = self._draft_rows
        for j in range(self._length):
            for move in moves:
                if j >= len(move.drafts):
                    continue
                matcher = self._matchers[move.slot]
                if j:
                    matcher.accept_token(move.drafts[j - 1], False)
                matcher.fill_next_token_bitmask(rows, move.slot * self._width + j, False)
                self.fills += 1
        for move in moves:
            if len(move.drafts) > 1:
                self._matchers[move.slot].rollback(len(move.drafts) - 1)


class XGrammarBatch(XGrammarLoop):
    """XGrammar's calls for a whole batch."""

    name = "XGrammar, batch calls"

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, threads: int = 1):
        import tvm_ffi

        super().__init__(backend, slots, draft_length, threads)
        register = tvm_ffi.register_object("xgrammar.tvm_ffi_binding.BatchGrammarMatcher")
        calls = type("BatchGrammarMatcher", (tvm_ffi.Object,), {"__slots__": ()})
        self._calls: Any = register(calls)
        self._batch = self._calls(threads)

    def _fill(self, moves: Sequence[Move], j: int, rows: np.ndarray) -> None:
        if moves:
            matchers = [self._matchers[move.slot] for move in moves]
            indices = [move.slot * self._width + j for move in moves]
            self._batch.batch_fill_next_token_bitmask(matchers, rows, indices, False)
            self.fills += len(moves)

    def _accept(self, moves: Sequence[Move], tokens: list[int]) -> None:
        if moves:
            matchers = [self._matchers[move.slot] for move in moves]
            self._calls.batch_accept_token(matchers, tokens, False)

    def _rollback(self, pairs: list[tuple[Move, int]]) -> None:
        if pairs:
            matchers = [self._matchers[move.slot] for move, _ in pairs]
            self._calls.batch_rollback(matchers, [count for _, count in pairs])

    def _verify_stage(self, moves: Sequence[Move]) -> None:
        self._fill(moves, 0, self._rows)
        for j in range(self._length):
            reached = [move for move in moves if len(move.tested) > j]
            self._accept(reached, [move.tested[j] for move in reached])
            running = [move for move in reached if move.tested[j] != self._stop]
            self._fill(running, j + 1, self._rows)
        undone = [(move, len(move.tested) - move.accepted) for move in moves]
        self._rollback([(move, count) for move, count in undone if count])
        bonus = [move for move in moves if len(move.tokens) > move.accepted]
        self._accept(bonus, [move.tokens[-1] for move in bonus])

    def _draft_stage(self, moves: Sequence[Move]) -> None:
        for j in range(self._length):
            reached = [move for move in moves if len(move.drafts) > j]
            if j:
                self._accept(reached, [move.drafts[j - 1] for move in reached])
            self._fill(reached, j, self._draft_rows)
        self._rollback([(m, len(m.drafts) - 1) for m in moves if len(m.drafts) > 1])


class LLGuidanceLoop(_Stock):
    """LLGuidance, one matcher after the other; the stop token is tracked by the caller."""

    name = "LLGuidance, plain loop"

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, threads: int = 1):
        from graft.grammar import LLGuidanceBackend

        super().__init__(backend, slots, draft_length, threads)
        self._library = LLGuidanceBackend(backend.vocabulary, native=False)
        self._bytes = self.verify.shape[-1] * 4
        self._firsts: dict[int, Any] = {}

    def _matcher(self, document: Document) -> Any:
        import llguidance  # type: ignore[import-not-found, unused-ignore]

        from graft.grammar.backends.llguidance import grammar_text

        key = id(document)
        if key not in self._firsts:
            self._firsts[key] = llguidance.LLMatcher(
                self._library._tokenizer, grammar_text(document.compiled.spec), log_level=0
            )
        return self._firsts[key].deep_copy()

    def _accept_all(self, matcher: Any, tokens: Sequence[int]) -> None:
        matcher.consume_tokens(list(tokens))

    def _verify_stage(self, moves: Sequence[Move]) -> None:
        size, stop = self._bytes, self._stop
        start = self.verify.ctypes.data
        for move in moves:
            matcher, row = self._matchers[move.slot], move.slot * self._width
            matcher.unsafe_compute_mask_ptr(start + row * size, size)
            self.fills += 1
            for draft in move.tested:
                if draft != stop:
                    matcher.consume_token(draft)
                    row += 1
                    matcher.unsafe_compute_mask_ptr(start + row * size, size)
                    self.fills += 1
        self._commit(moves)

    def _commit(self, moves: Sequence[Move]) -> None:
        stop = self._stop
        for move in moves:
            matcher, tested = self._matchers[move.slot], move.tested
            consumed = len(tested) - (stop in tested)
            if consumed > move.accepted:
                matcher.rollback(consumed - move.accepted)
            if len(move.tokens) > move.accepted and move.tokens[-1] != stop:
                matcher.consume_token(move.tokens[-1])

    def _draft_stage(self, moves: Sequence[Move]) -> None:
        size = self._bytes
        start = self.draft.ctypes.data
        for j in range(self._length):
            for move in moves:
                if j >= len(move.drafts):
                    continue
                matcher = self._matchers[move.slot]
                if j:
                    matcher.consume_token(move.drafts[j - 1])
                row = start + (move.slot * self._width + j) * size
                matcher.unsafe_compute_mask_ptr(row, size)
                self.fills += 1
        for move in moves:
            if len(move.drafts) > 1:
                self._matchers[move.slot].rollback(len(move.drafts) - 1)


class LLGuidancePar(LLGuidanceLoop):
    """LLGuidance's parallel calls, the one for draft tokens included."""

    name = "LLGuidance, parallel calls"

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, threads: int = 1):
        import llguidance

        super().__init__(backend, slots, draft_length, threads)
        self._executor = llguidance.LLExecutor(num_threads=threads)
        self._rows = slots * self._width

    def _verify_stage(self, moves: Sequence[Move]) -> None:
        stop = self._stop
        plain, drafted = [], []
        for move in moves:
            matcher, row = self._matchers[move.slot], move.slot * self._width
            drafts = [draft for draft in move.tested if draft != stop]
            if drafts:
                drafted.append((matcher, row, drafts))
            else:  # the call for drafts refuses a matcher without any
                plain.append((matcher, row))
            self.fills += 1 + len(drafts)
        address = self.verify.ctypes.data
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, self._bytes, self._rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, address, self._bytes, self._rows
            )
        for move in moves:
            tokens = [token for token in move.tokens if token != stop]
            self._matchers[move.slot].consume_tokens(tokens)

    def _draft_stage(self, moves: Sequence[Move]) -> None:
        for j in range(self._length):
            reached = [move for move in moves if len(move.drafts) > j]
            if not reached:
                continue
            if j:
                self._executor.consume_token_par(
                    [(self._matchers[move.slot], move.drafts[j - 1]) for move in reached]
                )
            self._executor.unsafe_compute_mask_ptr(
                [(self._matchers[move.slot], move.slot * self._width + j) for move in reached],
                self.draft.ctypes.data, self._bytes, self._rows,
            )  # fmt: skip
            self.fills += len(reached)
        for move in moves:
            if len(move.drafts) > 1:
                self._matchers[move.slot].rollback(len(move.drafts) - 1)
