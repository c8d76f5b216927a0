"""What the guide's tests share: exchange memory without a device, and a device in NumPy.

`Device` does what the kernels do with a slot: verify against mask rows, commit, draft. It decides
from the masks it is given and a random generator; what the masks ought to be is `oracle_row`'s
business, which asks a stock matcher that is fed the tokens from the start. Matchers come in two
kinds: "native", and "python", which the worker calls with the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.exchange import Exchange
from graft.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarSpec,
    GuidedDecoder,
    GuidedRequest,
    Matcher,
    Vocabulary,
)
from graft.grammar.forced import ForcedText
from graft.native import _native

NOT_READY, FREE, READY, DEAD_END, ERROR = range(5)
STOP, OTHER_STOP = 256, 257
MARKER_TOKENS = [*b'a":', 261, 265]


def byte_vocabulary(size: int = 270, names: dict[str, int] | None = None) -> Vocabulary:
    """All bytes but ``Z``, two stop ids and some longer tokens; the size is no multiple of 32."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens[ord("Z")] = b""
    tokens += [b"", b"", b'{"', b"ab", b"true", b'": ', b"abc", b"}"]
    return Vocabulary(tokens, size, [STOP, OTHER_STOP], names)


def exchange_for(slots: int, drafts: int, vocab_size: int, candidates: int = 0) -> Exchange:
    """Exchange memory of the process's device, whose part the tests play."""
    return Exchange(open_device(), slots, drafts, vocab_size, candidates)


class InPython(Matcher):
    """Another matcher as a backend in Python alone brings it."""

    def __init__(self, inner: Matcher):
        super().__init__(inner.compiled, inner.stop_ids)
        self.inner = inner

    def accept(self, token: int) -> bool:
        return self.inner.accept(token)

    def fill(self, row: np.ndarray) -> bool:
        return self.inner.fill(row)

    def rollback(self, tokens: int) -> None:
        self.inner.rollback(tokens)

    def is_terminated(self) -> bool:
        return self.inner.is_terminated()


class Gated(InPython):
    """Waits where it is told to: tests of late slots are driven by that, instead of the clock.

    Calls of accept and fill are counted in gate[2]. From the gate[0]-th on they wait until gate[0]
    is 0; 0: none does. gate[1] is how many wait now.
    """

    def __init__(self, inner: Matcher, gate: np.ndarray):
        super().__init__(inner)
        self.gate = gate

    def _wait(self) -> None:
        self.gate[2] += 1
        if 0 < self.gate[0] <= self.gate[2]:
            self.gate[1] += 1
            end = time.monotonic() + 60  # a test that fails leaves its gate closed
            while self.gate[0] and time.monotonic() < end:
                time.sleep(1e-4)
            self.gate[1] -= 1

    def accept(self, token: int) -> bool:
        self._wait()
        return super().accept(token)

    def fill(self, row: np.ndarray) -> bool:
        self._wait()
        return super().fill(row)


KINDS = {"native": lambda matcher: matcher, "python": InPython}


def run_work(work: Any) -> None:
    """Run a host step as a driver thread would, without the GIL."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.address)(work.data)


def bits(row: np.ndarray) -> np.ndarray:
    """Ids whose bit is set in a mask row."""
    words = np.ascontiguousarray(row)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def mix(*values: int) -> int:
    """A number that looks random and depends on the values alone."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9) % 2**64
        state ^= state >> 29
    return state


def oracle_row(start: Callable[[], Matcher], tokens: Sequence[int]) -> np.ndarray | None:
    """The mask row after ``tokens``, of a matcher that has just met them; None if there is none.

    Where nothing is constrained the row has every bit, those beyond the vocabulary too.
    """
    matcher = start()
    for token in tokens:
        if not matcher.accept(token):
            return None
    if matcher.is_terminated():
        return None
    row = np.zeros(matcher.compiled.backend.vocabulary.words, np.int32)
    if not matcher.fill(row):
        row[:] = -1
    return row


BUDGET_NS = 1_000_000


@contextlib.contextmanager
def budgets_by(clock: np.ndarray) -> Iterator[None]:
    """Decoders made meanwhile measure budgets by ``clock``, int64 nanoseconds, and hand every order
    to a thread."""
    plain = _native.guide.Worker
    _native.guide.Worker = functools.partial(plain, clock=clock.ctypes.data)
    try:
        yield
    finally:
        _native.guide.Worker = plain


