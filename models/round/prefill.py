"""Prefill: the prompt's keys and values, written before a request joins the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from graft.cudagraph.device import Device
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.models.drafters.base import Drafter
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows

_THREADS = 128
_KERNELS = Path(__file__).parent / "kernels" / "prefill.cu"


class PrefillChunk(NamedTuple):
    """Rows of a prompt that were enqueued, and what tells whether the device is over them, and then
    how many seconds it had them."""

    rows: int
    over: Callable[[], bool]
    took_s: Callable[[], float]


#: Rows of a forward: each has a graph of its own. CHUNK is the most.
SIZES = (4, 8, 16, 32, 64, 128, 256)
CHUNK = SIZES[-1]
#: Of what lies between two rounds, where that is not given: the most rows, and how many rounds they
#: take. Of the times of a size: the last one's share, and what is left of one that was too long.
MOST = 1024
ROUNDS = 0.8
SHARE = 0.2
FORGET = 0.9998


class PrefillScheduler:
    """How many rows of prompts lie between two rounds: so many as are given, or the most, from 4 to
    1024, that take no longer than 0.8 of a round.

    So a token is not delayed by more than a round, what a launch costs the host included.

    What rows cost is known by measuring only, for a forward reads its weights for one or for
    hundreds. Twice as many take at most twice as long, so a size is tried unmeasured where that
    would do, and one that took longer by chance is tried again some hundred pieces later.
    """

    def __init__(self, given: int | None) -> None:
        # by size
        self._given = given
        self._took_s = dict[int, float]()

    def took(self, rows: int, seconds: float) -> None:
        """Take the time of one forward of a prompt."""
        size = size_of(rows)
        known = self._took_s.get(size) or seconds
        self._took_s[size] = known + SHARE * (min(seconds, 2 * known) - known)

    def rows(self, round_s: float) -> int:
        """Rows before the next round, which takes about so many seconds."""
        if self._given:
            return self._given
        most_s = ROUNDS * round_s
        rows = SIZES[0]
        needed_s = math.inf
        for size in SIZES:
            known = self._took_s.get(size, math.inf)
            needed_s = min(known, 2 * needed_s)
            if needed_s > most_s:
                self._took_s.update({size: FORGET * known} if known < math.inf else {})
                return rows
            rows = size
        return CHUNK * min(int(most_s / max(needed_s, 1e-9)), MOST // CHUNK)

    def used(self, rows: int, room: int) -> int:
        """Of the rows there is room for, those in whose time `rows` are run; at least these."""
        all_s = self._took_s.get(size_of(min(room, CHUNK)), math.inf)
        share = 0.0 if self._given else self._took_s.get(size_of(rows), 0.0) / max(all_s, 1e-9)
        return max(rows, int(min(share, 1.0) * min(room, CHUNK)))


def size_of(rows: int) -> int:
    """The least size of a forward that has room for so many rows."""
    return next(size for size in SIZES if size >= rows)


class Prefill:
    """Runs prompts through the target and the drafter on a lane, piece by piece.

    For a prompt t_0 .. t_{P-1} the target caches positions 0 .. P-2 and the drafter entries
    0 .. P-2, which pair feature i with token t_{i+1}. The last prompt token is left to the
    request's first round, whose row 0 feeds it like any other `last` token; so the first token is
    sampled by the very code that samples all others. Kernels are row-invariant, hence no bit
    depends on where a prompt is cut. A piece is the launch of a graph: enqueued kernel by kernel, a
    short one took the host longer than the device.

    Parameters
    ----------
    slots : every slot has a staging area of its own, so that a prompt may still be queued behind
        a running round while the next one is enqueued.
    max_length : longest prompt, tokens.
    """

    def __init__(
        self,
        device: Device,
        target: LlamaModel,
        drafter: Drafter | None,
        *,
        slots: int,
        max_length: int,
    ):
        self._device = device
        self._target = target
        self._drafter = drafter
        self._staged = [device.pinned(max_length, "int32") for _ in range(slots)]
        self._tokens = device.zeros(max_length, "int32")
        # Token, next token, slot and position; and slot and position of the drafter's own rows.
        self._rows = device.zeros((6, CHUNK), "int32")
        self._features = (
            device.zeros((CHUNK, len(drafter.taps) * target.config.hidden_size), "float32")
            if drafter is not None and drafter.taps
            else None
        )
        self._graphs: dict[int, tuple[Graph, GraphExec]] = {}
        self._lay = device.load(_KERNELS)["prompt_rows"]

    def warm(self, lane: StreamLane) -> list[PrefillChunk]:
        """Run padding in every size where sizes have kernels of their own, lest the first prompts
        wait for a compiler between rounds; and again, to know how long that takes."""
        self._lay_out(lane, 0, 0, 0, 0)
        sizes = () if self._target.kernels.form == "thread" else SIZES
        return [self._launch(lane, size) for size in sizes for _ in range(2)][1::2]

    def _launch(self, lane: StreamLane, rows: int) -> PrefillChunk:
        """Enqueue the forward of so many rows, once they are laid out."""
        graph = self._graph(size_of(rows))
        begun, over = (self._device.event("prefill", timing=True) for _ in range(2))
        lane.record_event(begun)
        graph.launch(lane.stream)
        lane.record_event(over)
        return PrefillChunk(rows, over.query, partial(over.elapsed_s, begun))

    def _graph(self, size: int) -> GraphExec:
        """A forward of so many rows, made when it is first needed."""
        if size not in self._graphs:
            graph = Graph(self._device, f"prompt, {size} rows")
            lane = graph.lane("prompt")
            token, after, slot, pos, own_slot, own_pos = (self._rows[i][:size] for i in range(6))
            features = None if self._features is None else self._features[:size]
            self._target.forward(lane, Rows(token, slot, pos, rows_per_slot=size), features)
            if self._drafter is not None:
                entries = Rows(after, slot, pos, rows_per_slot=size)
                own = Rows(token, own_slot, own_pos, rows_per_slot=size)
                self._drafter.prefill(lane, own, entries, features)
            self._graphs[size] = graph, graph.instantiate()
        return self._graphs[size][1]

    def _lay_out(self, lane: StreamLane, slot: int, begin: int, end: int, last: int) -> None:
        """Let the rows be tokens `begin` to `end`, and padding."""
        args = (self._tokens, slot, begin, end, last, CHUNK, self._rows)
        lane.kernel(self._lay, 1, _THREADS, args, name="prompt rows")

    def run(
        self,
        lane: StreamLane,
        slot: int,
        tokens: Sequence[int],
        cached: int,
        most: Callable[[], int],
    ) -> Iterator[PrefillChunk]:
        """Enqueue the prefill of `tokens` for `slot`; the slot's page tables are set already.

        An earlier prompt of the same slot must have been prefilled by now: its staging area is
        rewritten. No other prompt may be begun before this one was enqueued as a whole.

        Parameters
        ----------
        cached : of the first tokens, fewer than all, whose entries all caches hold.
        most : asked before each piece how many rows it may have, at least 1.

        Yields
        ------
        Piece
            After each.
        """
        last = len(tokens) - 1
        whole = last + (self._drafter is not None)  # the last token is the drafter's alone
        if cached == whole:
            return
        self._staged[slot].array[: last + 1] = tokens
        lane.copy(self._tokens, self._staged[slot], name="prompt")
        if self._drafter is not None:
            for begin in range(0, cached, CHUNK):
                end = min(begin + CHUNK, cached)
                self._lay_out(lane, slot, begin, end, last)
                token, slots, pos = (self._rows[i][: end - begin] for i in (0, 4, 5))
                self._drafter.resume(lane, Rows(token, slots, pos))
        begin = cached
        while begin < whole:
            room = most()
            end = min(begin + max((size for size in SIZES if size <= room), default=room), whole)
            self._lay_out(lane, slot, begin, end, last)
            yield self._launch(lane, end - begin)
            begin = end

    def close(self) -> None:
        """Drop the graphs."""
        for graph, executable in self._graphs.values():
            executable.close()
            graph.close()
        self._graphs.clear()
