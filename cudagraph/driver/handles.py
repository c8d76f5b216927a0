"""Conversion of the streams of graft and of other libraries to CUstream handles."""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy as np

from graft.cudagraph.driver.driver import cu
from graft.cudagraph.errors import OptionError

MAX_HANDLE = 1 << 64
#: Attributes of stream objects without ``__cuda_stream__`` that contain the handle: of older
#: versions of torch, CuPy and numba.
_ATTRIBUTES = ("cuda_stream", "ptr", "handle")


class CudaStream(Protocol):
    """An object with the protocol ``__cuda_stream__`` of cuda.core.

    Streams of graft, cuda.core, CuPy, numba-cuda and torch have it.
    """

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, which is 0, and the CUstream."""


#: A stream that :func:`stream_handle` accepts: an object with the protocol above, a CUstream, a
#: handle, or an object with one of `_ATTRIBUTES` whose class name contains "Stream".
StreamLike = Any


def stream_handle(stream: StreamLike, user: str) -> int:
    """Return the CUstream of a stream as an integer.

    Parameters
    ----------
    stream
        Stream of graft, or of another library that implements ``__cuda_stream__``; ``CUstream`` of
        cuda.bindings; integer handle; or an object whose class name contains "Stream" and that
        has the handle in the attribute ``cuda_stream`` (torch), ``ptr`` (CuPy) or ``handle``
        (numba).
    user
        Name of the function that takes the stream, for the error message.

    Raises
    ------
    OptionError
        ``stream`` is not a stream, or a stream of graft is closed.
    """
    handle: Any = None
    protocol = getattr(type(stream), "__cuda_stream__", None)
    if protocol is not None:
        # The method was a property before cuda.core 0.2.
        pair = stream.__cuda_stream__
        handle = _second(pair() if callable(pair) else pair)
    elif isinstance(stream, int | np.integer) and not isinstance(stream, bool):
        handle = stream
    elif isinstance(stream, cu.CUstream):
        handle = int(stream)
    elif any("Stream" in kind.__name__ for kind in type(stream).__mro__):
        handles = (getattr(stream, name, None) for name in _ATTRIBUTES)
        handle = next((_plain(found) for found in handles if found is not None), None)
    try:
        value = operator.index(handle)
    except TypeError:
        value = -1
    if not 0 <= value < MAX_HANDLE:
        raise OptionError(
            f"{user} needs a stream of graft, an object with __cuda_stream__ (a stream of "
            "cuda.core, CuPy, torch or numba-cuda), a CUstream of cuda.bindings or its handle "
            f"as an int, not {stream!r}"
        )
    return value


def _second(pair: Any) -> Any:
    """Return the handle of the pair that ``__cuda_stream__`` gives, or None."""
    return pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None


def _plain(handle: Any) -> Any:
    """Return a handle without its wrapper: a ctypes pointer of older versions of numba."""
    value = getattr(handle, "value", handle)
    return 0 if value is None else value
