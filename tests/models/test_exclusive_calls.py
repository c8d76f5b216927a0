"""Methods of which only one runs at a time, with interrupts at any point of a call."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from graft.models.engine.interrupt import CallGuard, exclusive
from graft.models.errors import EngineUseError


class Counter:
    """Counts the calls of its exclusive method."""

    def __init__(self) -> None:
        self._guard = CallGuard()
        self.count = 0

    @exclusive
    def call(self) -> None:
        self.count += 1

    @exclusive
    def nested(self) -> None:
        self.call()


@pytest.fixture
def interrupts():
    """Let the timer of this process raise KeyboardInterrupt in the main thread."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_interrupted_call_does_not_exclude_later_calls(interrupts):
    rng = random.Random(1)
    counter = Counter()
    with ThreadPoolExecutor(1) as other:
        for _ in range(1000):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 100e-6))
                while True:
                    counter.call()
            count = counter.count
            other.submit(counter.call).result(timeout=60)
            assert counter.count == count + 1


def test_call_within_a_call_of_the_same_thread_raises_error():
    """A signal handler or finalizer may make such a call; waiting for the outer call would hang."""
    counter = Counter()
    for _ in range(2):
        with pytest.raises(EngineUseError, match="during a call of thread 'MainThread'"):
            counter.nested()
    assert counter.count == 0
    counter.call()
    assert counter.count == 1
