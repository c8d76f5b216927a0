"""Benchmark of the host time per step: scheduler, slot manager and KV-cache page allocator.

    python -m graft.tools.bench.host_time [--batch 64] [--pages 100000] [--waiting 1000]
        [--steps 300] [--json FILE]

The engine's scheduler runs rounds of `batch` requests on a device that needs no time: each round
commits one token per request. The times therefore include only work of the host that a GPU may have
to wait for. They do not include the launch of the graph.

Each case of `CASES` is measured four times: without and with pages in the prefix cache, each
without and with waiting requests. If there are cached pages, the prompts of the waiting requests
begin with tokens of these pages. In the case "too few pages", they do not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.errors import GraftError
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PrefixCache
from graft.models.engine.promotion import Promotion
from graft.models.engine.replay import RowAssignment, RowResult
from graft.models.engine.request_state import RequestState
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.selection import GraphKey, GraphSelector
from graft.models.engine.slots import SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.request import Output, Request
from graft.models.round.prefill import PrefillScheduler
from graft.tools.bench.harness import add_counts, finish, make_parser
from graft.tools.console import program, table

#: Measured cases. In "full batch", no batch row is free. In "too few pages", a batch row is free,
#: but each waiting request needs more pages than are free, and none of its tokens are cached. In
#: "too few pages, cached prompts", most tokens of a waiting request are cached, but it still needs
#: more pages than are free. In "loop launch", a step launches a generation loop of many rounds.
CASES = ("full batch", "too few pages", "too few pages, cached prompts", "loop launch")
_PAGE_SIZE = 16
_PROMPT = 1024
_SHARED = 512  # number of cached tokens of a waiting request's prompt
_LONG_PROMPT = 1 << 16  # prompt length of a waiting request for which there are too few pages
_MAX_CACHED = 1 << 16  # maximum number of cached tokens of a prompt
#: In the case with cached prompts: number of uncached tokens of a waiting prompt, per running
#: request. These tokens must need more pages than are free, so that no waiting request starts. The
#: free pages hold about `_MAX_STEPS` tokens of output per running request.
_UNCACHED_PER_REQUEST = 640
_MAX_LENGTH = 1 << 17
_WARM_STEPS = 20
#: Maximum number of steps. After more steps, the running requests would run out of pages.
_MAX_STEPS = 500


class Measurement(NamedTuple):
    """Median time of a step, for a case, a number of cached pages and one of waiting requests."""

    case: str
    pages: int
    waiting: int
    us: float


class _Replays:
    """Replaces the engine's `Replays`: a round commits one token per request and does no more."""

    looping = False
    round_s = 0.0

    def __init__(self) -> None:
        self.launched = 0
        self.unread: deque[Any] = deque()

    @property
    def retired(self) -> int:
        return self.launched - len(self.unread)

    def launch(self, graph: Any, states: Sequence[RequestState], *_: Any, **__: Any) -> None:
        self.launched += 1
        rows = tuple(RowAssignment(state, state.slot, state.epoch) for state in states)
        self.unread.append(SimpleNamespace(number=self.launched, graph=graph, rows=rows))

    def wait(self, *_: Any) -> Any:
        return self.unread[0]

    def row(self, index: int) -> RowResult:
        slot = self.unread[0].rows[index].slot
        return RowResult(slot, 0, accepted=0, tested=0, cut=0, relaxed=0, tokens=[7])

    def finish(self) -> None:
        self.unread.popleft()

    def wait_idle(self, _: EngineStats) -> None:
        pass


