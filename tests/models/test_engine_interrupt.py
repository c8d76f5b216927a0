"""Ctrl-C ends a generation cleanly, wherever it falls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from engine_util import demo_engine, mixed_requests

from graft.models.engine import Engine
from graft.models.interrupt import Shield


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with demo_engine(max_batch_size=2) as made:
        yield made


def interrupt_after(delay_s: float) -> threading.Timer:
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_interrupted_generation_is_cancelled(engine: Engine) -> None:
    """KeyboardInterrupt comes out of generate(), and the engine goes on as if nothing had been."""
    requests = mixed_requests(24, seed=61)
    begun = time.perf_counter()
    expected = [o.tokens for o in engine.generate(requests)]
    took = time.perf_counter() - begun
    interrupted = 0
    for part in range(1, 13):
        timer = interrupt_after(took * part / 16)
        try:
            engine.generate(requests)
            timer.join()
            time.sleep(0.05)  # generation was faster than the timer: take the signal here
        except KeyboardInterrupt:
            interrupted += 1
        assert not engine.busy
        again = engine.generate(requests[:3])
        assert [o.tokens for o in again] == expected[:3]
    assert interrupted > 0


def test_interrupted_steps_lose_nothing(engine: Engine) -> None:
    """A caller of step() that catches KeyboardInterrupt gets every token all the same."""
    requests = mixed_requests(6, seed=62)
    expected = [o.tokens for o in engine.generate(requests)]
    ids = [engine.submit(r) for r in requests]
    outputs = {}
    stop = threading.Event()

    def press() -> None:
        while not stop.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)

    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: held.append(1))  # between steps: not ours
    presser = threading.Thread(target=press)
    presser.start()
    try:
        while engine.busy:
            for event in engine.step():
                if event.output is not None:
                    outputs[event.id] = event.output
    finally:
        stop.set()
        presser.join()
        signal.signal(signal.SIGINT, before)
    assert held, "no signal arrived"
    assert [outputs[i].tokens for i in ids] == expected


def test_shield_passes_the_signal_on() -> None:
    """A held-back SIGINT reaches the handler that stood before, at check() or at the end."""
    for at_check in (True, False):
        reached = False
        with pytest.raises(KeyboardInterrupt), Shield() as shield:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached = True
            if at_check:
                shield.check()
                pytest.fail("check() let the signal pass")
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
