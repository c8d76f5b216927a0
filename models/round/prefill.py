"""Chunked prefill: KV-cache entries of prompts are computed between the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from graft.cudagraph.device import Device
from graft.cudagraph.graph.exec import GraphExec
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.models.drafters.base import Drafter
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.round.ema import Ema

__all__ = ["CHUNK", "CHUNK_SIZES", "Prefill", "PrefillChunk", "PrefillScheduler", "chunk_size"]

_THREADS = 128
_KERNELS = Path(__file__).parent / "kernels" / "prefill.cu"

#: Numbers of rows of a chunk's forward pass; each size has its own CUDA graph. `CHUNK` is the
#: greatest size. A forward pass reads the weights once for any number of rows, so large chunks take
#: less time per row.
CHUNK_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
CHUNK = CHUNK_SIZES[-1]
#: Sizes up to this one may contain padding. The time of a larger size is proportional to its number
#: of rows, so a larger size is used only if the prompt fills all its rows.
MAX_PADDED_SIZE = 256

#: Maximum time for prefill between two rounds, as a fraction of the time of a round.
MAX_ROUND_FRACTION = 0.8
#: Weight of a new sample in the moving average of a chunk size's times.
TIME_WEIGHT = 0.2
#: Each time a chunk size is skipped because it takes too long, its average time is multiplied by
#: this factor. A size whose average is too high because of an outlier is thus tried again later.
FORGET = 0.9998


class PrefillChunk(NamedTuple):
    """A prefill chunk that has been enqueued.

    Attributes
    ----------
    rows
        Number of prompt tokens.
    is_done
        Function that returns whether the device has completed the chunk.
    elapsed_s
        Function that returns the device time of the completed chunk in seconds.
    """

    rows: int
    is_done: Callable[[], bool]
    elapsed_s: Callable[[], float]


class PrefillScheduler:
    """Chooses the number of prompt tokens that are prefilled between two rounds.

    By default, it is the greatest number of rows (prompt tokens) whose measured time, including the
    launch, is at most `MAX_ROUND_FRACTION` of a round. Prefill therefore delays the next token of a
    running request by less than the time of a round.

    The time of a chunk size is measured, because it is not proportional to the number of rows: a
    forward pass reads the weights once for any number of rows. Twice the rows take at most twice
    the time. A size that has not been measured is tried if twice the time of the next smaller size
    is short enough.

    Parameters
    ----------
    fixed_rows
        Number of prompt tokens between two rounds; None to choose it by measured times.
    """

    def __init__(self, fixed_rows: int | None) -> None:
        self._fixed_rows = fixed_rows
        self._times_s: dict[int, Ema] = {}  # by chunk size

    def record_time(self, rows: int, seconds: float) -> None:
        """Record the time of a chunk."""
        size = chunk_size(rows)
        self._times_s.setdefault(size, Ema(TIME_WEIGHT, max_ratio=2.0)).update(seconds)

    def rows(self, round_s: float) -> int:
        """Return the number of prompt tokens to prefill before the next round.

        The round is expected to take `round_s` seconds.
        """
        if self._fixed_rows:
            return self._fixed_rows
        limit_s = MAX_ROUND_FRACTION * round_s
        rows = CHUNK_SIZES[0]
        expected_s = math.inf
        for size in CHUNK_SIZES:
            measured_s = self._time_s(size, math.inf)
            expected_s = min(measured_s, 2 * expected_s)
            if expected_s > limit_s:
                if size in self._times_s:
                    self._times_s[size].scale(FORGET)
                return rows
            rows = size
        return rows

    def charged_rows(self, rows: int, allowed: int) -> int:
        """Return the number of `allowed` rows that a chunk of `rows` rows uses up.

        Small chunks take more time per row than large ones. The result is therefore the number of
        rows that a chunk of `allowed` rows would process in the time of this chunk, at least `rows`
        and at most `allowed`.

        Parameters
        ----------
        rows
            Rows of the chunk.
        allowed
            Number of prompt tokens that may still be prefilled before the next round.
        """
        if self._fixed_rows:
            return rows
        size = chunk_size(min(allowed, CHUNK))
        rows_per_second = size / max(self._time_s(size, math.inf), 1e-9)
        chunk_s = self._time_s(chunk_size(rows), 0.0)
        return max(rows, min(int(chunk_s * rows_per_second), allowed))

    def _time_s(self, size: int, default: float) -> float:
        """Return the average time that chunks of a size took, or `default` if none was measured."""
        average = self._times_s.get(size)
        if average is None or average.value is None:
            return default
        return average.value


def chunk_size(rows: int) -> int:
    """Return the smallest chunk size with at least `rows` rows."""
    return next(size for size in CHUNK_SIZES if size >= rows)


class Prefill:
    """Runs prompts through target and drafter in chunks (chunked prefill).

    For a prompt t_0 .. t_{P-1}, the target's KV cache gets positions 0 .. P-2, and the drafter's
    cache gets entries 0 .. P-2, of which entry i combines feature i with token t_{i+1}. The
    request's first round feeds the last prompt token to the target, so the first output token is
    sampled by the same code as all others. A kernel computes a row independently of the other rows,
    so outputs do not depend on the chunk boundaries.

    Each chunk is one graph launch. Without graphs, the host would need more time to launch the
    kernels of a short chunk one by one than the device needs to run them.

    Parameters
    ----------
    device
        Device of the models.
    target
        Target model.
    drafter
        Drafter; None without speculation.
    slots
        Number of slots. Each slot has its own buffer in pinned memory for its prompt, so that a
        prompt can be enqueued while the copy of another slot's prompt is still pending.
    max_length
        Maximum number of prompt tokens.
    programmatic
        Whether kernels use programmatic dependent launch.
    """

    def __init__(
        self,
        device: Device,
        target: LlamaModel,
        drafter: Drafter | None,
        *,
        slots: int,
        max_length: int,
        programmatic: bool,
    ):
        self._device = device
        self._programmatic = programmatic
        self._target = target
        self._drafter = drafter
        self._staging = [device.pinned(max_length, "int32") for _ in range(slots)]
        self._tokens = device.zeros(max_length, "int32")
        # Six arrays: token, next token, slot and position of each row for the target, and slot and
        # position of each row for the drafter.
        self._rows = device.zeros((6, CHUNK), "int32")
        self._features = None
        if drafter is not None and drafter.feature_layers:
            width = len(drafter.feature_layers) * target.config.hidden_size
            self._features = device.zeros((CHUNK, width), "float32")
        self._graphs: dict[int, tuple[Graph, GraphExec]] = {}
        self._write_rows = device.load(_KERNELS)["prompt_rows"]

    def warm(self, lane: StreamLane) -> list[PrefillChunk]:
        """Run a chunk of each size twice; all its rows are padding.

        The first run of a size compiles and loads its kernels, so that no prompt waits for the
        compiler between rounds.

        Returns
        -------
        list of PrefillChunk
            The second run of each size, whose time the caller passes to
            `PrefillScheduler.record_time`. Empty if all sizes use the same kernels; then no chunk
            is run.
        """
        self._add_rows(lane, 0, 0, 0, 0)
        if self._target.kernels.form == "thread":
            return []
        chunks = []
        for size in CHUNK_SIZES:
            self._launch(lane, size)
            chunks.append(self._launch(lane, size))
        return chunks

    def _launch(self, lane: StreamLane, rows: int) -> PrefillChunk:
        """Launch the forward pass of `rows` rows that `_add_rows` has written."""
        graph = self._graph(chunk_size(rows))
        begin = self._device.event("prefill", timing=True)
        end = self._device.event("prefill", timing=True)
        lane.record_event(begin)
        graph.launch(lane.stream)
        lane.record_event(end)
        return PrefillChunk(rows, end.query, partial(end.elapsed_s, begin))

    def _graph(self, size: int) -> GraphExec:
        """Return the graph of a chunk size; build it on first use."""
        if size not in self._graphs:
            name = f"prompt, {size} rows"
            graph = Graph(self._device, name, programmatic=self._programmatic)
            lane = graph.lane("prompt")
            arrays = [self._rows[i][:size] for i in range(6)]
            token, next_token, slot, pos, drafter_slot, drafter_pos = arrays
            features = None
            if self._features is not None:
                features = self._features[:size]
            target_rows = Rows(token, slot, pos, rows_per_slot=size)
            self._target.forward(lane, target_rows, features)
            if self._drafter is not None:
                entries = Rows(next_token, slot, pos, rows_per_slot=size)
                drafter_rows = Rows(token, drafter_slot, drafter_pos, rows_per_slot=size)
                self._drafter.prefill(lane, drafter_rows, entries, features)
            self._graphs[size] = graph, graph.instantiate()
        _, executable = self._graphs[size]
        return executable

    def _add_rows(self, lane: StreamLane, slot: int, begin: int, end: int, last: int) -> None:
        """Enqueue the kernel that writes the forward rows of prompt tokens `begin` to `end` - 1.

        The remaining rows of the prefill chunk become padding. `last` is the index of the prompt's
        last token, which is fed to the drafter only.
        """
        args = (self._tokens, slot, begin, end, last, CHUNK, self._rows)
        lane.kernel(self._write_rows, 1, _THREADS, args, name="prompt rows")

    def run(
        self,
        lane: StreamLane,
        slot: int,
        tokens: Sequence[int],
        num_cached: int,
        max_rows: Callable[[], int],
    ) -> Iterator[PrefillChunk]:
        """Enqueue the prefill of a prompt, one chunk per iteration.

        The caller must have set the slot's page tables. The device must have copied the previous
        prompt of the slot, because this method overwrites the slot's pinned buffer. A prompt must
        be enqueued completely before the next one begins.

        Parameters
        ----------
        lane
            Lane of the rounds.
        slot
            Slot of the request.
        tokens
            Token ids of the prompt.
        num_cached
            Number of leading tokens, fewer than all, whose entries exist in all caches.
        max_rows
            Called before each chunk; returns its maximum number of rows, at least 1.

        Yields
        ------
        PrefillChunk
            Each chunk, after it has been enqueued.
        """
        last = len(tokens) - 1
        end_of_prompt = last  # the first round feeds the last token to the target
        if self._drafter is not None:
            end_of_prompt += 1  # prefill feeds the last token to the drafter
        if num_cached == end_of_prompt:
            return
        self._staging[slot].array[: last + 1] = tokens
        lane.copy(self._tokens, self._staging[slot], name="prompt")
        if self._drafter is not None:
            self._resume(lane, self._drafter, slot, num_cached, last)
        begin = num_cached
        while begin < end_of_prompt:
            limit = max_rows()
            remaining = end_of_prompt - begin
            if remaining > MAX_PADDED_SIZE:
                limit = min(limit, remaining)
            fitting = [size for size in CHUNK_SIZES if size <= limit]
            num_rows = max(fitting, default=limit)
            end = min(begin + num_rows, end_of_prompt)
            self._add_rows(lane, slot, begin, end, last)
            yield self._launch(lane, end - begin)
            begin = end

    def _resume(
        self, lane: StreamLane, drafter: Drafter, slot: int, num_cached: int, last: int
    ) -> None:
        """Let the drafter process those tokens of a prompt that were in the prefix cache.

        The KV-cache entries of these tokens exist already. The drafter only updates the state that
        it keeps outside the KV cache. `last` is the index of the prompt's last token.
        """
        for begin in range(0, num_cached, CHUNK):
            end = min(begin + CHUNK, num_cached)
            self._add_rows(lane, slot, begin, end, last)
            token, drafter_slot, pos = (self._rows[i][: end - begin] for i in (0, 4, 5))
            drafter.resume(lane, Rows(token, drafter_slot, pos))

    def close(self) -> None:
        """Release the graphs."""
        for graph, executable in self._graphs.values():
            executable.close()
            graph.close()
        self._graphs.clear()
