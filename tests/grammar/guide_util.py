"""Helpers of the guided decoder's tests, such as a decoder that a test drives step by step.

The function `oracle_row` computes the expected mask rows. It creates a new matcher, which accepts
all tokens from the start. Tests run with two kinds of matchers: "native" matchers, and "python"
matchers, which the native worker calls with the GIL held.

The decoder and the device communicate through exchange memory. It contains a stamp for each mask
row. The stamp consists of the state of the row (READY, NOT_READY, FREE, DEAD_END or ERROR), and of
the epoch and the position that the row is valid for. FREE means that every token is legal.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from reference_round import FREE, NOT_READY, READY
from round_simulator import exchange_for, run_work, write_committed, write_drafted

from graft.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, Matcher, Vocabulary
from graft.grammar.decoder import GuidedDecoder, GuidedRequest
from graft.native import _native
from graft.sampling.mode import DraftMode

STOP = 256
OTHER_STOP = 257
THINK = 266
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], 257, [STOP])


def accepts(compiled: CompiledGrammar, *parts: str | int) -> bool:
    """Return whether a new matcher accepts all parts and then the stop id.

    A part is a token id, or a text whose bytes are accepted one by one.
    """
    matcher = compiled.matcher()
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += part.encode()
    return all(map(matcher.accept, tokens)) and matcher.accept(STOP)


def fits(backend: GrammarBackend, spec: GrammarSpec, *parts: str | int) -> bool:
    """Compile a grammar and return whether it `accepts` the parts."""
    return accepts(backend.compile(spec), *parts)


def output_of(code: str, *arguments: str, **options: Any) -> str:
    """Run code in another Python process and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def byte_vocabulary(size: int = 270, names: dict[str, int] | None = None) -> Vocabulary:
    """Return a vocabulary of all single bytes except ``Z``, two stop ids and some longer tokens.

    The default size is not a multiple of 32, so that the last word of a mask row has unused bits.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    tokens[ord("Z")] = b""
    tokens += [b"", b"", b'{"', b"ab", b"true", b'": ', b"abc", b"}"]
    return Vocabulary(tokens, size, [STOP, OTHER_STOP], names)


class PythonMatcher(Matcher):
    """Wraps a matcher so that the decoder treats it as a matcher of a pure Python backend."""

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


class GatedMatcher(PythonMatcher):
    """A matcher whose calls can be blocked, so that tests of late slots do not depend on timing.

    Parameters
    ----------
    inner
        The wrapped matcher.
    gate
        int32 array that is shared with the test. ``gate[0]`` is the number of the first call of
        `accept` or `fill` that blocks, or 0 if no call blocks. This call and later calls block
        until the test sets ``gate[0]`` to 0. ``gate[1]`` is the number of calls that are blocked,
        and ``gate[2]`` is the number of calls so far.
    """

    def __init__(self, inner: Matcher, gate: np.ndarray):
        super().__init__(inner)
        self.gate = gate

    def _wait(self) -> None:
        self.gate[2] += 1
        if 0 < self.gate[0] <= self.gate[2]:
            self.gate[1] += 1
            end = time.monotonic() + 60  # a failed test may leave its gate closed
            while self.gate[0] and time.monotonic() < end:
                time.sleep(1e-4)
            self.gate[1] -= 1

    def accept(self, token: int) -> bool:
        self._wait()
        return super().accept(token)

    def fill(self, row: np.ndarray) -> bool:
        self._wait()
        return super().fill(row)


MATCHER_KINDS = {"native": lambda matcher: matcher, "python": PythonMatcher}


def oracle_row(start: Callable[[], Matcher], tokens: Sequence[int]) -> np.ndarray | None:
    """Return the mask row of a new matcher that has accepted `tokens`.

    Return None if a token is illegal or the matcher has terminated. If every token is legal, all
    bits of the row are set, including bits beyond the vocabulary.
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


@functools.cache
def compiled_for(use: str, backend: GrammarBackend, spec: str) -> CompiledGrammar:
    """Compile a grammar of `SPECS` once for each use.

    The expected rows come from another object than those of the decoder, because a compiled grammar
    may keep rows that it has computed.
    """
    return backend.compile(SPECS[spec])


BUDGET_NS = 1_000_000


@contextlib.contextmanager
def simulated_clock(clock: np.ndarray) -> Iterator[None]:
    """Let decoders that are created in the context measure budgets with a simulated clock.

    The matchers of these decoders run only on threads of the native worker.

    Parameters
    ----------
    clock
        int64 array with the time in nanoseconds.
    """
    plain = _native.guide.Worker
    _native.guide.Worker = functools.partial(plain, clock=clock.ctypes.data)
    try:
        yield
    finally:
        _native.guide.Worker = plain


