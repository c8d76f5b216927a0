"""Deferred SIGINT handling and a re-entrancy guard."""

from __future__ import annotations

import signal
import sys
import threading
import time
from copy import copy
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from graft.models.errors import EngineUseError

__all__ = ["ReentrancyGuard", "Shield"]

#: Time between two attempts of a call that waits for the end of a short call, in seconds.
_BRIEF_POLL_S = 1e-4


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
    """A call of an engine method.

    Attributes
    ----------
    thread_id
        Identifier of the calling thread.
    frame_id
        ``id()`` of the frame that entered the guard.
    thread_name
        Name of the thread, for error messages.
    is_brief
        Whether calls of other threads wait for the end of this call.
    """

    thread_id: int
    frame_id: int
    thread_name: str
    is_brief: bool

    def is_active(self) -> bool:
        """Return whether the calling frame is still on the stack of its thread."""
        frame = sys._current_frames().get(self.thread_id)
        while frame is not None and id(frame) != self.frame_id:
            frame = frame.f_back
        return frame is not None


class ReentrancyGuard:
    """Context manager that rejects a second call of the engine while another one runs.

    The guard raises an error instead of waiting. A signal handler or finalizer may call the engine
    in the middle of another call of the same thread, and waiting for that call would be a deadlock.

    The guard is not a `threading.Lock`. KeyboardInterrupt may be raised between the acquisition of
    a lock and the first statement of the block, or just before the release. The lock would then
    remain acquired forever. A call owns this guard only while the frame of the call is on the
    stack, so an interrupted call loses the guard.

    Attributes
    ----------
    brief : ReentrancyGuard
        The same guard for short calls of thread-safe methods. It rejects them while another call
        runs, but a call of another thread waits for the end of a short call.
    """

    def __init__(self) -> None:
        # Maps None to the call that owns the guard; empty if no call owns it. A dictionary is used
        # because `dict.setdefault` is an atomic test-and-set.
        self._owner: dict[None, _Call] = {}
        self._is_brief = False
        self.brief = copy(self)  # has the same `_owner`
        self.brief._is_brief = True

    def __enter__(self) -> None:
        thread = threading.current_thread()
        call = _Call(threading.get_ident(), id(sys._getframe(1)), thread.name, self._is_brief)
        while True:
            owner = self._owner.setdefault(None, call)
            if owner is call:
                break
            if not owner.is_active():
                if self._owner.get(None) is not owner:
                    continue  # the owner has left the guard, and another call may have entered
                break
            if owner.is_brief and not call.is_brief and owner.thread_id != call.thread_id:
                time.sleep(_BRIEF_POLL_S)
                continue
            raise EngineUseError(
                f"thread {call.thread_name!r} called the engine during a call of thread "
                f"{owner.thread_name!r}; an engine handles one call at a time"
            )
        self._owner[None] = call

    def __exit__(self, *_: object) -> None:
        self._owner.pop(None, None)
