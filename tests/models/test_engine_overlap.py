"""Two rounds in flight on the real engine: nothing a request gets depends on it."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_util import demo_engine, mixed_requests
from guide_util import run_work

from graft.cudagraph.errors import HostWorkError, OptionError
from graft.cudagraph.hostwork import NativeWork, PythonWork
from graft.grammar.decoder import GuidedDecoder
from graft.models.engine import Engine
from graft.models.errors import EngineError
from graft.models.request import Output, Request

COUPLED = {"temperature": 0.9, "top_p": 0.95, "verify": "coupled"}


def workload(**options: Any) -> list[Request]:
    """Guided and free requests that end in every way: stop ids, lengths, stop strings."""
    requests = mixed_requests(8, seed=17)
    requests = [replace(r, max_tokens=n) if n else r
                for r, n in zip(requests, (1, 0, 3, 0, 7, 0, 12, 0), strict=True)]  # fmt: skip
    free = Request(tokens=[300, 301, 302], max_tokens=40)
    requests += [replace(free, stop=["e", "a"]), replace(free, tokens=[41]), free]
    return [replace(r, id=str(i), seed=500 + i, **options) for i, r in enumerate(requests)]


def answer(output: Output) -> tuple[str, list[int], str]:
    return output.reason, output.tokens, output.text


@contextmanager
def settled(engine: Engine) -> Iterator[Engine]:
    """Check that the engine holds nothing once its requests are done; then close it."""
    with engine:
        yield engine
        engine.settle()
        counters = engine.counters()
        assert not any(counters["held"].values()), counters["held"]
        grammar = counters["grammar"]
        assert not any(grammar[n] for n in ("desyncs", "errors", "missing_snapshots")), grammar


@pytest.fixture(scope="module")
def truth() -> dict[str, list[tuple[str, list[int], str]]]:
    """What each request gets alone: no drafter, one row, one round in flight."""
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        return {
            name: [answer(engine.generate([r])[0]) for r in workload(**options)]
            for name, options in (("greedy", {}), ("coupled", COUPLED))
        }


def disturbed(engine: Engine, requests: list[Request], seed: int) -> tuple[dict[str, Output], int]:
    """Run requests that come in over time and are preempted and cancelled on the way."""
    rng = random.Random(seed)
    coming, done, preemptions = list(requests), {}, 0
    rng.shuffle(coming)
    while coming or engine.busy:
        for _ in range(min(rng.choice((0, 1, 1, 3)), len(coming))):
            engine.submit(coming.pop())
        for event in engine.step():
            if event.output is not None:
                done[event.id] = event.output
        names = [str(r.id) for r in rng.sample(requests, len(requests))]
        if rng.random() < 0.3 or not preemptions:
            preemptions += any(engine.preempt(name) for name in names)
        if rng.random() < 0.03:
            engine.cancel(names[-1])
    return done, preemptions


@pytest.mark.parametrize(
    "batch, options",
    [
        (1, {"mask_drafts": False}),
        (2, {"mask_drafts": True}),
        (3, {"speculation": False}),
        (5, {"mask_drafts": False}),
        (8, {"mask_drafts": True}),
    ],
    ids=str,
)
def test_disturbed_requests_get_the_same(truth, batch: int, options: dict[str, bool]) -> None:
    """Greedy and coupled, joined late, preempted, cancelled: all tokens as if each ran alone."""
    with settled(demo_engine(max_batch_size=batch, **options)) as engine:
        preempted = 0
        for mode in ("greedy", "coupled"):
            requests = workload(**({} if mode == "greedy" else COUPLED))
            outputs, preemptions = disturbed(engine, requests, seed=batch)
            preempted += preemptions
            for request, expected in zip(requests, truth[mode], strict=True):
                output = outputs[str(request.id)]
                if output.reason == "cancelled":
                    assert output.tokens == expected[1][: len(output.tokens)]
                else:
                    assert answer(output) == expected, (mode, request.id)
        assert preempted == engine.stats.preemptions > 0
        assert (engine.stats.speculated_rounds > 0) == options.get("speculation", True)


@pytest.mark.full
@pytest.mark.parametrize("mask_drafts", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel"])
def test_disturbed_for_long(truth, transport: str, mask_drafts: bool) -> None:
    """Forty disturbed runs at every batch size from 1 to 8, by every transport."""
    for batch in range(1, 9):
        options: dict[str, Any] = {"grammar_transport": transport, "mask_drafts": mask_drafts}
        with settled(demo_engine(max_batch_size=batch, **options)) as engine:
            for seed in range(5):
                mode = "greedy" if seed % 2 else "coupled"
                requests = workload(**({} if mode == "greedy" else COUPLED))
                outputs, _ = disturbed(engine, requests, seed=1000 * batch + seed)
                for request, expected in zip(requests, truth[mode], strict=True):
                    output = outputs[str(request.id)]
                    if output.reason != "cancelled":
                        assert answer(output) == expected, (batch, seed, request.id)


def test_overlap_keeps_rejection_sampling(truth) -> None:
    """Overlap moves no round boundary, so even rejection sampling draws the same tokens."""
    requests = workload(temperature=0.9, verify="rejection")
    outputs = []
    for overlap in (True, False):
        with settled(demo_engine(max_batch_size=4, overlap=overlap)) as engine:
            outputs.append([answer(o) for o in engine.generate(requests)])
    assert outputs[0] == outputs[1]


def test_rounds_are_launched_ahead() -> None:
    """In mid-generation one round is still unread when a step returns; without overlap none is."""
    for overlap, ahead in ((True, 1), (False, 0)):
        with demo_engine(max_batch_size=2, overlap=overlap) as engine:
            for seed in range(2):
                engine.submit(Request(tokens=[300, 301, 302 + seed], max_tokens=40))
            for _ in range(3):
                engine.step()
                assert engine.counters()["held"]["unread_replays"] == ahead


def test_rows_do_not_idle_between_requests() -> None:
    """A request's row is taken over in the round after the one that was launched too early."""
    requests = [Request(tokens=[60 + i, 70], max_tokens=1) for i in range(24)]
    with settled(demo_engine(max_batch_size=2)) as engine:
        assert all(o.reason == "length" for o in engine.generate(requests))
        assert engine.stats.row_rounds == len(requests)
        assert engine.stats.rounds <= len(requests) + 2
        assert engine.stats.surplus_tokens == 0


