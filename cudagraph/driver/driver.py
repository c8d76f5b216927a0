"""Checked calls of the CUDA driver API.

All driver calls of graft's Python code go through :func:`call`. It makes the device's primary
context current on the calling thread and raises :class:`DeviceError` if the driver returns an
error code. It also raises an error on a thread that is inside a host function, because CUDA allows
no driver calls there. ``cuda.bindings`` releases the GIL during every call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from numbers import Real
from typing import Any

from cuda.bindings import driver as cu

from graft.cudagraph.errors import DeviceError, OptionError
from graft.native import _native

#: Result of cuStreamQuery and cuEventQuery while work is pending.
NOT_READY = 600

#: Maximum value of the arguments `timeout_s`, in seconds.
MAX_TIMEOUT_S = 1e9

_context: Any = None
_forked = False
_reopen: Callable[[], None] | None = None
_error_detail: Callable[[bool], str] | None = None


def _after_fork() -> None:
    """Mark this process as a forked child, in which `call` refuses driver calls.

    A child of a process that has not opened a device may open one itself. Any other child does not
    have the reaper, the thread that frees driver resources, so ``flush()`` would wait for it in
    vain. Closing the gate, through which native threads enter Python, makes ``flush()`` return at
    once.
    """
    global _forked
    if _context is None and _reopen is None:
        return
    _forked = True
    _native.close_gate(0.0)


os.register_at_fork(after_in_child=_after_fork)


def is_forked() -> bool:
    """Return whether this process was forked from a process that had opened a device."""
    return _forked


def set_context(context: Any, reopen: Callable[[], None] | None = None) -> None:
    """Set the primary CUcontext, which every thread makes current before a driver call.

    The context is None after its release. The first driver call after a release calls `reopen`,
    which retains the context again.
    """
    global _context, _reopen
    _context = context
    _reopen = reopen


def is_context_retained() -> bool:
    """Return whether the primary context is retained."""
    return _context is not None


def set_error_detail_source(source: Callable[[bool], str]) -> None:
    """Register the function that returns the driver's explanation of an error.

    The explanation becomes part of the error message. The function is called with True after a
    fault, which makes the context unusable, and with False after any other failed call.
    """
    global _error_detail
    _error_detail = source


def prepare_driver_call(api: str) -> None:
    """Make the primary context current on the calling thread.

    Call this before driver calls that do not go through :func:`call`; `api` names the driver
    function in error messages. DeviceError is raised in a host function, in a forked process, and
    if no device is open.
    """
    if _native.in_host_work():
        raise DeviceError(f"{api}: a host function must not call the driver", api=api)
    if _forked:
        raise DeviceError(
            f"{api}: this process was forked from a process with an open device, and the driver "
            "cannot be used after a fork; start processes with the multiprocessing method 'spawn'",
            api=api,
        )
    if _context is None and _reopen is not None:
        _reopen()
    if _context is None:
        raise DeviceError(f"{api}: no device is open; call open_device() first", api=api)
    check_code("cuCtxSetCurrent", _native.make_context_current())


def call(function: Callable[..., tuple], *args: Any) -> Any:
    """Call a function of ``cuda.bindings.driver`` and return its values without the result code.

    DeviceError is raised if the driver returns an error, and in the cases that
    :func:`prepare_driver_call` lists.
    """
    name = function.__name__
    prepare_driver_call(name)
    return check(name, function(*args))


def check(api: str, results: tuple) -> Any:
    """Check the result code of a call of the driver function `api`, and return its values.

    The result is None if the call returns no value, the value if it returns one, otherwise a tuple.
    """
    check_code(api, int(results[0]))
    values = results[1:]
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def check_timeout(timeout_s: object) -> None:
    """Raise OptionError unless `timeout_s` is None or a number of seconds up to MAX_TIMEOUT_S."""
    if timeout_s is None:
        return
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 <= timeout_s <= MAX_TIMEOUT_S:  # type: ignore[operator]
        raise OptionError(
            f"timeout_s must be None or a number of seconds from 0 to {MAX_TIMEOUT_S:g}, "
            f"not {timeout_s!r:.40}"
        )


def check_code(api: str, code: int) -> None:
    """Raise DeviceError unless `code`, the result of the driver function `api`, is CUDA_SUCCESS."""
    if code == 0:
        return
    name = f"code {code}"
    detail = ""
    if code in _CODES:
        name = _text(cu.cuGetErrorName(cu.CUresult(code)))
        detail = _text(cu.cuGetErrorString(cu.CUresult(code)))
    is_fault = _native.is_context_fault(code)
    if is_fault:
        _native.abandon_eager()
        _native.abandon_mailboxes()
    if _error_detail is not None:
        detail = ": ".join(filter(None, (detail, _error_detail(is_fault))))
    message = f"{api} failed with {name}"
    if detail:
        message += f" ({detail})"
    raise DeviceError(message, api=api, code=code, code_name=name, detail=detail)


def is_ready(api: str, code: int) -> bool:
    """Return whether `code`, the result of the query `api`, means that all work has finished.

    DeviceError is raised if the code is neither "success" nor "not ready".
    """
    if code == NOT_READY:
        return False
    check_code(api, code)
    return True


_CODES = frozenset(int(code) for code in cu.CUresult)


def _text(results: tuple) -> str:
    code, text = results
    if int(code) != 0 or not text:
        return ""
    return text.decode()
