"""Interleaves the engine's host code with a device, at every point where the two can meet.

`Interleaving(device, seed)` builds the real `Scheduler`, `Seating`, `Replays`, rings and guided
decoder over `ToyDevice`. From the seed it draws requests, sizes and a sequence of host actions,
lets the device go on in between, and compares every request with its sequential output.
"""

import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from engine_util import Given
from guide_util import exchange_for
from interleave_device import PAGE, TickingDecoder, TickingRing, ToyCache, ToyDevice
from interleave_language import STOPS, TOY, VOCAB, ToyBackend, ToyText, sequential

from graft.cudagraph.device import Device
from graft.grammar.errors import GrammarError
from graft.grammar.matcher import CompiledGrammar
from graft.models.cache.prefix import PrefixCache
from graft.models.engine import migrate as handover
from graft.models.engine.replay import Replays
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.slots import RequestState, SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.request import Output, Request
from graft.models.round.prefill import PrefillScheduler
from graft.sampling.sampler import row_words

MOST_ACTIONS = 4000
LONGEST = 56  # request


class Pressing:
    """Ctrl-C, pressed now and then while the host waits."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def check(self) -> None:
        if self._rng.random() < 0.05:
            raise KeyboardInterrupt


class Interleaving:
    """One run; `run()` raises AssertionError when anything differs from the sequential truth.

    Rings use the device's pinned memory.
    """

    def __init__(self, device: Device, seed: int):
        rng = self.rng = random.Random(seed)
        # pages
        self.depth = rng.choice((1, 2, 2, 2, 3))
        self.scarce = rng.random() < 0.4
        self.k = rng.randrange(4)
        self.rows = rng.randint(1 + 2 * self.scarce, 4)
        slots = self.rows + rng.randrange(self.rows + 1)
        masked = self.k > 0 and rng.random() < 0.7
        branches = rng.random() < 0.5
        slack = 0
        if self.k > 1 and branches and not masked:
            slack = self.k = self.k + 3
        toy = self.toy = ToyDevice(rng, slots, self.k, masked, slack > 0)
        toy.most_rows = rng.choice((1, 2, 4, 100))
        length = LONGEST + slack
        pages = -(-length // PAGE) + rng.randrange(3 if self.scarce else self.rows * length // PAGE)
        toy.caches = [ToyCache(toy, slots, pages + extra, length) for extra in (0, 2)]
        self.prefixes = PrefixCache(toy.caches, rng.randrange(2), rng.choice((0, 2, pages, pages)))
        self.beginnings = [[rng.randrange(VOCAB - 2) for _ in range(9)] for _ in range(2)]
        toy.exchange = exchange_for(slots, self.k, VOCAB)
        batch = self.rows
        entries = self.depth + 1
        self.rings = [
            TickingRing(device, entries, {"slot": ("int32", (batch,))}),
            TickingRing(device, entries, {"rows": ("int32", (batch, row_words(self.k)))}),
            TickingRing(device, entries, {"ns": ("int64", (1,))}),
        ]
        toy.inputs, toy.outputs, timeline = self.rings
        toy.decoder = TickingDecoder(
            toy.exchange, masked_drafts=toy.masked, ring=max(entries, 2), threads=1
        )
        for part in (*self.rings, toy.decoder):
            part.toy = toy
        parts: Any = SimpleNamespace(
            inputs=toy.inputs,
            outputs=toy.outputs,
            timeline=timeline,
            decoder=toy.decoder,
            every_part=True,
        )
        stream: Any = toy
        k = self.k
        changes = rng.random() < 0.5
        budget: Any = Given(rng.randrange(k + 1) if changes else k for _ in itertools.count())
        self.scheduler = Scheduler(
            Replays(parts, stream, budget),
            SlotManager(
                slots,
                self.rows,
                toy.caches,
                self.prefixes,
                toy,
                toy,
                None,
                PrefillScheduler(toy.most_rows),
                (self.depth + 1) * (self.k + 1),
                slack,
            ),
            {(size, k): self._graph(size, k) for size in {1, self.rows} for k in range(self.k + 1)},
            EngineStats(draft_length=self.k),
            budget,
            depth=self.depth,
        )
        self.truth: dict[str, tuple[list[int], str]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.ended: dict[str, Output] = {}
        self.compiling: list[tuple[RequestState, CompiledGrammar]] = []
        self.cancelled: set[str] = set()
        self.cancels = rng.choice((0.0, 0.0, 0.02))  # per action
        self.preempts = rng.choice((0.0, 0.03, 0.1))
        self.moves = rng.choice((0.0, 0.0, 0.05))

    def _graph(self, rows: int, k: int) -> Any:
        launch = SimpleNamespace(launch=lambda _: self.toy.launch(rows, k), check=lambda: None)
        return SimpleNamespace(execs=[launch], timed=(), batch=rows, drafts=k, made=k)

    def _request(self, number: int) -> None:
        """Submit a request; its grammar may be compiled only later, or turn out to be broken."""
        rng = self.rng
        shared = [
            token for i in range(0, 9, PAGE) for token in rng.choice(self.beginnings)[i : i + PAGE]
        ][: rng.randrange(10)]
        own = rng.randint(1, 10 - len(shared))
        prompt = [*shared, *(rng.randrange(VOCAB - 2) for _ in range(own))]
        grammar = None
        stop = ()
        if rng.random() < 0.7:  # one that nobody has seen before
            grammar = ToyBackend().compile(rng.randrange(1 << 30))
        else:
            ids = [rng.randrange(STOPS[0]) for _ in range(rng.choice((0, 2, 4)))]
            stop = tuple(TOY.tokens[i].decode() for i in ids)
        running = RequestState(
            request=Request(tokens=prompt, stop=stop, priority=rng.choice((0, 0, 1))),
            output=Output(id=str(number), seed=rng.randrange(1 << 62)),
            prompt=prompt,
            max_tokens=rng.choice((*(1, 2, 5, 12, 20)[5 * self.scarce :], LONGEST - 10)),
            stop_ids=STOPS[: rng.randint(1, 2)],
            decoder=ToyText(),
        )
        if grammar is not None:
            running.grammar = Future()
            self.compiling.append((running, grammar))
        self.truth[running.id] = sequential(running, grammar)
        self.tokens[running.id] = []
        self.text[running.id] = ""
        self.scheduler.submit(running)

    def _compile(self) -> None:
        running, grammar = self.compiling.pop(self.rng.randrange(len(self.compiling)))
        assert running.grammar is not None
        if self.rng.random() < 0.05:
            running.grammar.set_exception(GrammarError("broken"))
            self.truth[running.id] = ([], "refused")
        else:
            running.grammar.set_result(grammar)

    # Host actions -------------------------------------------------------------------------------

    def _act(self) -> None:
        s = self.scheduler
        rng = self.rng
        actions = [self.toy.tick]
        if len(s.replays.unread) < s.depth:
            actions += [s.admit, s.launch, s.launch]
        if s.replays.unread:
            actions += [lambda: self._pressed(s.read)] * 2
        actions += [self._compile if self.compiling else lambda: self._pressed(s.step)] * 2
        rng.choice(actions)()
        running = rng.choice(list(s.unfinished.values())) if s.unfinished else None
        if running is None:
            return
        if rng.random() < self.cancels:
            self.cancelled.add(running.id)
            s.end(running, "cancelled")
        elif running.slot >= 0 and rng.random() < self.preempts:
            s.preempt(running)
        elif rng.random() < self.moves:
            self._move(running)

    def _move(self, running: RequestState) -> None:
        """Hand a request over, to an engine that happens to be this one."""
        about = handover.described(running, "coupled")
        self.scheduler.end(running, "moved")
        there = RequestState(
            request=handover.requested(about),
            output=Output(running.id, seed=running.output.seed),
            prompt=running.prompt,
            max_tokens=running.max_tokens,
            stop_ids=running.stop_ids,
            decoder=ToyText(),
            grammar=running.grammar,
        )
        self.compiling = [(there if one is running else one, g) for one, g in self.compiling]
        handover.restore(there, about)
        self.scheduler.submit(there)

    def _pressed(self, call: Callable[[Any], None]) -> None:
        with suppress(KeyboardInterrupt):
            call(Pressing(self.rng))

    def _fetch(self) -> None:
        for event in self.scheduler.outbox.fetch_rest():
            assert event.id not in self.ended, f"request {event.id} went on after its end"
            self.tokens[event.id] += event.tokens
            self.text[event.id] += event.text
            if event.output is not None and event.output.reason != "moved":
                self.ended[event.id] = event.output

    def run(self) -> None:
        """Submit requests, act until all have ended, and compare."""
        requests = self.rng.randint(2, 9)
        submitted = 0
        for _ in range(MOST_ACTIONS):
            if submitted < requests and self.rng.random() < 0.3:
                self._request(submitted)
                submitted += 1
            self._act()
            self._fetch()
            if submitted == requests and not self.scheduler.busy:
                break
        else:
            raise AssertionError(f"not done after {MOST_ACTIONS} actions")
        self._compare()

    # Truth --------------------------------------------------------------------------------------

    def _compare(self) -> None:
        for name, (tokens, reason) in self.truth.items():
            output = self.ended[name]
            got = output.tokens
            where = f"request {name}"
            if name in self.cancelled and output.reason == "cancelled":
                assert got == tokens[: len(got)], where
            else:
                assert (got, output.reason) == (tokens, reason), (where, output.error)
            assert self.tokens[name] == got, f"{where}: events say otherwise"
            assert self.text[name] == output.text, f"{where}: events spell otherwise"
            spelled = b"".join(TOY.tokens[i] for i in got).decode()
            assert spelled.startswith(output.text), f"{where}: tokens spell otherwise"
        s = self.scheduler
        if all(output.reason != "stop_string" for output in self.ended.values()):
            made = sum(len(output.tokens) for output in self.ended.values())
            assert made == s.stats.tokens, "tokens are miscounted"
        while s.replays.unread:
            self._pressed(s.read)
        s.replays.settle(s.stats)
        s.seating.reclaim_idle()
        assert not s.seating.leaving and len(s.seating._free) == len(self.toy.slots)
        assert self.prefixes.unused == len(self.prefixes)
        self.prefixes.clear()
        assert all(len(c.free) == c.scratch_page for c in self.toy.caches), "pages are lost"
        assert s.replays.retired == s.replays.number == self.toy.completed
        self.toy.decoder.close()  # refuses while a snapshot is live
        assert self.toy.starved == 0, "a slot sat out a round for want of a mask row"
        counters = self.toy.decoder.counters()
        for name in ("desyncs", "errors", "missing_snapshots"):
            assert counters[name] == 0, f"{counters[name]} {name}"
        for ring in self.rings:
            ring.close()
