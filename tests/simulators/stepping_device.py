"""A simulated device that runs the steps of replays one at a time, in a random possible order.

The device does the work of a round's kernels with `RoundSimulator`. The rings, the exchange memory
and the host steps are the real ones. The steps of a replay run in any order that the edges of its
graph allow. `interleaving` runs the engine's host code on it.

Work that the host enqueues outside of replays, such as prefill chunks and updates of slots, is
called *side work*. It is complete before the replays that are launched after it start, but it may
run before earlier replays have ended. If the host reuses slots, pages or ring entries too early, an
output is wrong or an assertion fails.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import reference_round as ref
from reference_round import NOT_READY
from round_simulator import (
    USABLE,
    Decision,
    RoundSimulator,
    mix,
    read_committed,
    result_row,
    run_work,
    write_mask_row,
)
from toy_language import ALL_IDS, VOCAB, choose, context_of, row_ids

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.driver.pinned import Ring
from graft.grammar.decoder import GuidedDecoder
from graft.models.cache.kv import PagedKV
from graft.models.round.loop import LoopControl
from graft.models.round.prefill import PrefillChunk
from graft.sampling.exchange import Exchange
from graft.sampling.state import SlotRequest

PAGE = 4
HOST_STEPS = {"open": "open_work", "commit": "commit_work", "fill": "draft_work"}


class Hang(AssertionError):
    """The host waits for a result that the device will never publish."""


@dataclass
class Launch:
    """A launch by the host: of one replay, or of a generation loop of several replays."""

    barrier: int  # number of side operations that must be complete before the first replay starts
    rows: int  # number of batch rows
    k: int  # maximum number of drafts to verify, and to generate, per batch row
    kind: str  # kind of the graph, see `GraphKey`
    slots: frozenset[int]  # slots that the host assigned to the batch rows
    prologue: list[Callable[[], None]]  # work of the stream between earlier replays and this launch
    graph: dict[str, tuple[str, ...]]  # names of the steps of a replay, each with its predecessors
    first: int = 0  # number of the first replay; 0 until it begins
    # What the first replay reads from the input ring: the slot of each batch row, its number of
    # positions with pages, and the maximum number of replays.
    assigned: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    max_rounds: int = 1


@dataclass
class Replay:
    """A replay of a launch."""

    launch: Launch
    done: set[str] = field(default_factory=set)  # names of the completed steps
    number: int = 0  # number that the device has counted for this replay
    slots: list[int] = field(default_factory=list)  # by batch row; -1 without an active request
    counts: dict[int, int] = field(default_factory=dict)  # committed tokens by batch row
    goes_on: bool = False  # whether another replay of the loop follows

    @property
    def active(self) -> list[int]:
        """Slots of the batch rows with an active request."""
        return [slot for slot in self.slots if slot >= 0]


@dataclass
class SteppingSlot(ref.Slot):
    """A slot with the target's state after each node of its draft tree.

    The states are computed from the pages, so that a wrong page changes the tokens.
    """

    contexts: dict[int, int] = field(default_factory=dict)


class LanguageDecision(Decision):
    """Chooses the tokens of target and drafter in the simulated rounds."""

    def __init__(self, rng: random.Random, stall: float, agreement: int):
        self.rng = rng
        # Probability with which the grammar exceeds its time budget for a mask row.
        self.stall = stall
        self.agreement = agreement  # percentage of drafts that match the target
        self.starved = 0  # how often the first mask row of a slot was not filled in time

    def legal_ids(self, mask: np.ndarray | None) -> tuple[int, ...]:
        return ALL_IDS if mask is None else row_ids(mask.tobytes())

    def is_late(self, slot: SteppingSlot, node: int, state: int) -> bool:
        if node == 0 and state == NOT_READY:
            self.starved += 1
        return state in USABLE and self.rng.random() < self.stall

    def target(self, slot: SteppingSlot, node: int, position: int, legal: tuple[int, ...]) -> int:
        return choose(slot.contexts[node], slot.seed, legal)

    def draft(self, slot: SteppingSlot, j: int, legal: tuple[int, ...] | None) -> int:
        return self.propose(slot, slot.contexts[j - 1], ALL_IDS if legal is None else legal)

    def propose(self, slot: SteppingSlot, context: int, legal: tuple[int, ...]) -> int:
        """Return the drafter's token in a state: the target's choice in most cases."""
        h = mix(context, 77)
        if h % 100 < self.agreement:
            return choose(context, slot.seed, legal)
        return legal[(h >> 8) % len(legal)]


class SteppingCache(PagedKV):
    """The real page allocator with simulated memory and a simulated copy of the page table."""

    def __init__(self, device: Device, toy: SteppingDevice, slots: int, pages: int, length: int):
        super().__init__(
            device,
            layers=1,
            pages=pages,
            page_size=PAGE,
            kv_heads=1,
            head_dim=1,
            dtype="float32",
            slots=slots,
            max_pages_per_slot=-(-length // PAGE),
        )
        self.toy = toy
        self.table = self.page_table.to_host()
        # page table on the device after the copies enqueued so far
        self.enqueued = self.table.copy()
        self.memory = np.full((pages + 1, PAGE), -1)

    def release(self, slot: int) -> None:
        self.toy.require_idle(slot, "pages")
        super().release(slot)

    def set_table(self, lane: Any, slot: int) -> None:
        def copy(row: DeviceArray, staged: PinnedArray, name: str) -> None:
            enqueued = self.enqueued[slot]
            if any(
                enqueued[enqueued != staged.array] != self.scratch_page
            ):  # an entry was replaced
                self.toy.require_idle(slot, "page table")
            self.enqueued[slot] = staged.array
            self.toy.enqueue(functools.partial(np.copyto, self.table[slot], staged.array))

        side_lane: Any = SimpleNamespace(copy=copy)
        super().set_table(side_lane, slot)

    def write(self, slot: int, position: int, token: int) -> None:
        page = self.table[slot, position // PAGE]
        if page != self.scratch_page:
            self.memory[page, position % PAGE] = token

    def read(self, slot: int, end: int) -> list[int]:
        pages = self.table[slot, : -(-end // PAGE)]
        return self.memory[pages].reshape(-1)[:end].tolist()

    def at(self, slot: int, position: int) -> int:
        return int(self.memory[self.table[slot, position // PAGE], position % PAGE])


class SteppingDevice:
    """Simulated device: slots, pages, a queue of replays, and side work that updates slots."""

    handle = 0  # the simulated device is also the stream of the engine
    # Parts with which host and device communicate. They are set after construction.
    caches: list[SteppingCache]
    inputs: SteppingRing
    outputs: SteppingRing
    decoder: SteppingDecoder
    control: SteppingControl  # only if there are generation loops

    def __init__(
        self,
        rng: random.Random,
        exchange: Exchange,
        slots: int,
        draft_length: int,
        masked: bool,
        branches: bool,
    ):
        self.rng = rng
        self.exchange = exchange
        self.k = draft_length
        self.masked = masked
        self.branches = branches
        self.slots = []
        self.prompts: list[list[int]] = []  # pinned memory, one per slot
        for _ in range(slots):
            self.slots.append(SteppingSlot(n=0, tree=ref.chain(0), limit=0, active=False))
            self.prompts.append([])
        # Slots whose prompt the device has not copied from the staging area yet.
        self.unread: set[int] = set()
        # (slot, position, token) of each token of the prompt that was copied last.
        self.prompt_rows: list[tuple[int, int, int]] = []
        self.side: deque[Callable[[], None]] = deque()
        self.side_done = 0
        self.side_enqueued = 0
        self.queue: deque[Replay] = deque()
        self.completed = 0
        self.launched = 0
        # Maximum number of prompt rows between two replays with the same request.
        self.max_prompt_rows = 0
        # Since the last launch:
        self.rows_since = 0
        self.previous_slots = frozenset[int]()  # slots of the last replay
        self.joined = set[int]()
        stall = rng.choice((0.0, 0.1, 0.3))
        # Average number of device steps per host action.
        self.eager = rng.choice((0.0, 0.3, 1.0, 4.0))
        self.decision = LanguageDecision(rng, stall, agreement=rng.choice((30, 70, 95)))
        self.simulator = RoundSimulator([exchange], self.slots, self.decision)
        self.automata: SteppingAutomata | None = None
        self.prologue: list[Callable[[], None]] = []  # of the next replay

    # What the host sees -------------------------------------------------------------------------

    def tick(self) -> None:
        """Run a random number of device steps.

        This method is called wherever the host accesses state that it shares with the device.
        """
        while self.rng.random() * (1 + self.eager) > 1 and self.advance():
            pass

    def enqueue(self, work: Callable[[], None]) -> None:
        """Add side work: a copy, a kernel of a prefill chunk, or the update of a slot."""
        self.tick()
        self.side.append(work)
        self.side_enqueued += 1
        self.tick()

    def launch(self, rows: int, k: int, kind: str) -> None:
        """Launch a replay or a generation loop.

        Assert that no request of the previous replay was delayed by too many prompt rows.
        """
        self.tick()
        self.launched += 1
        entry = self.launched % self.inputs.entries
        published = self.inputs["slot"].array[entry].tolist()
        slots = frozenset(published) - {-1}
        stayed = slots & self.previous_slots - self.joined
        assert not stayed or self.rows_since <= self.max_prompt_rows, (
            f"slots {set(stayed)} waited for {self.rows_since} prompt rows"
        )
        self.rows_since = 0
        self.previous_slots = slots
        self.joined.clear()
        graph = self._graph(k, has_host_steps=kind == "host")
        launch = Launch(self.side_enqueued, rows, k, kind, slots, self.prologue, graph)
        self.prologue = []
        self.queue.append(Replay(launch))
        self.tick()

    def require_idle(self, slot: int, what: str) -> None:
        """Assert that no unfinished replay refers to a slot."""
        for number, replay in enumerate(self.queue, self.completed + 1):
            assert slot not in replay.launch.slots, (
                f"slot {slot}: {what} reused while replay {number} refers to it"
            )

    def query(self) -> bool:
        return not self.queue and not self.side

    def synchronize(self) -> None:
        while self.advance():
            pass

    def run(
        self, lane: Any, slot: int, tokens: Sequence[int], cached: int, max_rows: Callable[[], int]
    ) -> Iterator[PrefillChunk]:
        """Simulate `Prefill.run`.

        The prompt is read from the slot's staging buffer when the copy runs. The chunks are read
        from the destination of the copy.
        """
        self.require_idle(slot, "prompt")
        assert slot not in self.unread, f"slot {slot}: a prompt is overwritten before its copy"
        self.prompts[slot] = list(tokens)
        self.unread.add(slot)

        def copy() -> None:
            self.unread.remove(slot)
            prompt = self.prompts[slot][:-1]
            self.prompt_rows = [(slot, position, token) for position, token in enumerate(prompt)]

        def chunk(begin: int, end: int) -> None:
            for row in self.prompt_rows[begin:end]:
                for cache in self.caches:
                    cache.write(*row)

        self.enqueue(copy)
        begin = cached
        while begin < len(tokens) - 1:
            num_rows = min(PAGE - 1, max_rows())
            end = min(begin + num_rows, len(tokens) - 1)
            self.rows_since += end - begin
            self.enqueue(functools.partial(chunk, begin, end))
            yield PrefillChunk(end - begin, self.query, lambda: 1.0)
            begin = end

    def join(self, lane: Any, slot: int, request: SlotRequest) -> None:
        self.joined.add(slot)

        def joined() -> None:
            self.slots[slot] = SteppingSlot(
                n=request.position,
                tree=ref.chain(request.last),
                epoch=request.epoch,
                limit=request.limit,
                stop_ids=tuple(request.params.stop_ids or ()),
                seed=request.params.seed or 0,
            )

        self.enqueue(joined)

    def leave(self, lane: Any, slot: int) -> None:
        def left() -> None:
            self.slots[slot].active = False

        self.enqueue(left)

    # Steps --------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Run a random step that is ready. Return False if there is none."""
        steps: list[Callable[[], None]] = []
        if self.side:
            steps.append(self._side_step)
        if self.queue and self.side_done >= self.queue[0].launch.barrier:
            steps += self._ready(self.queue[0])
        if not steps:
            return False
        self.rng.choice(steps)()
        return True

    def _side_step(self) -> None:
        self.side.popleft()()
        self.side_done += 1

    def _graph(self, k: int, *, has_host_steps: bool) -> dict[str, tuple[str, ...]]:
        """Return the steps of a replay with at most `k` drafts, and the predecessors of each."""
        graph: dict[str, tuple[str, ...]] = {"begin": ()}

        def add_grammar_step(name: str, *after: str) -> tuple[str, ...]:
            """Add a step of the grammar, and return what must precede a step that needs it.

            The step consists of host work, of a kernel for promoted requests, or of both.
            """
            if has_host_steps:
                graph[name] = after
                after = (name,)
            if self.automata is not None:
                graph[f"kernel_{name}"] = (*after, "begin")
                after = (f"kernel_{name}",)
            return after

        opened = add_grammar_step("open")
        graph["forward"] = ("begin",)
        graph["verify"] = ("forward", *opened)
        graph["publish"] = ("verify",)
        masked = add_grammar_step("commit", "publish") if self.k else ()
        num_levels = min(k, 1) if self.branches else k
        before = "publish"
        for j in range(1, num_levels + 1):
            if self.masked and j > 1:
                masked = add_grammar_step(f"fill {j - 1}", before)
            graph[f"draft {j}"] = (before, *masked) if self.masked else (before,)
            before = f"draft {j}"
        return graph

    def _ready(self, replay: Replay) -> list[Callable[[], None]]:
        """Return the steps of a replay whose predecessors are complete."""
        launch = replay.launch
        while launch.prologue:
            launch.prologue.pop(0)()
        ready = []
        for name, predecessors in launch.graph.items():
            if name not in replay.done and replay.done.issuperset(predecessors):
                ready.append(functools.partial(self._run, replay, name))
        return ready

    def _run(self, replay: Replay, name: str) -> None:
        """Run a step of a replay. After the last step, begin the next replay of its loop."""
        kind, *numbers = name.split()
        arguments = [int(number) for number in numbers]
        if kind in HOST_STEPS:
            make_work = getattr(self.decoder, HOST_STEPS[kind])
            run_work(make_work(*arguments))
        else:
            step = getattr(self, f"_{kind}")
            step(replay, *arguments)
        replay.done.add(name)
        if len(replay.done) == len(replay.launch.graph):
            self.queue.popleft()
            self.completed += 1
            if replay.goes_on:
                self.launched += 1
                self.queue.appendleft(Replay(replay.launch))

    def _begin(self, replay: Replay) -> None:
        self.simulator.replay += 1
        replay.number = self.simulator.replay
        launch = replay.launch
        if not launch.first:
            launch.first = replay.number
            self._read_inputs(launch)
        for slot in launch.assigned:
            is_active = slot >= 0 and self.slots[slot].active
            replay.slots.append(slot if is_active else -1)

    def _read_inputs(self, launch: Launch) -> None:
        """Read the entry of the input ring; all rows are padding if it is of another replay."""
        entry = launch.first % self.inputs.entries
        slots = [-1] * launch.rows
        if int(self.inputs.stamp.array[entry, 0]) == launch.first:
            slots = self.inputs["slot"].array[entry].tolist()[: launch.rows]
        launch.assigned = slots
        launch.reserved = self.inputs["reserved"].array[entry].tolist()
        launch.max_rounds = int(self.inputs["max_rounds"].array[entry, 0])

    def _kernel_open(self, replay: Replay) -> None:
        for slot in replay.active:
            self.automata.commit(slot)
            for j in range(len(self.slots[slot].tree.token)):
                self.automata.fill(slot, j)

    def _kernel_commit(self, replay: Replay) -> None:
        for slot in replay.active:
            self.automata.commit(slot)
            if self.masked:
                self.automata.fill(slot, 0)

    def _kernel_fill(self, replay: Replay, j: int) -> None:
        for slot in replay.active:
            self.automata.fill(slot, j)

    def _forward(self, replay: Replay) -> None:
        for slot in replay.active:
            s = self.slots[slot]
            s.contexts.clear()
            for j, token in enumerate(s.tree.first(replay.launch.k).token):
                for cache in self.caches:
                    cache.write(slot, s.n + j, token)
                cache = self.caches[j % len(self.caches)]
                path = [cache.at(slot, s.n + node) for node in s.tree.nodes(j)]
                committed = cache.read(slot, s.n + 1)
                s.contexts[j] = context_of([*committed, *path])

    def _verify(self, replay: Replay) -> None:
        entry = replay.number % self.outputs.entries
        for b, slot in enumerate(replay.slots):
            outcome = ref.Outcome()
            if slot >= 0:
                outcome = self._verify_slot(slot, replay.launch.k)
            replay.counts[b] = len(outcome.tokens)
            result = result_row(
                outcome.tokens,
                slot=slot,
                reason=outcome.reason,
                accepted=outcome.accepted,
                tested=outcome.tested,
            )
            self.outputs["rows"].array[entry, b, : len(result)] = result

    def _verify_slot(self, slot: int, k: int) -> ref.Outcome:
        """Verify at most `k` drafts, and make the cache entries of accepted drafts contiguous."""
        s = self.slots[slot]
        n = s.n
        tree = s.tree
        outcome = self.simulator.verify(slot, k)
        for cache in self.caches:
            node = 0
            for i, token in enumerate(outcome.tokens):
                cache.write(slot, n + i, cache.at(slot, n + node))
                node = tree.child(node, token)
        return outcome

    def _decide(self, replay: Replay) -> None:
        """Decide whether a loop goes on, as kernel ``loop_decide`` does."""
        launch = replay.launch
        words = self.control.words
        released = int(words["released"].array[0, 0])
        end_loop = int(words["end_loop"].array[0, 0])
        ends = replay.number + 1 - released >= self.outputs.entries or end_loop >= launch.first
        ends = ends or replay.number + 1 - launch.first >= launch.max_rounds
        num_active = 0
        for b, slot in enumerate(launch.assigned):
            if slot < 0 or not self.slots[slot].active:
                continue
            num_active += 1
            s = self.slots[slot]
            end = min(s.n + 1 + 2 * (self.k + 1), s.limit)
            ends = ends or end + self.control.slack > launch.reserved[b]
        replay.goes_on = num_active > 0 and not ends
        last = self.control.rows["last"]
        last.array[replay.number % last.slots, 0] = not replay.goes_on

    def _publish(self, replay: Replay) -> None:
        if replay.launch.kind == "loop":
            self._decide(replay)
        entry = replay.number % self.outputs.entries
        self.outputs["rows"].array[entry, replay.launch.rows :] = -1
        self.outputs.stamp.array[entry, 0] = replay.number

    def _draft(self, replay: Replay, j: int) -> None:
        for b, slot in enumerate(replay.slots):
            if slot < 0 or not replay.counts[b] or not ref.is_drafting(self.slots[slot], j):
                continue
            self.slots[slot].contexts[j - 1] = self._drafter_context(slot, j - 1)
            added = self.simulator.draft(slot, j, masked=self.masked)
            if added and self.branches:
                self._branch_off(slot, replay.launch.k)

    def _drafter_context(self, slot: int, node: int) -> int:
        """Return the target's state after a node, for the drafter."""
        s = self.slots[slot]
        # The cache has no entry of node 0, the last token, yet.
        return context_of([*self.caches[0].read(slot, s.n), s.last, *s.tree.path(node)])

    def _branch_off(self, slot: int, k: int) -> None:
        """Add drafts at random nodes of the tree."""
        s = self.slots[slot]
        for _ in range(self.rng.randrange(k)):
            node = self.rng.randrange(len(s.tree.token))
            token = self.decision.propose(s, self._drafter_context(slot, node), ALL_IDS)
            if s.tree.child(node, token) is not None:
                token = self.rng.randrange(VOCAB)
            if ref.may_grow(s, node) and s.tree.child(node, token) is None:
                self.simulator.add_draft(slot, token, parent=node)


