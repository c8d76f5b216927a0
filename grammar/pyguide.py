"""The guided worker in Python: the same steps as ``native/guide/worker.cpp``, line for line.

It is the fallback where no native worker can be used, and the native worker's oracle. The
invariants stand in ``native/guide/worker.h``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .forced import ForcedText
from .matcher import Matcher
from .snapshot import GuidedRequest

__all__ = ["PythonWorker"]

NOT_READY, FREE, READY, DEAD_END, ERROR = range(5)
NEVER = 2**31 - 1
TIMELINE_REPLAYS = 256
STEPS = ("open", "commit", "draft")


@dataclass
class _Slot:
    index: int
    joined: bool = False
    epoch: int = 0
    n: int = 0
    matcher: Matcher | None = None
    scratch: int = 0
    chain_end: int = NEVER
    made: list[int] = field(default_factory=list)
    ended: bool = False
    terminated: bool = False
    applied: int = 0
    drafts_of: int = 0
    forced: list[int] = field(default_factory=list)
    tested: int = 0
    log: list[int] = field(default_factory=list)


class PythonWorker:
    """Same interface as the native worker: publish, retire, run, counters, timeline, history."""

    def __init__(
        self,
        exchange: Any,
        slots: int,
        draft_length: int,
        vocab_size: int,
        ring: int,
        most_candidates: int = 0,
        forced: ForcedText | None = None,
        chain: bool = False,
    ):
        self._forced, self._chain = forced, chain
        self._mask = exchange.field("mask").array
        self._state = exchange.field("row_state").array
        self._committed = exchange.field("committed").array
        self._drafted = exchange.field("drafted").array
        self._candidates = self._answers = None
        if most_candidates:
            self._candidates = exchange.field("candidates").array
            self._answers = exchange.field("answers").array
        self._most_candidates = most_candidates
        self._draft_length = draft_length
        self._vocab_size = vocab_size
        self._ring = ring
        rows = draft_length + 1
        self._slots = [
            _Slot(s, made=[NOT_READY] * rows, forced=[-1] * rows) for s in range(slots)
        ]
        self._snapshots: dict[int, Sequence[GuidedRequest]] = {}
        self._current: Sequence[GuidedRequest] | None = None
        self._replay = 0
        self._error = ""
        self._spans: deque[tuple[int, int, int, int]] = deque()
        names = (
            "replays missing_snapshots joins fills accepts rollbacks commits committed_tokens "
            "refused_drafts terminations dead_ends desyncs errors free_rows probes probe_misses "
            "late_rows budget_stalls forced_rows forced_tokens"
        )
        self._count = dict.fromkeys(names.split(), 0)
        self._count.update({f"{s}_{c}": 0 for s in STEPS for c in ("calls", "ns")})
        self._state[...] = 0

    # Called by the publishing thread.

    def publish(self, replay: int, requests: Sequence[GuidedRequest]) -> bool:
        if any(other % self._ring == replay % self._ring for other in self._snapshots):
            return False
        self._snapshots[replay] = tuple(requests)
        return True

    def retire(self, replay: int) -> bool:
        return self._snapshots.pop(replay, None) is not None

    def busy(self, slot: int) -> bool:
        return False

    def wait_idle(self) -> None:
        return

    def unapplied(self, slot: int) -> list[int]:
        committed = self._committed[slot]
        count, ended = int(committed[1]), self._slots[slot].ended
        if self._replay_of(committed) <= self._slots[slot].applied or ended:
            return []
        return [int(token) for token in committed[2 : 2 + count]]

    def counters(self) -> dict[str, int]:
        return dict(self._count)

    def timeline(self) -> list[tuple[int, int, int, int]]:
        return list(self._spans)

    def first_error(self) -> str:
        return self._error

    def history(self, slot: int) -> tuple[int, list[int]]:
        return self._slots[slot].epoch, list(self._slots[slot].log)

    # Steps.

    def run(self, kind: int, draft: int) -> None:
        start = time.monotonic_ns()
        if kind == 0:
            self._open()
        elif kind == 1:
            self._commit()
        else:
            self._draft(draft)
        end = time.monotonic_ns()
        self._count[STEPS[kind] + "_calls"] += 1
        self._count[STEPS[kind] + "_ns"] += end - start
        self._spans.append((self._replay, kind + max(draft - 1, 0), start, end))
        while self._spans[0][0] <= self._replay - TIMELINE_REPLAYS:
            self._spans.popleft()

    def _open(self) -> None:
        self._replay += 1
        self._count["replays"] += 1
        self._current = self._snapshots.get(self._replay)
        if self._current is None:
            self._count["missing_snapshots"] += 1
            return
        for request in self._current:
            slot = self._slots[request.slot]
            if not slot.joined or slot.epoch != request.epoch:
                self._join(slot, request)
            if slot.matcher is None:
                self._count["free_rows"] += self._draft_length + 1
                continue
            self._apply_commit(slot, self._replay - 1)
            drafts = [] if slot.ended else self._drafts(slot, slot.drafts_of)
            if not slot.ended:
                self._make_rows(slot, drafts)

    def _commit(self) -> None:
        for request in self._current or ():
            slot = self._slots[request.slot]
            if slot.matcher is None:
                continue
            applied = self._apply_commit(slot, self._replay)
            if applied and not slot.ended and not self._most_candidates:
                self._fill(slot, 0)
                if self._chain:
                    self._follow(slot)

    def _draft(self, j: int) -> None:
        for request in self._current or ():
            slot = self._slots[request.slot]
            if slot.matcher is None or slot.ended or slot.drafts_of != self._replay:
                continue
            drafts = self._drafts(slot, self._replay)
            if slot.ended:
                continue
            if self._most_candidates:
                if len(drafts) == j - 1:
                    self._probe(slot, j, drafts)
            elif len(drafts) >= j and slot.scratch == j - 1 and j < slot.chain_end:
                self._advance(slot, j, drafts[j - 1])

    def _join(self, slot: _Slot, request: GuidedRequest) -> None:
        self._invalidate(slot)
        self._count["joins"] += 1
        slot.joined = True
        slot.epoch = request.epoch
        slot.n = request.position
        slot.matcher = request.matcher
        slot.scratch = 0
        slot.ended = slot.terminated = False
        slot.applied = self._replay - 1
        slot.drafts_of = 0
        slot.log = []
        if slot.matcher is None:
            for j in range(self._draft_length + 1):
                self._stamp(slot, j, FREE, 0)

    def _apply_commit(self, slot: _Slot, latest: int) -> bool:
        committed = self._committed[slot.index]
        replay = self._replay_of(committed)
        if replay <= slot.applied or slot.ended:
            return False
        count = int(committed[1])
        slot.applied = replay
        if count == 0 and replay <= latest:
            return False
        self._roll_back(slot)
        self._invalidate(slot)
        slot.drafts_of = replay
        if slot.ended or replay > latest or not 0 <= count <= self._draft_length + 1:
            self._count["desyncs"] += 1
            self._fail(slot)
            return True
        slot.n += count
        self._count["commits"] += 1
        for i, token in enumerate(committed[2 : 2 + count].tolist()):
            if not self._accept(slot, token):
                self._count["desyncs"] += 1
                self._fail(slot)
                return True
            slot.log.append(token)
            self._count["committed_tokens"] += 1
            taken = self._forced is not None and i < slot.tested and token == slot.forced[i]
            self._count["forced_tokens"] += taken
        slot.tested = 0
        if slot.terminated:
            self._count["terminations"] += 1
            slot.ended = True
            self._stamp(slot, 0, DEAD_END, slot.n)
        return True

    def _drafts(self, slot: _Slot, of: int) -> list[int]:
        """The drafts of replay ``of``, where they follow the slot's present state."""
        drafted = self._drafted[slot.index]
        if of == 0 or self._replay_of(drafted) != of:
            return []
        v = int(drafted[1])
        if not 0 <= v <= self._draft_length:
            self._fail(slot)
            return []
        return [int(token) for token in drafted[2 : 2 + v]]

    def _make_rows(self, slot: _Slot, drafts: list[int]) -> None:
        rows = min(len(drafts) + 1, slot.chain_end)
        slot.tested = len(drafts)
        missing = [j for j in range(rows) if slot.made[j] == NOT_READY]
        if missing:
            if missing[0] < slot.scratch:
                self._roll_back(slot)
            if not slot.ended and slot.made[slot.scratch] == NOT_READY:
                self._fill(slot, slot.scratch)
            for j in range(slot.scratch + 1, missing[-1] + 1):
                if slot.ended or j >= slot.chain_end or not self._advance(slot, j, drafts[j - 1]):
                    break
        self._roll_back(slot)

    def _advance(self, slot: _Slot, j: int, token: int) -> bool:
        if not self._accept(slot, token):
            slot.chain_end = j
            self._count["refused_drafts"] += 1
            return False
        slot.scratch = j
        if slot.terminated:
            slot.chain_end = j
            return False
        if slot.made[j] == NOT_READY:
            self._fill(slot, j)
        return not slot.ended and slot.chain_end > j

    def _follow(self, slot: _Slot) -> None:
        for j in range(1, self._draft_length):
            if slot.ended or slot.made[j - 1] == NOT_READY or slot.forced[j - 1] < 0:
                return
            if not self._advance(slot, j, slot.forced[j - 1]):
                return

    def _probe(self, slot: _Slot, j: int, drafts: list[int]) -> None:
        assert self._candidates is not None and self._answers is not None
        record = self._candidates[slot.index]
        if self._replay_of(record) != self._replay or int(record[1]) != j:
            return
        if not 0 <= int(record[2]) <= self._most_candidates:
            self._fail(slot)
            return
        for i in range(slot.scratch + 1, j):  # drawn from a row
            if i >= slot.chain_end:
                break
            if not self._accept(slot, drafts[i - 1]):
                self._count["refused_drafts"] += 1
                slot.chain_end = i
                return
            slot.scratch = i
            if slot.terminated:
                slot.chain_end = i
        if slot.scratch != j - 1 or slot.chain_end < j:
            return
        answer = self._answers[slot.index]
        for token in record[3 : 3 + int(record[2])].tolist():
            self._count["probes"] += 1
            if self._accept(slot, token):
                slot.scratch = j
                if slot.terminated:
                    slot.chain_end = j
                answer[:3] = (record[0], j, token)
                return
            if slot.ended:
                return
        self._count["probe_misses"] += 1
        if slot.made[j - 1] == NOT_READY:
            self._fill(slot, j - 1)
        if not slot.ended:
            answer[:3] = (record[0], j, -1)

    def _accept(self, slot: _Slot, token: int) -> bool:
        assert slot.matcher is not None
        if slot.ended or slot.terminated or not 0 <= token < self._vocab_size:
            return False
        self._count["accepts"] += 1
        try:
            if not slot.matcher.accept(token):
                return False
            slot.terminated = slot.matcher.is_terminated()
        except RuntimeError as error:
            self._internal_error(slot, error)
            return False
        return True

    def _fill(self, slot: _Slot, j: int) -> None:
        assert slot.matcher is not None
        self._count["fills"] += 1
        row = self._mask[slot.index, j]
        slot.forced[j] = -1
        try:
            constrained = slot.matcher.fill(row)
        except RuntimeError as error:
            self._internal_error(slot, error)
            return
        if not constrained:
            self._count["free_rows"] += 1
            self._stamp(slot, j, FREE, slot.n + j)
            return
        if row.any():
            if self._forced is not None:
                slot.forced[j] = self._forced.token(row)
                self._count["forced_rows"] += slot.forced[j] >= 0
            self._stamp(slot, j, READY, slot.n + j)
            return
        self._count["dead_ends"] += 1
        self._stamp(slot, j, DEAD_END, slot.n + j)
        slot.chain_end = min(slot.chain_end, j + 1)
        if j == 0:
            slot.ended = True

    def _roll_back(self, slot: _Slot) -> None:
        if slot.scratch == 0 or slot.ended:
            return
        assert slot.matcher is not None
        self._count["rollbacks"] += 1
        try:
            slot.matcher.rollback(slot.scratch)
        except RuntimeError as error:
            self._internal_error(slot, error)
        slot.scratch = 0
        slot.terminated = False

    def _invalidate(self, slot: _Slot) -> None:
        for j in range(self._draft_length + 1):
            self._stamp(slot, j, NOT_READY, 0)
        slot.chain_end = NEVER

    def _internal_error(self, slot: _Slot, error: Exception) -> None:
        self._error = self._error or str(error)[:255]
        self._fail(slot)

    def _fail(self, slot: _Slot) -> None:
        self._count["errors"] += 1
        slot.ended = True
        self._stamp(slot, 0, ERROR, slot.n)

    def _stamp(self, slot: _Slot, j: int, state: int, position: int) -> None:
        row = self._state[slot.index, j]
        row[0] = NOT_READY
        more = int(state == FREE and slot.matcher is None)
        row[1:] = (slot.epoch, position, 1 + slot.forced[j] if state == READY else more)
        row[0] = state
        slot.made[j] = state

    def _replay_of(self, row: np.ndarray) -> int:
        difference = (int(row[0]) - self._replay) & 0xFFFFFFFF
        return self._replay + (difference ^ 0x80000000) - 0x80000000
