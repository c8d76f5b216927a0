"""Deferred SIGINT handling, and a decorator for methods of which only one may run at a time."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from graft.models.errors import EngineUseError

__all__ = ["CallGuard", "Shield", "exclusive"]


class Shield:
    """Context manager that defers SIGINT while engine state changes.

    While the ``with`` block runs, a SIGINT is only recorded. `check` and the end of the block pass
    the recorded signal to the previous handler, which raises KeyboardInterrupt by default. Python
    runs signal handlers in the main thread only, so a shield does nothing in other threads.
    """

    def __init__(self) -> None:
        self._pending = False
        self._previous_handler: Any = None
        self._installed = False

    def __enter__(self) -> Shield:
        in_main_thread = threading.current_thread() is threading.main_thread()
        # getsignal returns None for a handler that C code has installed. Such a handler is not
        # replaced, because Python could not restore it afterwards.
        if in_main_thread and signal.getsignal(signal.SIGINT) is not None:
            self._previous_handler = signal.signal(signal.SIGINT, self._defer)
            self._installed = True
        return self

    def _defer(self, _signal: int, _frame: FrameType | None) -> None:
        self._pending = True

    def check(self) -> None:
        """Pass the deferred signal, if there is one, to the previous handler."""
        if self._pending:
            self._pending = False
            signal.signal(signal.SIGINT, self._previous_handler)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, self._defer)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, self._previous_handler)
            if self._pending:
                signal.raise_signal(signal.SIGINT)


class _Call(NamedTuple):
    """A running call of an `exclusive` method.

    If `is_brief` is true, calls from other threads wait for its end; otherwise they raise an error.
    """

    thread_id: int
    thread_name: str
    is_brief: bool


class CallGuard:
    """State of an object with `exclusive` methods: the running call, and the lock that it holds.

    The lock is reentrant, so that a signal handler or finalizer that calls the object in the middle
    of another call of the same thread gets an error instead of a deadlock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running: _Call | None = None


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def exclusive(method: MethodT, *, brief: bool = False) -> MethodT:
    """Decorate a method so that it raises EngineUseError while another such method runs.

    The object has a `CallGuard` in the attribute ``_guard``. While another thread is in a `brief`
    method, a call of a method that is not brief waits until that method returns, and then runs. If
    two threads call at the same time, one call may wait for the other in the same way.

    KeyboardInterrupt, which Python may raise at any function call, does not leave the guard locked.
    The ``with`` statement always releases a lock that is written in C, such as RLock, and the
    ``finally`` block calls no function before it resets `CallGuard.running`.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        guard: CallGuard = self._guard
        thread = threading.current_thread()
        this = _Call(threading.get_ident(), thread.name, brief)
        running = guard.running
        if running is not None:
            is_nested = running.thread_id == this.thread_id
            if is_nested or brief or not running.is_brief:
                raise _use_error(this, running)
        with guard.lock:
            if guard.running is not None:  # a nested call: this thread already holds the RLock
                raise _use_error(this, guard.running)
            try:
                guard.running = this
                return method(self, *arguments, **options)
            finally:
                guard.running = None

    return call  # type: ignore[return-value]


def _use_error(call: _Call, running: _Call) -> EngineUseError:
    return EngineUseError(
        f"thread {call.thread_name!r} called the engine during a call of thread "
        f"{running.thread_name!r}; an engine handles one call at a time"
    )