class Rig:
    """A decoder that a test drives step by step.

    If `held` is True, budgets are measured with a simulated clock, and the matchers of slot 0 are
    `GatedMatcher`. The clock advances while only slot 0 is busy. Whether slot 0 is late therefore
    does not depend on the speed of the machine.
    """

    def __init__(self, backend, kind="native", *, k=2, slots=1, mode=None, held=False, forced=None):
        mode = mode or DraftMode.chain(k)
        self.backend = backend
        self.kind = kind
        self.held = held
        self.clock = np.zeros(1, np.int64)
        self.gate = np.zeros(16, np.int32)
        self.exchange = exchange_for(slots, backend.vocabulary.size, mode)
        options = {"max_in_flight": 4, "threads": 1, "forced": forced}
        with simulated_clock(self.clock) if held else contextlib.nullcontext():
            budget = BUDGET_NS / 1000 if held else None
            self.decoder = GuidedDecoder(self.exchange, budget_us=budget, **options)
        self.open = self.decoder.open_work()
        self.commit = self.decoder.commit_work()
        last = mode.drafts if mode.probes else mode.drafts - 1
        if mode.is_lattice:
            last = 1
        self.drafts = [self.decoder.draft_work(j) for j in range(1, last + 1)]

    def request(self, spec="regex", *, slot=0, epoch=1, position=10, gated=True):
        matcher = MATCHER_KINDS[self.kind](compiled_for("decoder", self.backend, spec).matcher())
        if self.held and gated and slot == 0:
            matcher = GatedMatcher(matcher, self.gate)
        return GuidedRequest(slot, epoch, matcher, position)

    def committed(self, replay, *tokens, slot=0):
        """Write committed tokens to the exchange memory, as verification does."""
        for one in np.atleast_1d(slot):
            write_committed(self.exchange, one, replay, tokens)

    def drafted(self, replay, *tokens, slot=0, parents=None):
        """Write drafts to the exchange memory, as the drafter does."""
        for one in np.atleast_1d(slot):
            write_drafted(self.exchange, one, replay, tokens, parents)

    def start(self, replay, requests):
        """Publish a replay and run its open step."""
        self.decoder.publish(replay, requests)
        self.run(self.open)

    def verify(self, replay, *tokens, slot=0):
        """Write committed tokens and run the commit step."""
        self.committed(replay, *tokens, slot=slot)
        self.run(self.commit)

    def draft(self, replay, *tokens, slot=0):
        """Write drafts and run the first draft step."""
        self.drafted(replay, *tokens, slot=slot)
        self.run(self.drafts[0])

    def run(self, *works):
        """Run steps. If `held` is True, slot 0 exceeds its budget once the other slots are done."""
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
                    self.clock += BUDGET_NS // 2  # makes the worker wake threads for queued slots
                    half = True
                step.join(1e-4)

    def close_gate(self, call):
        """Block the matcher of slot 0 from its `call`-th call from now on."""
        self.gate[2] = 0
        self.gate[0] = call

    def open_gate(self):
        self.gate[0] = 0
        self.decoder._worker.wait_idle()

    def states(self, slot=0):
        """Return the stamps of a slot's mask rows. For NOT_READY rows, return only the state."""
        rows = self.exchange.stamps[slot].tolist()
        return [list(row) if row[0] != NOT_READY else [NOT_READY] for row in rows]

    def rows(self, slot=0):
        """Return the state, epoch and position of a slot's mask rows that are not NOT_READY."""
        return [tuple(row[:3]) for row in self.states(slot) if row[0] != NOT_READY]

    def expect_row(self, tokens, *, slot=0, j=0, spec="regex"):
        """Compare mask row `j` with the row of a new matcher that has accepted `tokens`."""
        row = oracle_row(compiled_for("oracle", self.backend, spec).matcher, tokens)
        free = (row == -1).all()
        assert self.states(slot)[j][0] == (FREE if free else READY)
        if not free:
            np.testing.assert_array_equal(self.exchange.masks[slot, j], row)


def joined(backend, kind="native", *, slots=1, **options):
    """Create a rig with one request per slot, and run the open step of replay 1.

    Return the rig and the requests.
    """
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
                "abc": {"type": "string", "pattern": "^[^a]{0,4}$"},
                "b": {"enum": [1, "true"]},
                "n": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            },
        }
    ),
    "regex": GrammarSpec.regex("(ab|c)+[0-9]*"),
    "dead end": GrammarSpec.ebnf('root ::= "a" ("b" "Z" | "c"*)'),
    "text, then choice": GrammarSpec.choice(["abab", "abc"]).after('a":'),
    "id, then regex": GrammarSpec.regex("(ab|c)+[0-9]*").after(265, required=True),
    # Texts that begin with the opening "ab" are free text. Other texts belong to the grammar.
    "opening, then regex": GrammarSpec.regex("(ab?|c)+[0-9]*").after('a":', opening="ab"),
}
