"""Runs the engine's host code on a simulated device, in random interleavings of their steps.

`Interleaving(device, seed)` builds the real `Scheduler`, `SlotManager`, `Replays`, rings and guided
decoder on a simulated `SteppingDevice`. With `loops`, batches run in generation loops. With
`automata`, most requests are promoted: simulated kernels then fill their mask rows. A random
generator with this seed chooses requests, sizes, a sequence of host actions, and the steps of the
device between them.

The oracle of a request's output is `decode_sequentially`, which uses neither engine nor device.
"""

import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from engine_util import FixedDraftLengths
from round_simulator import exchange_for
from stepping_device import (
    PAGE,
    SteppingAutomata,
    SteppingCache,
    SteppingControl,
    SteppingDecoder,
    SteppingDevice,
    SteppingRing,
)
from toy_language import STOPS, TOY, VOCAB, ToyBackend, ToyText, decode_sequentially

from graft.cudagraph.device import Device
from graft.grammar.errors import GrammarError
from graft.grammar.matcher import CompiledGrammar
from graft.models.cache.prefix import PrefixCache
from graft.models.engine import migrate
from graft.models.engine.loop_replays import LoopReplays
from graft.models.engine.promotion import Promotion
from graft.models.engine.replay import Replays
from graft.models.engine.request_state import RequestState
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.selection import GraphKey, GraphSelector
from graft.models.engine.slots import SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.request import Output, Request
from graft.models.round.prefill import PrefillScheduler
from graft.sampling.mode import DraftMode
from graft.sampling.results import row_words

MAX_ACTIONS = 4000
MAX_LENGTH = 56  # positions of a request