class Rig:
    """A decoder driven by hand.

    With ``held``, budgets are measured by a clock that stands still, and slot 0's matchers have a
    gate: the clock moves on when nobody but slot 0 is at work, so it is late, on any machine.
    """

    def __init__(self, backend, kind="native", *, k=2, slots=1, candidates=0, held=False):
        self.backend, self.kind, self.held = backend, kind, held
        self.clock, self.gate = np.zeros(1, np.int64), np.zeros(16, np.int32)
        self.exchange = exchange_for(slots, k, backend.vocabulary.size, candidates)
        options = {"masked_drafts": True, "ring": 4, "threads": 1}
        with budgets_by(self.clock) if held else contextlib.nullcontext():
            budget = BUDGET_NS / 1000 if held else None
            self.decoder = GuidedDecoder(self.exchange, budget_us=budget, **options)
        self.open, self.commit = self.decoder.open_work(), self.decoder.commit_work()
        self.drafts = [self.decoder.draft_work(j) for j in range(1, k + (candidates > 0))]

    def request(self, spec="regex", *, slot=0, epoch=1, position=10, gated=True):
        matcher = KINDS[self.kind](self.backend.compile(SPECS[spec]).matcher())
        if self.held and gated and slot == 0:
            matcher = Gated(matcher, self.gate)
        return GuidedRequest(slot, epoch, matcher, position)

    def committed(self, replay, *tokens, slot=0):
        """What verification writes: the tokens, and that there are no drafts yet."""
        self.exchange.committed[slot, : 2 + len(tokens)] = (replay, len(tokens), *tokens)
        self.drafted(replay, slot=slot)

    def drafted(self, replay, *tokens, slot=0):
        self.exchange.drafted[slot, : 2 + len(tokens)] = (replay, len(tokens), *tokens)

    def run(self, *works):
        """Run steps; a budget ends when only a slot at its gate is left."""
        for work in works:
            if not self.held:
                run_work(work)
                continue
            worker, posted, half = self.decoder._worker, False, False
            step = threading.Thread(target=run_work, args=(work,))
            step.start()
            while step.is_alive():
                posted = posted or worker.waiting()
                if posted and self.gate[1] and worker.busy_slots() == 1:
                    self.clock += BUDGET_NS
                elif posted and self.gate[1] and not half:
                    self.clock += BUDGET_NS // 2  # wakes threads for what is queued behind it
                    half = True
                step.join(1e-4)

    def close_gate(self, call):
        """Slot 0's matcher waits in the ``call``-th call from now on."""
        self.gate[2], self.gate[0] = 0, call

    def open_gate(self):
        self.gate[0] = 0
        self.decoder._worker.wait_idle()

    def states(self, slot=0):
        """The slot's stamps; of a row that is not ready there is nothing to say."""
        rows = self.exchange.stamps[slot].tolist()
        return [list(row) if row[0] != NOT_READY else [NOT_READY] for row in rows]

    def rows(self, slot=0):
        """State, epoch and position of the rows that are ready in any way."""
        return [tuple(row[:3]) for row in self.states(slot) if row[0] != NOT_READY]

    def expect_row(self, tokens, *, slot=0, j=0, spec="regex"):
        """Mask row j is that of a new matcher after the tokens, or says that text is free there."""
        compiled = self.backend.compile(SPECS[spec])
        row = oracle_row(lambda: compiled.matcher(), tokens)
        free = (row == -1).all()
        assert self.states(slot)[j][0] == (FREE if free else READY)
        if not free:
            np.testing.assert_array_equal(self.exchange.masks[slot, j], row)


@dataclass
class SlotTruth:
    """What the simulated device knows about one slot."""

    name: int  # what it generates depends on it
    epoch: int
    start: Callable[[], Matcher] | None  # None: unconstrained
    position: int  # n when it joined
    n: int
    limit: int
    active: bool = True
    drafts: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    reason: int = 0
    confused: bool = False  # an illegal token was committed on purpose
    left: bool = False  # the host knows that it has ended