@dataclass
class ToyAutomaton:
    """Grammar state of a slot on the simulated device; see ``struct AutomatonSlot``."""

    epoch: int
    matcher: Any
    applied: int


class SteppingAutomata:
    """Simulates `DeviceAutomata`. Grammars whose automaton has been built can be promoted."""

    def __init__(self, toy: SteppingDevice):
        self._toy = toy
        self._slots: dict[int, ToyAutomaton] = {}

    # Host ---------------------------------------------------------------------------------------

    def join(self, lane: Any, slot: int, epoch: int, matcher: Any, closing_end: int = -1) -> bool:
        assert closing_end == -1  # the toy language has no distances
        promoted = bool(matcher.is_automaton)

        def join() -> None:
            self._slots.pop(slot, None)
            if promoted:
                applied = self._toy.simulator.replay
                self._slots[slot] = ToyAutomaton(epoch, matcher, applied)

        self._toy.prologue.append(join)
        self._toy.tick()
        return promoted

    def release(self, slot: int) -> None:
        self._toy.require_idle(slot, "automaton")

    # Kernels ------------------------------------------------------------------------------------

    def _find(self, slot: int) -> ToyAutomaton | None:
        own = self._slots.get(slot)
        return own if own is not None and own.epoch == self._toy.slots[slot].epoch else None

    def commit(self, slot: int) -> None:
        """Apply the tokens of the latest replay that committed any, if not done before."""
        own = self._find(slot)
        if own is None:
            return
        replay, tokens = read_committed(self._toy.exchange, slot)
        if replay <= own.applied or not tokens:
            return
        assert all(own.matcher.accept(token) for token in tokens), "a token is illegal"
        own.applied = replay

    def fill(self, slot: int, j: int) -> None:
        """Write mask row `j` of a slot if the grammar has a state for it."""
        own = self._find(slot)
        s = self._toy.slots[slot]
        if own is None or j >= len(s.tree.token):
            return
        path = s.tree.path(j)
        position = s.n + len(path)
        row = ref.MaskRow(ref.FREE, own.epoch, position)
        accepted = list(itertools.takewhile(own.matcher.accept, path))
        legal = () if own.matcher.is_terminated() else tuple(own.matcher.legal().tolist())
        own.matcher.rollback(len(accepted))
        if len(accepted) < len(path):
            return
        if not legal:
            row = replace(row, state=ref.DEAD_END)
        elif legal != ALL_IDS:
            row = replace(row, state=ref.READY, legal=np.isin(ALL_IDS, legal))
        write_mask_row(self._toy.exchange, slot, j, row)


