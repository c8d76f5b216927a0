"""Ctrl-C during a round: taken at a safe point, never in the middle of the books."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


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