class Device:
    """Runs rounds of decoders that must agree, by the kind of their matchers, checking every row
    against the oracle."""

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        oracle: GrammarBackend | None = None,
        slots: int,
        draft_length: int,
        masked: bool,
        seed: int,
        kinds: Sequence[str] = ("native", "python"),
        illegal: float = 0.1,
        stall: float = 0.05,
        wrong: float = 0.0,
        probe: bool = False,
        forced: ForcedText | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.forced = forced
        self.backend, self.k, self.masked, self.probe = backend, draft_length, masked, probe
        self.oracle = oracle or backend
        self.oracle_grammars: dict[GrammarSpec, CompiledGrammar] = {}
        self.rng = np.random.default_rng(seed)
        self.size = backend.vocabulary.size
        self.illegal, self.stall, self.wrong = illegal, stall, wrong
        self.kinds = kinds
        sizes = (slots, draft_length, self.size, 4 * probe)
        self.exchanges = [exchange_for(*sizes) for _ in kinds]
        options = {"masked_drafts": masked, "forced": forced, "ring": 4, **(options or {})}
        self.decoders = [GuidedDecoder(exchange, **options) for exchange in self.exchanges]
        self.slots: list[SlotTruth | None] = [None] * slots
        self.matchers: list[list[Matcher | None]] = [[None] * slots for _ in kinds]
        self.epoch = 0
        self.replay = 0
        self.published = 0
        self.snapshots: dict[int, list[int]] = {}
        self.ended: list[SlotTruth] = []
        works = [[d.open_work() for d in self.decoders]]
        if draft_length:
            works.append([d.commit_work() for d in self.decoders])
        if masked:
            last = draft_length + probe
            works += [[d.draft_work(j) for d in self.decoders] for j in range(1, last)]
        self.works = works

    # The host's side.

    def join(
        self, slot: int, compiled: CompiledGrammar | None, *, limit: int, name: int | None = None
    ) -> None:
        """Put a new request into a slot; it takes part from the next published replay on."""
        self.epoch += 1
        name = self.epoch if name is None else name
        position = mix(name) % 50
        start = None
        if compiled is not None:
            if compiled.spec not in self.oracle_grammars:
                self.oracle_grammars[compiled.spec] = self.oracle.compile(compiled.spec)
            known = self.oracle_grammars[compiled.spec]
            start = lambda: known.matcher()  # noqa: E731
        self.slots[slot] = SlotTruth(name, self.epoch, start, position, position, position + limit)
        for kind, matchers in zip(self.kinds, self.matchers, strict=True):
            matchers[slot] = compiled and KINDS[kind](compiled.matcher())

    def is_idle(self, slot: int) -> bool:
        """Whether the slot may be given to a new request: no replay in flight names it."""
        truth = self.slots[slot]
        named = any(slot in rows for rows in self.snapshots.values())
        return truth is None or (truth.left and not named)

    def publish(self, leave_out: Sequence[int] = ()) -> None:
        """Announce the next replay with every slot that is not known to have ended."""
        self.published += 1
        rows = [
            s
            for s, truth in enumerate(self.slots)
            if truth and not truth.left and s not in leave_out
        ]
        self.rng.shuffle(rows)
        self.snapshots[self.published] = rows
        for decoder, matchers in zip(self.decoders, self.matchers, strict=True):
            requests = []
            for s in rows:
                truth = self.slots[s]
                assert truth is not None
                requests.append(GuidedRequest(s, truth.epoch, matchers[s], truth.position))
            decoder.publish(self.published, requests)

    # The device's side.

    def run(self) -> None:
        """One replay: open, verify, commit, draft, with all checks; then the replay retires."""
        self.replay += 1
        rows = self.snapshots.pop(self.replay)
        self._step(0)
        self._check_open(rows)
        counts = {s: self._verify(s) for s in rows}
        if self.k:
            self._step(1)
            for s in rows:
                if counts[s] and not self.probe:
                    self._check_row(s, 0)
        for j in range(1, self.k + 1):
            if self.probe:
                self._probe(j, [s for s in rows if counts[s]])
                continue
            for s in rows:
                if counts[s]:
                    self._draft(s, j)
            if self.masked and j < self.k:
                self._step(1 + j)
                for s in rows:
                    truth = self.slots[s]
                    if counts[s] and truth and len(truth.drafts) == j:
                        self._check_row(s, j)
        for decoder in self.decoders:
            decoder.retire(self.replay)

    def clear_ended(self) -> None:
        """Take slots whose request has ended out of the next snapshots."""
        for truth in self.slots:
            if truth and not truth.active and not truth.left:
                truth.left = True
                self.ended.append(truth)

    def _step(self, index: int) -> None:
        for work in self.works[index]:
            run_work(work)
        first = self.exchanges[0]
        for other in self.exchanges[1:]:
            for name in ("stamps", "masks", "answer"):
                np.testing.assert_array_equal(getattr(first, name), getattr(other, name))

    def _state(self, slot: int, j: int) -> int:
        """The row's state as a kernel reads it; a foreign stamp counts as none."""
        truth = self.slots[slot]
        assert truth is not None
        state, epoch, position, more = self.exchanges[0].stamps[slot, j].tolist()
        anywhere = state == FREE and more == 1  # a request without a grammar
        if epoch != truth.epoch or (position != truth.n + j and not anywhere):
            return NOT_READY
        return int(state)

    def _check_row(self, slot: int, j: int) -> None:
        """Row j is a fresh matcher's after the history and j drafts; its state says what it is."""
        truth = self.slots[slot]
        assert truth is not None
        if not truth.active and j == 0 and truth.reason:
            return
        state = self._state(slot, j)
        if truth.start is None:
            assert state == FREE
            return
        if truth.confused:
            assert j > 0 or state == ERROR
            return
        row = oracle_row(truth.start, truth.history + truth.drafts[:j])
        if row is None:
            # the history has ended (row 0), or drafts no row can follow
            assert state == (DEAD_END if j == 0 else NOT_READY), (slot, j, state)
        elif (row == -1).all():
            assert state == FREE, (slot, j, state)
        else:
            assert state == (READY if row.any() else DEAD_END), (slot, j, state)
            if self.forced is not None and state == READY:
                more = self.exchanges[0].stamps["more"][slot, j]
                assert more == 1 + self.forced.token(row)
            np.testing.assert_array_equal(self.exchanges[0].masks[slot, j], row)

    def _check_open(self, rows: Sequence[int]) -> None:
        for s in rows:
            truth = self.slots[s]
            assert truth is not None
            if truth.active:
                for j in range(len(truth.drafts) + 1):
                    self._check_row(s, j)

    def _verify(self, slot: int) -> int:
        truth = self.slots[slot]
        assert truth is not None
        tokens: list[int] = []
        if truth.active:
            state = self._state(slot, 0)
            if state in (DEAD_END, ERROR):
                truth.active = False
                truth.reason = 3 if state == DEAD_END else 4
            elif state != NOT_READY and self.rng.random() >= self.stall:
                tokens = self._walk(slot, truth)
        for exchange in self.exchanges:
            committed = exchange.committed[slot]
            committed[0], committed[1] = self.replay, len(tokens)
            committed[2 : 2 + len(tokens)] = tokens
            if tokens:
                exchange.drafted[slot, :2] = (self.replay, 0)
        if tokens:
            truth.n += len(tokens)
            truth.drafts = []
            if not truth.confused:
                truth.history += tokens
            stop = tokens[-1] in (STOP, OTHER_STOP)
            if stop or truth.n + 1 >= truth.limit:
                truth.active = False
                truth.reason = 1 if stop else 2
        return len(tokens) if truth.active else 0

    def _walk(self, slot: int, truth: SlotTruth) -> list[int]:
        tokens: list[int] = []
        for j in range(len(truth.drafts) + 1):
            if truth.n + j + 1 >= truth.limit or self._state(slot, j) not in (FREE, READY):
                break
            legal = self._legal(slot, j)
            if truth.start and self.rng.random() < self.wrong:
                illegal = np.setdiff1d(np.arange(-3, self.size + 3), legal)
                tokens.append(int(self.rng.choice(illegal)))
                truth.confused = True
                break
            tokens.append(self._wanted(truth, truth.n + j + 1, legal))
            if [tokens[-1]] != truth.drafts[j : j + 1] or tokens[-1] in (STOP, OTHER_STOP):
                break
        return tokens

    def _legal(self, slot: int, j: int) -> np.ndarray:
        ready = self._state(slot, j) == READY
        return bits(self.exchanges[0].masks[slot, j]) if ready else np.arange(self.size)

    def _wanted(self, truth: SlotTruth, position: int, legal: np.ndarray) -> int:
        """One of the legal ids, by request and position alone; often one that a marker is made of,
        where those are legal."""
        likely = np.intersect1d(MARKER_TOKENS, legal)
        if len(likely) and len(legal) > 200 and mix(truth.name, position) % 10 < 8:
            legal = likely
        return max(legal.tolist(), key=lambda token: mix(truth.name, position, token))

    def _draft(self, slot: int, j: int) -> None:
        truth = self.slots[slot]
        assert truth is not None
        if not self._drafts_on(slot, j):
            return
        if self.forced is not None:
            more = int(self.exchanges[0].stamps["more"][slot, j - 1])
            if self._state(slot, j - 1) == READY and more > 0:
                self._keep(slot, j, more - 1)
                return
            if not self.masked:
                return
        choices = np.arange(self.size)
        if self.masked:
            if self._state(slot, j - 1) not in (FREE, READY):
                return
            choices = self._legal(slot, j - 1)
        elif truth.start:  # a drafter that mostly knows what is legal
            row = oracle_row(truth.start, truth.history + truth.drafts)
            if row is not None and row.any():
                choices = bits(row)
        choices = choices[choices < self.size]
        token = self._wanted(truth, truth.n + j, choices)
        if self.rng.random() < 0.25:
            token = int(self.rng.choice(choices))
        if self.rng.random() < self.illegal:
            token = int(self.rng.choice([-1, self.size, 2**31 - 1, *range(self.size)]))
        self._keep(slot, j, token)

    def _probe(self, j: int, rows: Sequence[int]) -> None:
        """Offer candidates, legal and not; the answer is the first that is legal."""
        offers = {s: self._offer(s, j) for s in rows if self._drafts_on(s, j)}
        self._step(1 + j)
        for s, offer in offers.items():
            truth = self.slots[s]
            assert truth is not None
            if truth.start is None:
                self._keep(s, j, self._wanted(truth, truth.n + j, np.arange(self.size)))
                continue
            row = oracle_row(truth.start, truth.history + truth.drafts)
            replay, draft, token = self.exchanges[0].answer[s].tolist()
            if truth.confused or row is None:
                assert (replay, draft) != (self.replay, j)
                continue
            legal = bits(row)
            if not len(legal):  # a dead end: found by filling the row
                self._check_row(s, j - 1)
                continue
            assert (replay, draft) == (self.replay, j)
            expected = [int(id) for id in offer if id in legal and 0 <= id < self.size]
            assert token == (expected[0] if expected else -1)
            if token < 0:
                self._check_row(s, j - 1)
                token = self._wanted(truth, truth.n + j, legal[legal < self.size])
            self._keep(s, j, token)

    def _drafts_on(self, slot: int, j: int) -> bool:
        truth = self.slots[slot]
        assert truth is not None
        stopped = truth.drafts and truth.drafts[-1] in (STOP, OTHER_STOP)
        return len(truth.drafts) == j - 1 and truth.n + j < truth.limit and not stopped

    def _offer(self, slot: int, j: int) -> list[int]:
        truth = self.slots[slot]
        assert truth is not None
        likely = [-1, self.size, 2**31 - 1, *range(self.size)]
        row = None
        if truth.start and self.rng.random() < 0.8:
            row = oracle_row(truth.start, truth.history + truth.drafts)
            likely = likely if row is None or not row.any() else likely[:3] + bits(row).tolist()
        count = int(self.rng.integers(0, 5))
        offer = [int(id) for id in self.rng.choice(likely, count)]
        if count and row is not None and row.any():
            legal = bits(row)
            offer[-1] = self._wanted(truth, truth.n + j, legal[legal < self.size])
        for exchange in self.exchanges:
            exchange.candidates[slot, : 3 + count] = [self.replay, j, count, *offer]
        return offer

    def _keep(self, slot: int, j: int, token: int) -> None:
        truth = self.slots[slot]
        assert truth is not None
        truth.drafts.append(token)
        for exchange in self.exchanges:
            drafted = exchange.drafted[slot]
            drafted[0], drafted[1], drafted[1 + j] = self.replay, j, token


SPECS = {
    "choice": GrammarSpec.choice(["abab", "abc", 'a"b\\', "x\n"]),
    "schema": GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"abc": {"type": "boolean"}, "b": {"enum": [1, "true"]}},
            "required": ["abc"],
        }
    ),
    "regex": GrammarSpec.regex("(ab|c)+[0-9]*"),
    "dead end": GrammarSpec.ebnf('root ::= "a" ("b" "Z" | "c"*)'),
    "text, then choice": GrammarSpec.choice(["abab", "abc"]).after('a":'),
    "id, then regex": GrammarSpec.regex("(ab|c)+[0-9]*").after(265, required=True),
}
