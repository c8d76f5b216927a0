"""Checked driver calls.

Every driver call of graft's Python goes through :func:`call`. It makes sure that the thread has
the primary context, refuses calls from inside host functions, and turns result codes into
:class:`DeviceError`. ``cuda.bindings`` releases the GIL in every call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from graft.cudagraph.errors import DeviceError
from graft.native import _native

#: What cuStreamQuery and cuEventQuery answer while work is enqueued.
NOT_READY = 600
#: Codes after which the context is lost and host functions are not called any more.
FAULTS = frozenset({700, 702, 704, 710, 714, 715, 716, 717, 718, 719, 720, 721})

_context: Any = None
_forked = False
_reopen: Callable[[], None] | None = None
_fault_text: Callable[[bool], str] | None = None
_local = threading.local()


def _after_fork() -> None:
    """In the child of a fork: refuse driver calls; its reaper does not exist, so nothing waits."""
    global _forked
    _forked = True
    _native.close_gate(0.0)


os.register_at_fork(after_in_child=_after_fork)


def set_context(context: Any, reopen: Callable[[], None] | None = None) -> None:
    """Name the primary context that every thread of graft uses.

    None says that it was released; ``reopen`` then retains it again for the next call.
    """
    global _context, _reopen
    _context = context
    _reopen = reopen


def is_current() -> bool:
    """Whether the primary context is retained now."""
    return _context is not None


def set_fault_text(source: Callable[[bool], str]) -> None:
    """Name the function that tells why the soft device faulted (True) or refused last (False)."""
    global _fault_text
    _fault_text = source


def enter(api: str) -> None:
    """Prepare this thread for a driver call, or raise because it must not make one."""
    if _native.in_host_work():
        raise DeviceError(f"{api}: a host function must not call the driver", api=api)
    if _forked:
        raise DeviceError(
            f"{api}: this process was forked from one with an open device, and drivers do not "
            "survive that; start it with the multiprocessing method 'spawn'",
            api=api,
        )
    if _context is None and _reopen is not None:
        _reopen()
    if _context is None:
        raise DeviceError(f"{api}: no device is open; call open_device() first", api=api)
    if getattr(_local, "context", None) is not _context:
        check("cuCtxSetCurrent", cu.cuCtxSetCurrent(_context))
        _local.context = _context


def call(function: Callable[..., tuple], *args: Any) -> Any:
    """Call ``cuda.bindings.driver.<function>`` and return its values without the result code.

    Raises
    ------
    DeviceError
        When the driver reports an error, no device is open, or the thread is in a host function.
    """
    name = function.__name__
    enter(name)
    return check(name, function(*args))


def check(api: str, results: tuple) -> Any:
    """Return the values behind a result code: None, the one value, or a tuple of several."""
    check_code(api, int(results[0]))
    if len(results) <= 2:
        return results[1] if len(results) == 2 else None
    return results[1:]


def check_code(api: str, code: int) -> None:
    """Raise DeviceError unless ``code`` is CUDA_SUCCESS."""
    if code == 0:
        return
    name = _text(cu.cuGetErrorName(cu.CUresult(code))) if code in _CODES else f"code {code}"
    detail = _text(cu.cuGetErrorString(cu.CUresult(code))) if code in _CODES else ""
    if code in FAULTS:
        _native.abandon_eager()
        _native.abandon_mailboxes()
    if _fault_text is not None and (said := _fault_text(code in FAULTS)):
        detail = f"{detail}: {said}" if detail else said
    message = f"{api} failed with {name}" + (f" ({detail})" if detail else "")
    raise DeviceError(message, api=api, code=code, code_name=name, detail=detail)


def is_ready(api: str, code: int) -> bool:
    """Whether a query's answer is that everything has finished; raises for errors."""
    if code != NOT_READY:
        check_code(api, code)
    return code != NOT_READY


_CODES = frozenset(int(code) for code in cu.CUresult)


def _text(results: tuple) -> str:
    return results[1].decode() if int(results[0]) == 0 and results[1] else ""
