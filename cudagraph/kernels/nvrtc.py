"""Compilation of kernels with NVRTC, without CuPy.

The soft device runs PTX that this module compiles if ``GRAFT_CODE=ptx`` is set. On a GPU, CuPy
compiles the kernels; this module compiles them to machine code if CuPy is missing or cannot compile
them. NVRTC comes with the package ``nvidia-cuda-nvrtc``; it needs neither a GPU nor CUDA headers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import KernelError

#: NVRTC options that CuPy adds when it compiles for a GPU. ``-ftz=true`` flushes denormals to zero,
#: as the soft device does.
OPTIONS = ("--device-as-default-execution-space", "-ftz=true", "-lineinfo")


@functools.cache
def _nvrtc() -> tuple[Any, str]:
    """Return the module cuda.bindings.nvrtc and the version of NVRTC."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        # If the library is missing, cuda.bindings raises exceptions of various types.
        raise KernelError(
            f"NVRTC cannot be loaded (pip install nvidia-cuda-nvrtc): {error}"
        ) from error
    return nvrtc, f"{int(status)} {major}.{minor}"


def missing_compiler() -> str:
    """Return why kernels cannot be compiled with NVRTC; "" if they can."""
    try:
        _nvrtc()
    except KernelError as error:
        return str(error)
    return ""


def nvrtc_library() -> Path:
    """Return the path of the NVRTC library, or raise KernelError."""
    _nvrtc()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, name = line.partition("/")
        path = Path(slash + name)
        # In programs that `graft soft` runs, another library of this name, in the folder "soft",
        # forwards calls to NVRTC.
        if path.name.startswith("libnvrtc.so.") and path.parent.name != "soft":
            return path
    raise KernelError("NVRTC is loaded, but its file is unknown")


def compile_nvrtc(
    text: str, name: str, options: Sequence[str], target: str, cache: Path, key: str = ""
) -> bytes:
    """Compile CUDA C++ to PTX or to machine code.

    `target` is a virtual architecture such as "compute_90" for PTX, which ends with a null byte, or
    a GPU architecture such as "sm_90" for machine code. NVRTC receives `options` in addition to the
    architecture and `OPTIONS`. Images are cached in the folder `cache`. The caller must pass
    another `key` whenever included files change. KernelError is raised if the source does not
    compile, or NVRTC is missing.
    """
    nvrtc, version = _nvrtc()
    arguments = [*options, *OPTIONS, f"-arch={target}"]
    digest = hashlib.sha256("\0".join([version, key, name, text, *arguments]).encode()).hexdigest()
    path = cache / f"{digest}.{'ptx' if target.startswith('compute') else 'cubin'}"
    try:
        return path.read_bytes()
    except OSError:
        pass  # The image is not cached yet.
    image = _compile(nvrtc, text, name, arguments)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            file.write(image)
        os.replace(file.name, path)
    except OSError:
        pass  # The cache only saves time.
    return image


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
            raise KernelError(f"kernel source {name!r} does not compile:\n{message}")
        if arguments[-1].startswith("-arch=compute"):
            image = bytearray(_check(nvrtc.nvrtcGetPTXSize(program)))
            _check(nvrtc.nvrtcGetPTX(program, image))
        else:
            image = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
            _check(nvrtc.nvrtcGetCUBIN(program, image))
        return bytes(image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
