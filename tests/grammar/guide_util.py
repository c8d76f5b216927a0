"""What the guide's tests share: exchange memory without a device, and a decoder driven by hand.

What masks ought to be is `oracle_row`'s business, which asks a stock matcher that is fed the tokens
from the start. Matchers come in two kinds: "native", and "python", which the worker calls with the
GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import reference_round as ref
from reference_round import FREE, NOT_READY, READY

from graft.cudagraph.device import open_device
from graft.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, Matcher, Vocabulary
from graft.grammar.decoder import GuidedDecoder, GuidedRequest
from graft.native import _native
from graft.sampling.exchange import Exchange

STOP = 256
OTHER_STOP = 257
THINK = 266
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], 257, [STOP])


def accepts(compiled: CompiledGrammar, *parts: str | int) -> bool:
    """Whether text byte by byte, ids as they are, and then the stop id are accepted."""
    matcher = compiled.matcher()
    tokens = [t for part in parts for t in ([part] if isinstance(part, int) else part.encode())]
    return all(map(matcher.accept, tokens)) and matcher.accept(STOP)


def fits(backend: GrammarBackend, spec: GrammarSpec, *parts: str | int) -> bool:
    """`accepts` of a grammar that the backend compiles."""
    return accepts(backend.compile(spec), *parts)


def said_by(code: str, *arguments: str, **options: Any) -> str:
    """What another Python prints, which runs the code to its end."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def byte_vocabulary(size: int = 270, names: dict[str, int] | None = None) -> Vocabulary:
    """All bytes but ``Z``, two stop ids and some longer tokens; the size is no multiple of 32."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens[ord("Z")] = b""
    tokens += [b"", b"", b'{"', b"ab", b"true", b'": ', b"abc", b"}"]
    return Vocabulary(tokens, size, [STOP, OTHER_STOP], names)


def exchange_for(slots: int, drafts: int, vocab_size: int, *more: int) -> Exchange:
    """Exchange memory of the process's device, whose part the tests play."""
    return Exchange(open_device(), slots, drafts, vocab_size, *more)


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


JSON_TYPES = {"native": lambda matcher: matcher, "python": InPython}


def run_work(work: Any) -> None:
    """Run a host step as a driver thread would, without the GIL."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.address)(work.data)


def mix(*values: int) -> int:
    """A number that looks random and depends on the values alone."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
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

    def __init__(
        self, backend, kind="native", *, k=2, slots=1, candidates=0, held=False, tree=(1, 0)
    ):
        self.backend = backend
        self.kind = kind
        self.held = held
        self.clock = np.zeros(1, np.int64)
        self.gate = np.zeros(16, np.int32)
        self.exchange = exchange_for(slots, k, backend.vocabulary.size, candidates, *tree)
        options = {"masked_drafts": True, "max_in_flight": 4, "threads": 1}
        with budgets_by(self.clock) if held else contextlib.nullcontext():
            budget = BUDGET_NS / 1000 if held else None
            self.decoder = GuidedDecoder(self.exchange, budget_us=budget, **options)
        self.open = self.decoder.open_work()
        self.commit = self.decoder.commit_work()
        last = 1 if len(tree) > 2 else k - (candidates == 0)
        self.drafts = [self.decoder.draft_work(j) for j in range(1, last + 1)]

    def request(self, spec="regex", *, slot=0, epoch=1, position=10, gated=True):
        matcher = JSON_TYPES[self.kind](self.backend.compile(SPECS[spec]).matcher())
        if self.held and gated and slot == 0:
            matcher = Gated(matcher, self.gate)
        return GuidedRequest(slot, epoch, matcher, position)

    def committed(self, replay, *tokens, slot=0):
        """What verification writes: the tokens, and that there are no drafts yet."""
        for one in np.atleast_1d(slot):
            ref.record(self.exchange, one, replay, tokens)

    def drafted(self, replay, *tokens, slot=0, parents=None):
        for one in np.atleast_1d(slot):
            ref.record_drafts(self.exchange, one, replay, tokens, parents)

    def start(self, replay, requests):
        """Publish a replay, and run its first step."""
        self.decoder.publish(replay, requests)
        self.run(self.open)

    def verify(self, replay, *tokens, slot=0):
        """What verification writes, and the step behind it."""
        self.committed(replay, *tokens, slot=slot)
        self.run(self.commit)

    def draft(self, replay, *tokens, slot=0):
        """What the first drafts are, and the step behind the first."""
        self.drafted(replay, *tokens, slot=slot)
        self.run(self.drafts[0])

    def run(self, *works):
        """Run steps; a budget ends when only a slot at its gate is left."""
        for work in works:
            if not self.held:
                run_work(work)
                continue
            step = threading.Thread(target=run_work, args=(work,))
            step.start()
            posted = half = False
            while step.is_alive():
                posted = posted or self.decoder._worker.waiting()
                if posted and self.gate[1] and self.decoder._worker.busy_slots() == 1:
                    self.clock += BUDGET_NS
                elif posted and self.gate[1] and not half:
                    self.clock += BUDGET_NS // 2  # wakes threads for what is queued behind them
                    half = True
                step.join(1e-4)

    def close_gate(self, call):
        """Slot 0's matcher waits in the ``call``-th call from now on."""
        self.gate[2] = 0
        self.gate[0] = call

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


def joined(backend, kind="native", *, slots=1, **options):
    """A rig whose first replay has begun with a request in each slot, and the requests."""
    rig = Rig(backend, kind, slots=slots, **options)
    requests = [rig.request(slot=slot, epoch=slot + 1) for slot in range(slots)]
    rig.start(1, requests)
    return rig, requests


SPECS = {
    "choice": GrammarSpec.choice(["abab", "abc", 'a"b\\', "x\n"]),
    "schema": GrammarSpec.json_schema(
        {
            "type": "object",
            "required": ["abc", "n"],
            "properties": {
                "abc": {"type": "string", "maxLength": 4},
                "b": {"enum": [1, "true"]},
                "n": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            },
        }
    ),
    "regex": GrammarSpec.regex("(ab|c)+[0-9]*"),
    "dead end": GrammarSpec.ebnf('root ::= "a" ("b" "Z" | "c"*)'),
    "text, then choice": GrammarSpec.choice(["abab", "abc"]).after('a":'),
    "id, then regex": GrammarSpec.regex("(ab|c)+[0-9]*").after(265, required=True),
}
