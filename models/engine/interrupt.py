"""What comes at a bad time: Ctrl-C during a round, and a call during another."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from graft.models.errors import EngineUseError


class Shield:
    """Holds SIGINT back while engine state changes, and passes it on where that is safe.

    `check()` and the end of the block hand a held-back signal to the handler that stood before,
    which by default raises KeyboardInterrupt there. Only the main thread gets signals; elsewhere a
    shield does nothing.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> Shield:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if before is not None:  # None: installed by C code, which is left alone
                self._before = signal.signal(signal.SIGINT, self._hold)
                self._installed = True
        return self

    def _hold(self, _signal: int, _frame: FrameType | None) -> None:
        self._pressed = True

    def check(self) -> None:
        """Pass a held-back signal on, here."""
        if self._pressed:
            self._pressed = False
            signal.signal(signal.SIGINT, self._before)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, self._before)
            if self._pressed:
                signal.raise_signal(signal.SIGINT)


class ReentrancyGuard:
    """Lets one call at a time into an engine; a second is refused, whoever makes it.

    Nothing is waited for: a call from within another one, by a signal's handler or a finalizer,
    would wait for itself.
    """

    def __init__(self) -> None:
        self._user: dict[None, tuple[int, int, str]] = {}  # thread, frame, the thread's name

    def __enter__(self) -> None:
        thread = threading.current_thread()
        me = (threading.get_ident(), id(sys._getframe(1)), thread.name)
        user = self._user.setdefault(None, me)  # atomic
        if user is not me and _runs(*user[:2]):
            raise EngineUseError(
                f"thread {thread.name!r} uses the engine while thread {user[2]!r} does: "
                "one call at a time"
            )
        self._user[None] = me

    def __exit__(self, *_: object) -> None:
        self._user.pop(None, None)


def _runs(thread: int, frame: int) -> bool:
    """Whether a thread is in a call still: Ctrl-C may have ended it before it could leave."""
    current = sys._current_frames().get(thread)
    while current is not None and id(current) != frame:
        current = current.f_back
    return current is not None
