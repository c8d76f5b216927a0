"""The driver's error log, which says in English why a call failed (CUDA 12.9 or later)."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

#: Size of the driver's buffer of messages in bytes.
LOG_BYTES = 25600
#: Maximum number of characters of the log that become part of an error message.
MAX_CHARACTERS = 1000


class DriverLog:
    """Reads the messages that the driver has logged since the last call.

    `library` is the loaded driver. A driver before CUDA 12.9 has no log.
    """

    def __init__(self, library: Any) -> None:
        self._dump = getattr(library, "cuLogsDumpToMemory", None)
        self._position = ctypes.c_uint()  # CUlogIterator, which the driver advances
        self._lock = threading.Lock()
        if self._dump is not None:
            library.cuLogsCurrent(ctypes.byref(self._position), 0)

    def __call__(self, fault: bool) -> str:
        """Return the messages that the driver has logged since the last call; "" if none.

        `fault` has no effect; the caller (`set_error_detail_source`) passes it.
        """
        if self._dump is None:
            return ""
        buffer = ctypes.create_string_buffer(LOG_BYTES)
        size = ctypes.c_size_t(LOG_BYTES)
        with self._lock:
            status = self._dump(ctypes.byref(self._position), buffer, ctypes.byref(size), 0)
        if status:
            return ""
        lines = buffer.raw[: size.value].decode(errors="replace").strip("\0\n ").splitlines()
        return "; ".join(lines)[-MAX_CHARACTERS:]
