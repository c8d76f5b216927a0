"""Compilation of kernel source: NVRTC on CUDA, the C++ compiler on the soft device.

On CUDA, CuPy calls NVRTC. If CuPy is missing or its compiler does not work, graft calls NVRTC.

Most code of graft only calls the driver API and is the same for both kinds of devices. Compilation
is the main difference.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.errors import DeviceError, KernelError
from graft.cudagraph.kernels.nvrtc import compile_nvrtc, missing_compiler
from graft.cudagraph.kernels.progress import compile_progress
from graft.cudagraph.kernels.ptx import architecture, provide_ptx_library, soft_device_runs_ptx
from graft.native import _native
from graft.native.softcuda.compile import KernelCompileError, compile_cpu, included_files

KERNELS = Path(__file__).resolve().parent
#: Folder that contains graft's packages. Kernels include headers of other packages by their path
#: relative to this folder, such as ``#include "sampling/kernels/slot.cuh"``.
INCLUDE_ROOT = KERNELS.parents[1]
#: Kernel with which `cupy_problem` tests CuPy.
TEST_KERNEL = 'extern "C" __global__ void graft_test(int* out) { *out = 1; }'
#: Images of graft's kernels for the soft device, which wheels contain.
PREBUILT = Path(_native.__file__).resolve().parent / "soft" / "kernels"
COMPILER_ADVICE = (
    "install a compiler: pip install 'cupy-cuda13x[ctk]', or 'cupy-cuda12x[ctk]' if the driver "
    "supports only CUDA 12"
)


def cache_folder() -> Path:
    """Return the folder for compiled kernels: $GRAFT_CACHE, or ~/.cache/graft if that is not set.

    Files in this folder are loaded and executed. If the folder belongs to another user or others
    may write to it, a private temporary folder is therefore used instead, with a warning. The same
    happens if the folder cannot be written.
    """
    configured = os.environ.get("GRAFT_CACHE") or os.path.expanduser("~/.cache/graft")
    return _usable_folder(Path(configured))


@functools.cache
def _usable_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid != os.geteuid():
            raise PermissionError(f"it belongs to user {state.st_uid}")
        if state.st_mode & 0o022:
            mode = state.st_mode & 0o777
            raise PermissionError(f"others may write to it (mode {mode:o}; chmod go-w)")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        text = f"compiled kernels are not cached, because {folder} cannot be used: {error}"
        warnings.warn_explicit(text, UserWarning, "graft", 1)
        private = tempfile.mkdtemp(prefix="graft-kernels-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)


def nvrtc_options(
    path: Path | None = None, defines: Mapping[str, object] | None = None
) -> list[str]:
    """Return the NVRTC options for a kernel source at `path` with the macros `defines`.

    The options forbid NVRTC to contract a product and a sum to one fused multiply-add. NVRTC would
    contract them in some copies of an unrolled loop and not in others, so a result would depend on
    the copy that computed it. Kernels call ``fmaf`` explicitly. The folder of `path` is added to
    the include path.
    """
    folders = include_folders(None if path is None else Path(path).parent)
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    return ["--std=c++17", "--fmad=false", *macros, *(f"-I{folder}" for folder in folders)]


@functools.lru_cache(maxsize=256)
def include_folders(folder: Path | None) -> list[Path]:
    """Return the include path: graft's root, `cudagraph/kernels` and the folder of the source."""
    folders = [INCLUDE_ROOT, KERNELS]
    if folder is not None and folder.resolve() not in folders:
        folders.append(folder.resolve())
    return folders


@dataclass(frozen=True)
class KernelSource:
    """Source of a kernel module: CUDA C++, a name for error messages, and values of macros.

    `folder` is the absolute path of an additional folder in which ``#include "..."`` searches for
    headers, or None.
    """

    text: str
    name: str
    defines: Mapping[str, str]
    folder: Path | None


class LoadedModule(NamedTuple):
    """A CUmodule, and the object that keeps it loaded."""

    handle: Any
    owner: object


def compile_source(context: Context, source: KernelSource) -> LoadedModule:
    """Compile kernel source and load the module.

    KernelError is raised if the source does not compile, or no compiler works.
    """
    runs_ptx = context.kind == "soft" and soft_device_runs_ptx()
    if runs_ptx:
        provide_ptx_library(cache_folder() / "soft")
    with compile_progress(source.name):
        if context.kind == "soft":
            return _compile_to_ptx(source) if runs_ptx else _compile_soft(source)
        return _compile_cuda(context, source)