class HostRounds:
    """Scheduler and slot manager of an engine, set up with running requests for one of `CASES`.

    `batch` is the number of running requests, `pages` the number of cached pages, and `waiting` the
    number of waiting requests.
    """

    def __init__(self, device: Device, case: str, batch: int, pages: int, waiting: int):
        self._case = case
        self._batch = batch
        has_free_row = case.startswith("too few pages")
        is_cached = case.endswith("cached prompts")
        num_shared = min(_MAX_CACHED if is_cached else _SHARED, pages * _PAGE_SIZE)
        # In the two cases "too few pages" (`has_free_row`), the running requests use all cached
        # pages except for those that hold the waiting requests' prompts. In the other cases, all
        # cached pages are idle.
        num_idle = pages
        if has_free_row:
            num_idle = num_shared // _PAGE_SIZE if is_cached else 0
        prompt = _PROMPT + (pages - num_idle) // batch * _PAGE_SIZE
        num_own = batch * -(-(prompt + _MAX_STEPS + _WARM_STEPS) // _PAGE_SIZE + 1)
        length = _PROMPT
        if has_free_row:
            length = num_shared + batch * _UNCACHED_PER_REQUEST if is_cached else _LONG_PROMPT
        cache = PagedKV(
            device,
            layers=1,
            pages=num_own + num_idle,
            page_size=_PAGE_SIZE,
            kv_heads=1,
            head_dim=4,
            dtype="bfloat16",
            slots=2 * batch,
            max_pages_per_slot=_MAX_LENGTH // _PAGE_SIZE,
        )
        prefixes = PrefixCache([cache], 1, num_own + pages if pages else 0)
        self._fill_cache(prefixes, num_idle, num_shared)
        nothing: Any = SimpleNamespace(
            run=lambda *_: iter(()), join=lambda *_: None, leave=lambda *_: None
        )
        lane: Any = SimpleNamespace(copy=lambda *_, **__: None)
        exchange: Any = SimpleNamespace(free_rows=lambda *_: None)
        promotion = Promotion(exchange, None, lane)
        self.slots = SlotManager(
            2 * batch,
            batch + has_free_row,
            caches=[cache],
            prefix_cache=prefixes,
            prefill=nothing,
            slot_state=nothing,
            lane=lane,
            prefill_scheduler=PrefillScheduler(_PROMPT),
            promotion=promotion,
            positions_ahead=2,
        )
        graph: Any = SimpleNamespace(
            batch=batch + has_free_row, drafts=0, max_new_drafts=0, kind="host"
        )
        replays: Any = _Replays()
        budget: Any = SimpleNamespace(choose=lambda *_: 0, record_acceptance=lambda *_, **__: None)
        self.scheduler = Scheduler(
            replays,
            self.slots,
            GraphSelector({GraphKey(graph.batch, 0): graph}, promotion),
            EngineStats(),
            budget,
            max_in_flight=1,
        )
        for number in range(batch):
            self.scheduler.submit(_make_state(f"running {number}", [number] * prompt))
        self.step()
        tokens = [*[1000] * num_shared, *[1001] * (length - num_shared)]
        for number in range(waiting):
            self.scheduler.submit(_make_state(f"waiting {number}", tokens))
        for _ in range(_WARM_STEPS):
            self.step()
        if len(self.slots.running) != batch or len(self.scheduler.waiting) != waiting:
            raise GraftError(
                f"{case}: {len(self.slots.running)} requests run, expected {batch}; "
                f"{len(self.scheduler.waiting)} wait, expected {waiting}"
            )

    def _fill_cache(self, prefixes: PrefixCache, pages: int, num_shared: int) -> None:
        """Fill the prefix cache with idle pages, beginning with the prompts' common prefix."""
        shared = prefixes.keys([1000] * (num_shared + 2))[:pages]
        others = [number.to_bytes(32, "little") for number in range(pages - len(shared))]
        if pages:
            prefixes.insert_migrated([*shared, *others], lambda *_: None)

    def step(self) -> None:
        """Run a step of the scheduler and fetch its events."""
        if self._case == "loop launch":
            self.slots.reserve_ahead(list(self.slots.running.values()))
        self.scheduler.step(None)  # type: ignore[arg-type]
        self.scheduler.outbox.fetch_rest()

    def time_steps(self, steps: int) -> float:
        """Run steps and return their median time in microseconds."""
        times = []
        for _ in range(steps):
            begin = time.perf_counter_ns()
            self.step()
            times.append(time.perf_counter_ns() - begin)
        return statistics.median(times) / 1e3


def _make_state(name: str, tokens: list[int]) -> RequestState:
    """Return a request without grammar that generates tokens until the benchmark ends."""
    decoder: Any = SimpleNamespace(push=lambda *_: "x", finish=lambda *_, **__: "")
    return RequestState(
        request=Request(tokens=tokens),
        output=Output(id=name, seed=1),
        prompt=tokens,
        max_tokens=_MAX_LENGTH - len(tokens),
        stop_ids=(0,),
        decoder=decoder,
    )


def measure(batch: int, pages: int, waiting: int, steps: int) -> list[Measurement]:
    """Measure each case without and with cached pages, and without and with waiting requests.

    `batch`, `pages` and `waiting` are described in `HostRounds`. `steps` is the number of steps per
    measurement.
    """
    device = open_device()
    found = []
    for case in CASES:
        for num_pages, num_waiting in ((0, 0), (pages, 0), (0, waiting), (pages, waiting)):
            rounds = HostRounds(device, case, batch, num_pages, num_waiting)
            us = rounds.time_steps(steps)
            found.append(Measurement(case, num_pages, num_waiting, us))
            rounds.scheduler.slots.close()
    return found


def make_report(found: Sequence[Measurement], batch: int) -> str:
    """Return a table of the median times.

    The last column is the difference from the first row of the same case (one of `CASES`), which
    was measured without cached pages and without waiting requests.
    """
    rows: list[tuple[object, ...]] = [
        ("step", "cached pages", "waiting", "us per step", "above the constant part")
    ]
    constant = {item.case: item.us for item in reversed(found)}
    for item in found:
        above = item.us - constant[item.case]
        rows.append((item.case, item.pages, item.waiting, f"{item.us:.0f}", f"{above:+.0f}"))
    return f"{table(rows)}\n{batch} running requests"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.host_time", __doc__)
    add_counts(
        parser,
        ("batch", 64, "running requests"),
        ("pages", 100_000, "cached pages"),
        ("waiting", 1000, "waiting requests"),
        ("steps", 300, f"measured steps, at most {_MAX_STEPS}"),
    )
    options = parser.parse_args(arguments)
    if options.steps > _MAX_STEPS:
        parser.error(f"--steps must be at most {_MAX_STEPS}, not {options.steps}")
    return options


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse_options(arguments)
    found = measure(options.batch, options.pages, options.waiting, options.steps)
    results = {"batch": options.batch, "results": [item._asdict() for item in found]}
    finish(options, results, make_report(found, options.batch))


if __name__ == "__main__":
    sys.exit(main())