class RandomInterrupts:
    """Replacement of `Shield` whose `check` raises KeyboardInterrupt at random."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def check(self) -> None:
        if self._rng.random() < 0.05:
            raise KeyboardInterrupt


class Interleaving:
    """One random schedule of host and device.

    `run` raises AssertionError if an output differs from the sequential output, or if slots, pages
    or ring entries are not freed.
    """

    def __init__(self, device: Device, seed: int, *, loops: bool = False, automata: bool = False):
        rng = self.rng = random.Random(seed)
        self.max_in_flight = rng.choice((1, 2, 2, 2, 3))
        self.scarce = rng.random() < 0.4  # whether the KV cache has few pages
        self.k = rng.randrange(4)
        self.rows = rng.randint(1 + 2 * self.scarce, 4)
        slots = self.rows + rng.randrange(self.rows + 1)
        masked = self.k > 0 and rng.random() < 0.7
        branches = rng.random() < 0.5
        slack = 0
        if self.k > 1 and branches and not masked:
            self.k += 3
            slack = self.k
        exchange = exchange_for(slots, VOCAB, DraftMode.chain(self.k, "fill" if masked else "none"))
        self.toy = SteppingDevice(rng, exchange, slots, self.k, masked, slack > 0)
        if automata:
            self.toy.automata = SteppingAutomata(self.toy)
        self.toy.max_prompt_rows = rng.choice((1, 2, 4, 100))
        length = MAX_LENGTH + slack
        spare_pages = 3 if self.scarce else self.rows * length // PAGE
        pages = -(-length // PAGE) + rng.randrange(spare_pages)
        self.toy.caches = [
            SteppingCache(device, self.toy, slots, pages + extra, length) for extra in (0, 2)
        ]
        lookahead = rng.randrange(2)
        max_cached = rng.choice((0, 2, pages, pages))
        self.prefixes = PrefixCache(self.toy.caches, lookahead, max_cached)
        self.shared_prefixes = [[rng.randrange(VOCAB - 2) for _ in range(9)] for _ in range(2)]
        self.has_loops = loops
        self.has_automata = automata
        parts = self._make_parts(device)
        if loops:
            entries = self.rings[1].entries
            self.toy.control = SteppingControl(device, self.rows, slack, entries)
            self.toy.control.toy = self.toy
        self.scheduler = self._make_scheduler(parts, slots, slack)
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.outputs: dict[str, Output] = {}
        self.compiling: list[tuple[str, Future[CompiledGrammar], CompiledGrammar]] = []
        self.cancelled: set[str] = set()
        # Probabilities per action.
        self.cancel_rate = rng.choice((0.0, 0.0, 0.02))
        self.preempt_rate = rng.choice((0.0, 0.03, 0.1))
        self.migrate_rate = rng.choice((0.0, 0.0, 0.05))

    def _make_parts(self, device: Device) -> Any:
        """Return an object with the attributes of `RoundResources` that `Replays` uses."""
        toy = self.toy
        entries = self.max_in_flight + 1
        if self.has_loops:
            entries += self.rng.choice((1, 3, 9))
        self.rings = [
            SteppingRing(
                device,
                entries,
                {
                    "slot": ("int32", (self.rows,)),
                    "reserved": ("int32", (self.rows,)),
                    "max_rounds": ("int32", (1,)),
                },
            ),
            SteppingRing(device, entries, {"rows": ("int32", (self.rows, row_words(self.k)))}),
            SteppingRing(device, entries, {"ns": ("int64", (1,))}),
        ]
        toy.inputs, toy.outputs, timeline = self.rings
        toy.decoder = SteppingDecoder(toy.exchange, max_in_flight=max(entries, 2), threads=1)
        for part in (*self.rings, toy.decoder):
            part.toy = toy
        return SimpleNamespace(
            inputs=toy.inputs,
            outputs=toy.outputs,
            timeline=timeline,
            decoder=toy.decoder,
            every_part=True,
        )

    def _make_scheduler(self, parts: Any, slots: int, slack: int) -> Scheduler:
        k = self.k
        changes = self.rng.random() < 0.5
        lengths = (self.rng.randrange(k + 1) if changes else k for _ in itertools.count())
        budget: Any = FixedDraftLengths(lengths)
        toy: Any = self.toy
        lane: Any = None
        kind_without_host = "host"
        if self.has_loops:
            kind_without_host = "loop"
        elif self.has_automata:
            kind_without_host = "device"
        graphs = {
            GraphKey(rows, drafts, kind): self._graph(rows, drafts, kind)
            for rows in {1, self.rows}
            for drafts in range(k + 1)
            for kind in {"host", kind_without_host}
        }
        promotion = Promotion(toy.exchange, toy.automata, lane)
        selector = GraphSelector(graphs, promotion, kind_without_host=kind_without_host)
        manager = SlotManager(
            slots,
            self.rows,
            caches=toy.caches,
            prefix_cache=self.prefixes,
            prefill=toy,
            slot_state=toy,
            lane=lane,
            prefill_scheduler=PrefillScheduler(toy.max_prompt_rows),
            promotion=promotion,
            positions_ahead=(self.max_in_flight + 1) * (k + 1),
            slack_positions=slack,
        )
        replays = Replays(parts, toy, budget)
        if self.has_loops:
            replays = LoopReplays(parts, toy, budget, toy.control)
        return Scheduler(
            replays,
            manager,
            selector,
            EngineStats(draft_length=k),
            budget,
            max_in_flight=self.max_in_flight,
        )

    def _graph(self, rows: int, k: int, kind: str) -> Any:
        return SimpleNamespace(
            launch=lambda stream: self.toy.launch(rows, k, kind),
            finish=lambda stream, wait_for: None,
            check=lambda: None,
            timed=(),
            batch=rows,
            drafts=k,
            max_new_drafts=k,
            kind=kind,
            has_host_steps=kind == "host",
        )

    def _submit_request(self, number: int) -> None:
        """Submit a random request. Its grammar, if any, is compiled by a later `_compile`."""
        rng = self.rng
        shared: list[int] = []
        for begin in range(0, 9, PAGE):
            shared += rng.choice(self.shared_prefixes)[begin : begin + PAGE]
        shared = shared[: rng.randrange(10)]
        num_own = rng.randint(1, 10 - len(shared))
        prompt = [*shared, *(rng.randrange(VOCAB - 2) for _ in range(num_own))]
        grammar = None
        stop: tuple[str, ...] = ()
        if rng.random() < 0.7:  # random, so hardly any two requests have the same grammar
            grammar = ToyBackend().compile(rng.randrange(1 << 30))
        else:
            ids = [rng.randrange(STOPS[0]) for _ in range(rng.choice((0, 2, 4)))]
            stop = tuple(TOY.tokens[i].decode() for i in ids)
        state = RequestState(
            request=Request(tokens=prompt, stop=stop, priority=rng.choice((0, 0, 1))),
            output=Output(id=str(number), seed=rng.randrange(1 << 62)),
            prompt=prompt,
            max_tokens=rng.choice((*(1, 2, 5, 12, 20)[5 * self.scarce :], MAX_LENGTH - 10)),
            stop_ids=STOPS[: rng.randint(1, 2)],
            decoder=ToyText(),
        )
        if grammar is not None:
            state.grammar = Future()
            self.compiling.append((state.id, state.grammar, grammar))
        self.expected[state.id] = decode_sequentially(state, grammar)
        self.tokens[state.id] = []
        self.text[state.id] = ""
        self.scheduler.submit(state)

    def _compile(self) -> None:
        """Complete the compilation of a randomly chosen grammar. In 5 % of the cases, it fails."""
        name, future, grammar = self.compiling.pop(self.rng.randrange(len(self.compiling)))
        if self.rng.random() < 0.05:
            future.set_exception(GrammarError("invalid"))
            self.expected[name] = ([], "refused")
        else:
            if self.has_automata and self.rng.random() < 0.8:
                grammar.automaton = grammar.native
            future.set_result(grammar)

    # Host actions -------------------------------------------------------------------------------

    def _act(self) -> None:
        """Perform a random action of the host or the device."""
        scheduler = self.scheduler
        rng = self.rng
        actions = [self.toy.tick]
        if len(scheduler.replays.unread) < scheduler.max_in_flight:
            actions += [scheduler.admit, scheduler.launch, scheduler.launch]
        if scheduler.replays.unread:
            actions += [lambda: self._interruptible(scheduler.read)] * 2
        step = self._compile if self.compiling else lambda: self._interruptible(scheduler.step)
        actions += [step] * 2
        rng.choice(actions)()
        if not scheduler.unfinished:
            return
        state = rng.choice(list(scheduler.unfinished.values()))
        if rng.random() < self.cancel_rate:
            self.cancelled.add(state.id)
            scheduler.end(state, "cancelled")
        elif state.slot >= 0 and rng.random() < self.preempt_rate:
            scheduler.preempt(state)
        elif rng.random() < self.migrate_rate:
            self._migrate(state)

    def _migrate(self, state: RequestState) -> None:
        """Migrate a request out of the engine and into the same engine again."""
        description = migrate.describe_request(state, "coupled")
        grammar = state.grammar
        self.scheduler.end(state, "moved")
        migrated = RequestState(
            request=migrate.read_request(description),
            output=Output(state.id, seed=state.output.seed),
            prompt=state.prompt,
            max_tokens=state.max_tokens,
            stop_ids=state.stop_ids,
            decoder=ToyText(),
            grammar=grammar,
        )
        migrate.restore_output(migrated, description)
        self.scheduler.submit(migrated)

    def _interruptible(self, call: Callable[[Any], None]) -> None:
        with suppress(KeyboardInterrupt):
            call(RandomInterrupts(self.rng))

    def _fetch(self) -> None:
        """Fetch events and collect tokens, text and outputs."""
        for event in self.scheduler.outbox.fetch_rest():
            assert event.id not in self.outputs, f"request {event.id}: an event after the last one"
            self.tokens[event.id] += event.tokens
            self.text[event.id] += event.text
            if event.output is not None and event.output.reason != "moved":
                self.outputs[event.id] = event.output

    def run(self) -> None:
        """Submit requests, perform actions until all have finished, and check the outputs."""
        num_requests = self.rng.randint(2, 9)
        submitted = 0
        for _ in range(MAX_ACTIONS):
            if submitted < num_requests and self.rng.random() < 0.3:
                self._submit_request(submitted)
                submitted += 1
            self._act()
            self._fetch()
            if submitted == num_requests and not self.scheduler.busy:
                break
        else:
            raise AssertionError(f"requests unfinished after {MAX_ACTIONS} actions")
        self._check_outputs()
        self._check_resources()

    # Checks -------------------------------------------------------------------------------------

    def _check_outputs(self) -> None:
        """Compare outputs with sequential decoding, and events with outputs."""
        for request_id, (tokens, reason) in self.expected.items():
            output = self.outputs[request_id]
            where = f"request {request_id}"
            if request_id in self.cancelled and output.reason == "cancelled":
                assert output.tokens == tokens[: len(output.tokens)], where
            else:
                assert (output.tokens, output.reason) == (tokens, reason), (where, output.error)
            assert self.tokens[request_id] == output.tokens, f"{where}: tokens of its events differ"
            assert self.text[request_id] == output.text, f"{where}: text of its events differs"
            spelled = b"".join(TOY.tokens[i] for i in output.tokens).decode()
            assert spelled.startswith(output.text), f"{where}: text differs from the tokens"
        if all(output.reason != "stop_string" for output in self.outputs.values()):
            num_tokens = sum(len(output.tokens) for output in self.outputs.values())
            assert num_tokens == self.scheduler.stats.tokens, "wrong token count"

    def _check_resources(self) -> None:
        """Check that all slots, pages, snapshots and ring entries are free again."""
        scheduler = self.scheduler
        while scheduler.replays.unread:
            self._interruptible(scheduler.read)
        scheduler.replays.wait_idle(scheduler.stats)
        scheduler.slots.reclaim_all()
        assert not scheduler.slots.num_leaving
        assert len(scheduler.slots._free) == len(self.toy.slots)
        assert self.prefixes.num_unused == len(self.prefixes)
        self.prefixes.clear()
        assert all(len(c.free) == c.scratch_page for c in self.toy.caches), "pages are leaked"
        assert scheduler.replays.retired == scheduler.replays.launched == self.toy.completed
        self.toy.decoder.close()  # raises while a snapshot is in use
        assert self.toy.decision.starved == 0, "a slot was skipped for lack of a mask row"
        counters = self.toy.decoder.counters()
        for name in ("desyncs", "errors", "missing_snapshots"):
            assert counters[name] == 0, f"{counters[name]} {name}"
        for ring in self.rings:
            ring.close()
        if self.has_loops:
            self.toy.control.close()
