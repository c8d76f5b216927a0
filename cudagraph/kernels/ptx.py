"""Compilation of kernels to PTX, which the soft device interprets with ``GRAFT_CODE=ptx``.

By default, the soft device runs kernels that the system's C++ compiler has compiled for the CPU.
With ``GRAFT_CODE=ptx`` it runs the PTX that NVRTC generates for a GPU: inline PTX, tensor-core
instructions, shuffles and asynchronous copies are executed as a GPU would. This is much slower.
NVRTC comes with the package ``nvidia-cuda-nvrtc``; it needs neither a GPU nor a CUDA installation.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import DeviceError, KernelError
from graft.cudagraph.kernels.progress import compile_progress
from graft.native.softcuda.compile import KernelCompileError
from graft.native.softcuda.ptx_library import build_ptx_library

#: Values of ``GRAFT_CODE``: the code that the soft device runs.
CODES = ("host", "ptx")
#: Compute capability times 10 for which kernels are compiled unless ``GRAFT_PTX_ARCH`` is set.
DEFAULT_ARCHITECTURE = 90
#: NVRTC options that CuPy adds when it compiles for a GPU. ``-ftz=true`` flushes denormals to zero,
#: as the soft device does.
OPTIONS = ("--device-as-default-execution-space", "-ftz=true", "-lineinfo")


def soft_device_runs_ptx() -> bool:
    """Return whether the soft device runs PTX; raise DeviceError for unknown ``GRAFT_CODE``."""
    code = os.environ.get("GRAFT_CODE") or "host"
    if code not in CODES:
        raise DeviceError(f"GRAFT_CODE={code!r}: expected one of {CODES}")
    return code == "ptx"


def architecture() -> int:
    """Return the compute capability times 10 for which kernels are compiled to PTX."""
    text = os.environ.get("GRAFT_PTX_ARCH") or str(DEFAULT_ARCHITECTURE)
    if not text.isdecimal() or not 75 <= int(text) < 200:
        raise DeviceError(f"GRAFT_PTX_ARCH={text!r}: expected a number such as 80, 90 or 100")
    return int(text)


@functools.cache
def _nvrtc() -> tuple[Any, str]:
    """Return the module cuda.bindings.nvrtc and the version of NVRTC."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        # If the library is missing, cuda.bindings raises exceptions of various types.
        raise KernelError(
            "GRAFT_CODE=ptx needs NVRTC, which cannot be loaded "
            f"(pip install nvidia-cuda-nvrtc): {error}"
        ) from error
    return nvrtc, f"{int(status)} {major}.{minor}"


def missing_compiler() -> str:
    """Return why kernels cannot be compiled to PTX; "" if they can."""
    try:
        _nvrtc()
    except KernelError as error:
        return str(error)
    return ""


def nvrtc_library() -> Path:
    """Return the path of the NVRTC library that compiles kernels to PTX, or raise KernelError."""
    _nvrtc()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, name = line.partition("/")
        path = Path(slash + name)
        # In programs that `graft soft` runs, another library of this name, in the folder "soft",
        # forwards calls to NVRTC.
        if path.name.startswith("libnvrtc.so.") and path.parent.name != "soft":
            return path
    raise KernelError("NVRTC is loaded, but its file is unknown")


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


def compile_ptx(text: str, name: str, options: Sequence[str], cache: Path, key: str = "") -> bytes:
    """Compile CUDA C++ to PTX and return the PTX, which ends with a null byte.

    NVRTC receives `options` in addition to the architecture and `OPTIONS`. The PTX is cached in the
    folder `cache`. The caller must pass another `key` whenever included files change. KernelError
    is raised if the source does not compile, or NVRTC is missing.
    """
    nvrtc, version = _nvrtc()
    arguments = [*options, *OPTIONS, f"-arch=compute_{architecture()}"]
    digest = hashlib.sha256("\0".join([version, key, name, text, *arguments]).encode()).hexdigest()
    path = cache / f"{digest}.ptx"
    try:
        return path.read_bytes()
    except OSError:
        pass  # The PTX is not cached yet.
    ptx = _compile(nvrtc, text, name, arguments)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            file.write(ptx)
        os.replace(file.name, path)
    except OSError:
        pass  # Without the cache, the next process compiles the source again.
    return ptx


def _check(result: Sequence[Any]) -> Any:
    if int(result[0]):
        raise KernelError(f"NVRTC call failed: {result[0]}")
    return result[1] if len(result) > 1 else None


def _compile(nvrtc: Any, text: str, name: str, arguments: Sequence[str]) -> bytes:
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        encoded = [argument.encode() for argument in arguments]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status):
            log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            message = log.rstrip(b"\0").decode(errors="replace")
            raise KernelError(f"kernel source {name!r} does not compile to PTX:\n{message}")
        ptx = bytearray(_check(nvrtc.nvrtcGetPTXSize(program)))
        _check(nvrtc.nvrtcGetPTX(program, ptx))
        return bytes(ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
