"""Prefill: the prompt's keys and values, written before a request joins the rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.lanes import StreamLane
from graft.models.drafters.base import Drafter
from graft.models.llama import LlamaModel
from graft.models.rows import Rows


class Piece(NamedTuple):
    """Rows of a prompt that were enqueued, and what tells whether the device is over them, and then
    how many seconds it had them."""

    rows: int
    over: Callable[[], bool]
    took_s: Callable[[], float]


#: Rows of one forward at most; and of what lies between two rounds, where that is not given.
CHUNK, FEWEST, MOST = 256, 16, 1024
#: Where that ends to grow, in rounds, and by how much it grows at most.
ROUNDS, GROWTH = 1.2, 1.25


class Pieces:
    """How many rows of prompts lie between two rounds: so many as are given, or as take about as
    long as a round, from 16 to 1024.

    What rows cost is known only by measuring, for a forward reads its weights for one or for
    hundreds. There are more by a quarter after each forward that took no more than 1.2 rounds, so
    none takes longer than 1.5 for long; where 16 rows take longer than a round, so may more.
    """

    def __init__(self, given: int | None) -> None:
        self._given, self._rows, self._least_s = given, FEWEST, 0.0  # 0: not known
        self._last: tuple[int, float] | None = None

    def took(self, rows: int, seconds: float) -> None:
        """Take the time of one forward of a prompt."""
        if rows == min(self._rows, CHUNK):
            self._least_s = min(seconds, self._least_s or seconds)
        if rows in (self._rows, CHUNK):
            self._last = rows, seconds

    def rows(self, round_s: float) -> int:
        """Rows before the next round, which takes about so many seconds."""
        if self._last is not None:
            (rows, seconds), self._last = self._last, None
            most_s = ROUNDS * max(round_s, self._least_s)
            if seconds > most_s:  # more rows, of a prompt that nobody waits for, say nothing
                if rows <= self._rows:
                    self._rows = max(int(rows * max(most_s / seconds, 0.5)), FEWEST)
            elif rows == CHUNK:
                self._rows = CHUNK * min(int(most_s / max(seconds, 1e-9)), MOST // CHUNK)
            else:
                self._rows = min(int(rows * GROWTH), CHUNK)
        return self._given or self._rows


class Prefill:
    """Runs prompts through the target and the drafter on a lane, in chunks of `chunk` rows.

    For a prompt t_0 .. t_{P-1} the target caches positions 0 .. P-2 and the drafter entries
    0 .. P-2, which pair feature i with token t_{i+1}. The last prompt token is left to the
    request's first round, whose row 0 feeds it like any other `last` token; so the first token is
    sampled by the very code that samples all others. Kernels are row-invariant, hence chunking
    changes no bit.

    Parameters
    ----------
    slots : every slot has a staging area of its own, so that a prompt may still be queued behind
        a running round while the next one is enqueued.
    chunk : most rows per forward; the models' workspaces must hold as many.
    max_length : longest prompt, tokens.
    """

    def __init__(
        self,
        device: Device,
        target: LlamaModel,
        drafter: Drafter | None,
        *,
        slots: int,
        chunk: int,
        max_length: int,
    ):
        self._device, self._target, self._drafter = device, target, drafter
        self._chunk = chunk
        # Rows: token, next token, slot, position.
        self._staged = [device.pinned((4, max_length), "int32") for _ in range(slots)]
        self._rows = device.zeros((4, max_length), "int32")
        self._features = (
            device.zeros((chunk, len(drafter.taps) * target.config.hidden_size), "float32")
            if drafter is not None and drafter.taps
            else None
        )

    def warm(self, lane: StreamLane) -> None:
        """Run padding in every number of rows that has kernels of its own, lest the first prompts
        wait for a compiler between rounds."""
        none = self._device.from_host(np.full(self._chunk, -1, np.int32))
        sizes = () if self._target.layers.form == "thread" else (4, 8, 16, 32, 64, self._chunk)
        for rows in sizes:
            padding = Rows(none[:rows], none[:rows], none[:rows], run=rows)
            features = None if self._features is None else self._features[:rows]
            self._target.forward(lane, padding, features)
            if self._drafter is not None:
                self._drafter.prefill(lane, padding, padding, features)

    def run(
        self, lane: StreamLane, slot: int, tokens: Sequence[int], cached: int,
        most: Callable[[], int],
    ) -> Iterator[Piece]:  # fmt: skip
        """Enqueue the prefill of `tokens` for `slot`; the slot's page tables are set already.

        An earlier prompt of the same slot must have been prefilled by now: its staging area is
        rewritten. No other prompt may be begun before this one was enqueued as a whole.

        Parameters
        ----------
        cached : of the first tokens, fewer than all, whose entries all caches hold.
        most : asked before each chunk how many rows it may have, at least 1.

        Yields
        ------
        Piece
            After each chunk.
        """
        last = len(tokens) - 1
        if last == cached and self._drafter is None:
            return
        staged = self._staged[slot].array[:, : last + 1]
        staged[0], staged[2], staged[3] = tokens, slot, np.arange(last + 1)
        staged[1, :-1] = tokens[1:]
        lane.copy(self._rows, self._staged[slot], name="prompt")
        token, following, slots, pos = (self._rows[i] for i in range(4))
        if self._drafter is not None:
            for begin in range(0, cached, self._chunk):
                end = min(begin + self._chunk, cached)
                self._drafter.resume(lane, Rows(token[begin:end], slots[begin:end], pos[begin:end]))
        begin, end = cached, -1
        while end < last:
            end = min(begin + min(self._chunk, most()), last)
            begun, over = (self._device.event("prefill", timing=True) for _ in range(2))
            lane.record_event(begun)
            features = entries = None
            if end > begin:
                run = end - begin
                rows = Rows(token[begin:end], slots[begin:end], pos[begin:end], run=run)
                entries = Rows(following[begin:end], slots[begin:end], pos[begin:end], run=run)
                features = None if self._features is None else self._features[: end - begin]
                self._target.forward(lane, rows, features)
            if self._drafter is not None:
                stop = end + (end == last)
                own = Rows(
                    token[begin:stop], slots[begin:stop], pos[begin:stop], run=stop - begin
                )
                self._drafter.prefill(lane, own, entries, features)
            lane.record_event(over)
            yield Piece(max(end - begin, 1), over.query, partial(over.elapsed_s, begun))
            begin = end
