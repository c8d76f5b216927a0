"""Compilation of kernels to PTX, which the soft device interprets with ``GRAFT_CODE=ptx``.

By default, the soft device runs kernels that the system's C++ compiler has compiled for the CPU.
With ``GRAFT_CODE=ptx`` it runs the PTX that NVRTC generates for a GPU: inline PTX, tensor-core
instructions, shuffles and asynchronous copies are executed as a GPU would. This is much slower.
"""

from __future__ import annotations

import os
from pathlib import Path

from graft.cudagraph.errors import DeviceError, KernelError
from graft.cudagraph.kernels.progress import compile_progress
from graft.native.softcuda.compile import KernelCompileError
from graft.native.softcuda.ptx_library import build_ptx_library

#: Values of ``GRAFT_CODE``: the code that the soft device runs.
CODES = ("host", "ptx")
#: Architecture for which kernels are compiled unless ``GRAFT_PTX_ARCH`` is set.
DEFAULT_ARCHITECTURE = 90


def soft_device_runs_ptx() -> bool:
    """Return whether ``GRAFT_CODE`` selects PTX; raise DeviceError if its value is unknown."""
    code = os.environ.get("GRAFT_CODE") or "host"
    if code not in CODES:
        raise DeviceError(f"GRAFT_CODE={code!r}: expected one of {CODES}")
    return code == "ptx"


def architecture() -> int:
    """Return the architecture for which kernels are compiled to PTX, such as 90 for sm_90."""
    text = os.environ.get("GRAFT_PTX_ARCH") or str(DEFAULT_ARCHITECTURE)
    if not text.isdecimal() or not 75 <= int(text) < 200:
        raise DeviceError(f"GRAFT_PTX_ARCH={text!r}: expected a number such as 80, 90 or 100")
    return int(text)


def provide_ptx_library(cache: Path) -> None:
    """Compile the library that interprets PTX, and set its path for the soft device.

    The soft devices of this process and of its child processes use the library. It is compiled when
    a machine first needs it, in about a minute of processor time. If ``SOFTCUDA_PTX_LIBRARY`` is
    set, the library at this path is used instead.

    Parameters
    ----------
    cache
        Folder for the compiled library.

    Raises
    ------
    KernelError
        No C++ compiler is found, the library does not compile, or `cache` cannot be used.
    """
    if os.environ.get("SOFTCUDA_PTX_LIBRARY"):
        return
    try:
        with compile_progress("the PTX library of the soft device"):
            library = build_ptx_library(cache)
    except KernelCompileError as error:
        raise KernelError(str(error)) from error
    except OSError as error:
        raise KernelError(f"the PTX library cannot be kept in {cache}: {error}") from error
    os.environ["SOFTCUDA_PTX_LIBRARY"] = str(library)
