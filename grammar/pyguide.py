"""The guided worker in Python: the same steps as ``native/guide/worker.cpp``, line for line.

It is the fallback where no native worker can be used, and the native worker's oracle. The
invariants stand in ``native/guide/worker.h``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .matcher import Matcher

if TYPE_CHECKING:
    from .decoder import GuidedRequest

__all__ = ["PythonWorker"]

NOT_READY, FREE, READY, DEAD_END, ERROR = range(5)
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
    rows: int = 0
    chain_ended: bool = False
    ended: bool = False
    terminated: bool = False
    applied: int = 0
    drafts_of: int = 0
    log: list[int] = field(default_factory=list)


class PythonWorker:
    """Same interface as the native worker: publish, retire, run, counters, timeline, history."""

    def __init__(self, exchange: Any, slots: int, draft_length: int, vocab_size: int, ring: int):
        self._mask = exchange.field("mask").array
        self._state = exchange.field("row_state").array
        self._committed = exchange.field("committed").array
        self._drafted = exchange.field("drafted").array
        self._draft_length = draft_length
        self._vocab_size = vocab_size
        self._ring = ring
        self._slots = [_Slot(s) for s in range(slots)]
        self._snapshots: dict[int, Sequence[GuidedRequest]] = {}
        self._current: Sequence[GuidedRequest] | None = None
        self._replay = 0
        self._error = ""
        self._spans: deque[tuple[int, int, int, int]] = deque()
        names = (
            "replays missing_snapshots joins fills accepts rollbacks commits committed_tokens "
            "refused_drafts terminations dead_ends desyncs errors free_rows probes probe_misses "
            "late_rows budget_stalls"
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
            if slot.ended:
                continue
            if slot.rows == 0:
                self._fill(slot, 0)
            drafted = self._drafted[slot.index]
            if slot.drafts_of != 0 and self._replay_of(drafted) == slot.drafts_of:
                v = int(drafted[1])
                if not 0 <= v <= self._draft_length:
                    self._fail(slot)
                for j in range(1, v + 1):
                    if slot.ended or slot.chain_ended or slot.rows > v:
                        break
                    if not self._advance(slot, j, int(drafted[1 + j])):
                        break
            self._roll_back(slot)

    def _commit(self) -> None:
        for request in self._current or ():
            slot = self._slots[request.slot]
            if slot.matcher is not None:
                self._apply_commit(slot, self._replay)

    def _draft(self, j: int) -> None:
        for request in self._current or ():
            slot = self._slots[request.slot]
            if slot.matcher is None or slot.ended or slot.chain_ended:
                continue
            drafted = self._drafted[slot.index]
            if slot.drafts_of != self._replay or self._replay_of(drafted) != self._replay:
                continue
            if int(drafted[1]) < j or slot.scratch != j - 1:
                continue
            self._advance(slot, j, int(drafted[1 + j]))

    def _join(self, slot: _Slot, request: GuidedRequest) -> None:
        self._invalidate(slot)
        self._count["joins"] += 1
        slot.joined = True
        slot.epoch = request.epoch
        slot.n = request.position
        slot.matcher = request.matcher
        slot.scratch = 0
        slot.chain_ended = slot.ended = slot.terminated = False
        slot.applied = self._replay - 1
        slot.drafts_of = 0
        slot.log = []
        if slot.matcher is None:
            for j in range(self._draft_length + 1):
                self._stamp(slot, j, FREE, 0)
            slot.rows = self._draft_length + 1

    def _apply_commit(self, slot: _Slot, latest: int) -> None:
        committed = self._committed[slot.index]
        replay = self._replay_of(committed)
        if replay <= slot.applied or slot.ended:
            return
        count = int(committed[1])
        slot.applied = replay
        if count == 0 and replay <= latest:
            return
        self._roll_back(slot)
        self._invalidate(slot)
        slot.drafts_of = replay
        if slot.ended or replay > latest or not 0 <= count <= self._draft_length + 1:
            self._count["desyncs"] += 1
            self._fail(slot)
            return
        slot.n += count
        self._count["commits"] += 1
        for token in committed[2 : 2 + count].tolist():
            if not self._accept(slot, token):
                self._count["desyncs"] += 1
                self._fail(slot)
                return
            slot.log.append(token)
            self._count["committed_tokens"] += 1
        if slot.terminated:
            self._count["terminations"] += 1
            slot.ended = True
            self._stamp(slot, 0, DEAD_END, slot.n)
            return
        self._fill(slot, 0)

    def _advance(self, slot: _Slot, j: int, token: int) -> bool:
        if slot.scratch < j:
            if not self._accept(slot, token):
                slot.chain_ended = True
                self._count["refused_drafts"] += 1
                return False
            slot.scratch = j
        if slot.terminated:
            slot.chain_ended = True
            return False
        if slot.rows <= j:
            self._fill(slot, j)
        return not slot.ended and not slot.chain_ended

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
        try:
            constrained = slot.matcher.fill(row)
        except RuntimeError as error:
            self._internal_error(slot, error)
            return
        slot.rows = j + 1
        if not constrained:
            self._count["free_rows"] += 1
            self._stamp(slot, j, FREE, slot.n + j)
            return
        if row.any():
            self._stamp(slot, j, READY, slot.n + j)
            return
        self._count["dead_ends"] += 1
        self._stamp(slot, j, DEAD_END, slot.n + j)
        slot.chain_ended = True
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
        slot.rows = 0
        slot.chain_ended = False

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
        row[1:] = (slot.epoch, position, 0)
        row[0] = state

    def _replay_of(self, row: np.ndarray) -> int:
        difference = (int(row[0]) - self._replay) & 0xFFFFFFFF
        return self._replay + (difference ^ 0x80000000) - 0x80000000