def _compile_soft(source: KernelSource) -> LoadedModule:
    try:
        image = compile_cpu(
            source.text,
            source.name,
            defines=source.defines,
            include_dirs=include_folders(source.folder),
            cache_dir=cache_folder() / "soft",
            prebuilt_dir=PREBUILT,
        )
    except KernelCompileError as error:
        raise KernelError(str(error)) from error
    return load_binary(image)


def _compile_to_ptx(source: KernelSource) -> LoadedModule:
    return load_binary(_compile_with_nvrtc(source, f"compute_{architecture()}"))


def _compile_with_nvrtc(source: KernelSource, target: str) -> bytes:
    path = None if source.folder is None else source.folder / source.name
    return compile_nvrtc(
        source.text,
        source.name,
        nvrtc_options(path, source.defines),
        target,
        cache=cache_folder() / "ptx",
        key=_digest_of_includes(source),
    )


def load_binary(image: bytes) -> LoadedModule:
    """Load an image: PTX text with a null byte at its end, or machine code."""
    # The driver copies the image during the call, so the image need not be kept alive.
    module = call(cu.cuModuleLoadData, image)
    return LoadedModule(module, _native.Resource(_native.ResourceKind.MODULE, int(module)))


def _compile_cuda(context: Context, source: KernelSource) -> LoadedModule:
    problem = cupy_problem(context.ordinal)
    if not problem:
        return _compile_with_cupy(context, source)
    if missing_compiler():
        raise KernelError(f"{source.name}: {problem}; {missing_compiler()}; {COMPILER_ADVICE}")
    major = context.attribute("COMPUTE_CAPABILITY_MAJOR")
    minor = context.attribute("COMPUTE_CAPABILITY_MINOR")
    image = _compile_with_nvrtc(source, f"sm_{major}{minor}")
    try:
        return load_binary(image)
    except DeviceError as error:
        raise KernelError(
            f"{source.name}: the driver does not load the machine code of NVRTC ({error}), and "
            f"CuPy cannot be used: {problem}; {COMPILER_ADVICE}"
        ) from error


@functools.cache
def cupy_problem(ordinal: int) -> str:
    """Return why CuPy cannot compile and load kernels for GPU number `ordinal`; "" if it can.

    If CuPy is installed but does not work, a warning says so.
    """
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_folder() / "cupy"))
    try:
        import cupy
    except ModuleNotFoundError:
        return "CuPy is not installed"
    except Exception as error:
        # CuPy also raises other errors than ImportError, for example if a library is missing.
        problem = f"CuPy cannot be imported ({_summary(error)})"
    else:
        try:
            with cupy.cuda.Device(ordinal):
                _ = cupy.RawModule(code=TEST_KERNEL, backend="nvrtc").module
            return ""
        except Exception as error:
            # CuPy raises exceptions of various types: NVRTC or headers may be missing, or the
            # driver may refuse the machine code.
            problem = f"CuPy cannot compile a kernel ({_summary(error)})"
    warnings.warn(f"{problem}; graft calls NVRTC without CuPy", stacklevel=2)
    return problem


def _summary(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _compile_with_cupy(context: Context, source: KernelSource) -> LoadedModule:
    import cupy

    # CuPy's cache key covers the source but not the files that it includes. A digest of these files
    # in the source makes CuPy compile the kernel again when a header has changed.
    digest = _digest_of_includes(source)
    text = f'// includes: {digest}\n#line 1 "{source.name}"\n{source.text}'
    path = None if source.folder is None else source.folder / source.name
    options = tuple(nvrtc_options(path, source.defines))
    try:
        with cupy.cuda.Device(context.ordinal):
            # Keep the Module and not the RawModule: a RawModule refers to its Module only through a
            # cache that may be cleared.
            module = cupy.RawModule(code=text, options=options, backend="nvrtc").module
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernel source {source.name!r} does not compile:\n{error}") from error
    except RuntimeError as error:
        raise KernelError(f"{source.name}: CuPy cannot compile it: {_summary(error)}") from error
    return LoadedModule(cu.CUmodule(module.ptr), module)


def _digest_of_includes(source: KernelSource) -> str:
    digest = hashlib.sha256()
    headers = included_files(source.text, include_folders(source.folder))
    for path, content in headers.items():
        digest.update(f"{os.path.basename(path)}\0{content}\0".encode())
    return digest.hexdigest()