class SteppingRing(Ring):
    """The real ring. Every access advances the device. A wait advances it until the wait ends."""

    toy: SteppingDevice

    def reserve(self, replay: int) -> int:
        self.toy.tick()
        return super().reserve(replay)

    def publish(self, replay: int) -> None:
        super().publish(replay)
        self.toy.tick()

    def release(self, replay: int) -> None:
        super().release(replay)
        self.toy.tick()

    def row(self, name: str, replay: int) -> Any:
        self.toy.tick()
        return super().row(name, replay)

    def wait(self, replay: int, timeout_s: float | None = None, stream: int = 0) -> bool:
        while int(self.stamp.array[replay % self.entries, 0]) != replay:
            if not self.toy.advance():
                raise Hang(f"replay {replay} will never publish its results")
        return True


class SteppingControl(LoopControl):
    """The real `LoopControl`. Every change of its words advances the device."""

    toy: SteppingDevice

    def end(self, first: int) -> None:
        super().end(first)
        self.toy.tick()

    def release(self, replay: int) -> None:
        super().release(replay)
        self.toy.tick()


class SteppingDecoder(GuidedDecoder):
    """Guided decoder that asserts that a replay is complete when its snapshot is retired."""

    toy: SteppingDevice
    # A test that injects the early retirement of snapshots sets this list. The list keeps all
    # published requests alive.
    kept: list[Any] | None = None

    def publish(self, replay: int, requests: Any) -> None:
        self.toy.tick()
        if self.kept is not None:
            self.kept.extend(requests)
        super().publish(replay, requests)
        self.toy.tick()

    def retire(self, replay: int) -> None:
        assert replay <= self.toy.completed, f"replay {replay} was retired while it runs"
        super().retire(replay)


assert VOCAB > 32  # rows of two words