def test_surplus_tokens_are_counted_and_dropped() -> None:
    """A stop string is seen one round late: what came meanwhile is in no output."""
    free = Request(tokens=[300, 301, 302], max_tokens=40)
    with settled(demo_engine(max_batch_size=1)) as engine:
        (whole,) = engine.generate([free])
        engine.settle()
        engine.reset_stats()
        (cut,) = engine.generate([replace(free, stop=[whole.text[2]])])
        engine.settle()
        assert cut.reason == "stop_string"
        assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) < 40
        assert engine.stats.stale_rows == 1 and engine.stats.surplus_tokens > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_a_failed_round_is_told_once(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """The step that meets it raises it; later ones say that the engine has failed; none hangs."""
    ran = itertools.count(1)

    def burn(work: NativeWork) -> None:
        if next(ran) == 7:
            raise RuntimeError("the grammar is on fire")
        run_work(work)

    plain = GuidedDecoder.commit_work
    monkeypatch.setattr(GuidedDecoder, "commit_work", lambda self: PythonWork(burn, plain(self)))
    engine = demo_engine(max_batch_size=2, grammar_transport="native", overlap=overlap)
    for request in mixed_requests(2):
        engine.submit(request)
    with pytest.raises(HostWorkError, match=r"in replay 7: RuntimeError: .* on fire") as caught:
        while engine.busy:
            engine.step()
    assert caught.value.replay == 7, "the engine's number, not that of one of its graphs"
    for call in (engine.step, engine.settle, lambda: engine.submit(mixed_requests(1)[0])):
        with pytest.raises(EngineError, match=r"has failed: .*on fire"):
            call()
    engine.close()
    engine.close()
    with pytest.raises(OptionError, match="closed"):
        engine.step()


def test_closing_with_rounds_in_flight() -> None:
    """close() in mid-generation cancels, drains both rounds and leaves nothing for the next one."""
    engine = demo_engine(max_batch_size=2)
    for request in mixed_requests(5):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    assert engine.counters()["held"]["unread_replays"] == 1
    engine.close()
    with settled(demo_engine(max_batch_size=2)) as engine:
        assert engine.generate(mixed_requests(1))[0].reason == "stop"


def test_preempting_what_does_not_run() -> None:
    """Only a request that has a slot can be preempted."""
    with settled(demo_engine(max_batch_size=1)) as engine:
        assert not engine.preempt("nobody")
        name = engine.submit(mixed_requests(1)[0])
        assert not engine.preempt(name)
        while not engine.preempt(name):
            engine.step()
        outputs = []
        while engine.busy:
            outputs += [e.output for e in engine.step() if e.output is not None]
        assert [o.preempted for o in outputs] == [1]


FAULT = """
import contextlib, sys
sys.path.insert(0, sys.argv[1])
from engine_util import demo_engine
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.kernels import load_text
from graft.cudagraph.lanes import StreamLane
from graft.models.errors import EngineError
from graft.models.request import Request
engine = demo_engine(max_batch_size=2)
stray = load_text(engine.device, '''
extern "C" __global__ void stray(int* data, long long offset) { data[offset] = 1; }
''', "stray.cu")["stray"]
data = engine.device.zeros((4,), "int32")
for seed in range(2):
    engine.submit(Request(tokens=[300, 301, 302 + seed], max_tokens=40))
for _ in range(3):
    engine.step()
print("unread:", engine.counters()["held"]["unread_replays"])
with contextlib.suppress(DeviceError):  # the fault may come before the call has returned
    StreamLane(engine._built.stream).kernel(stray, 1, 1, [data, 1 << 40])
try:
    while engine.busy:
        engine.step()
except DeviceError as error:
    print("typed:", error.code_name)
try:
    engine.step()
except EngineError as error:
    print("then:", str(error).split(":")[0])
del data, stray
engine.close()
print("closed")
"""


def test_a_fault_with_rounds_in_flight() -> None:
    """A device that faults under two rounds ends them: one error, then refusals, then the end."""
    command = [sys.executable, "-c", FAULT, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "unread: 1", "typed: CUDA_ERROR_ILLEGAL_ADDRESS", "then: the engine has failed", "closed",
    ]  # fmt: skip
