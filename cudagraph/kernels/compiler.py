"""Compilation of kernel source: NVRTC through CuPy on CUDA, the C++ compiler on the soft device.

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
from graft.cudagraph.errors import KernelError
from graft.cudagraph.kernels.progress import compile_progress
from graft.cudagraph.kernels.ptx import compile_ptx, provide_ptx_library, soft_device_runs_ptx
from graft.native import _native
from graft.native.softcuda.compile import KernelCompileError, compile_cpu, included_files

KERNELS = Path(__file__).resolve().parent
#: Folder that contains graft's packages. Kernels include headers of other packages by their path
#: relative to this folder, such as ``#include "sampling/kernels/slot.cuh"``.
INCLUDE_ROOT = KERNELS.parents[1]


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

    NVRTC must not contract a product and a sum to one fused multiply-add: it would do so in some
    copies of an unrolled loop and not in others, so that a result would depend on which copy
    computed it. Kernels call ``fmaf`` explicitly. The folder of `path` is added to the include
    path.
    """
    folders = include_folders(None if path is None else Path(path).parent)
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    return ["--std=c++17", "--fmad=false", *macros, *(f"-I{folder}" for folder in folders)]


def include_folders(folder: Path | None) -> list[Path]:
    """Return the include path: graft's root, `cudagraph/kernels` and the folder of the source."""
    folders = [INCLUDE_ROOT, KERNELS]
    if folder is not None and folder.resolve() not in folders:
        folders.append(folder.resolve())
    return folders


@dataclass(frozen=True)
class KernelSource:
    """Source of a kernel module: CUDA C++, a name for error messages, and values of macros.

    `folder` is an additional folder in which ``#include "..."`` searches for headers, or None.
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

    KernelError is raised if the source does not compile, or CuPy is missing on CUDA.
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
        )
    except KernelCompileError as error:
        raise KernelError(str(error)) from error
    # The soft device copies the image during the call, so the image need not be kept alive.
    module = call(cu.cuModuleLoadData, image)
    return LoadedModule(module, _native.Resource(_native.ResourceKind.MODULE, int(module)))


def _compile_to_ptx(source: KernelSource) -> LoadedModule:
    path = None if source.folder is None else source.folder / source.name
    ptx = compile_ptx(
        source.text,
        source.name,
        nvrtc_options(path, source.defines),
        cache=cache_folder() / "ptx",
        key=_digest_of_includes(source),
    )
    module = call(cu.cuModuleLoadData, ptx)
    return LoadedModule(module, _native.Resource(_native.ResourceKind.MODULE, int(module)))


def _compile_cuda(context: Context, source: KernelSource) -> LoadedModule:
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_folder() / "cupy"))
    name = source.name
    try:
        import cupy
    except ImportError as error:
        raise KernelError(
            f"{name}: compiling for CUDA needs CuPy: pip install cupy-cuda13x, or cupy-cuda12x"
        ) from error
    # CuPy's cache key covers the source but not the files that it includes. A digest of these files
    # in the source makes CuPy compile the kernel again when a header has changed.
    digest = _digest_of_includes(source)
    text = f'// includes: {digest}\n#line 1 "{name}"\n{source.text}'
    path = None if source.folder is None else source.folder / name
    options = tuple(nvrtc_options(path, source.defines))
    try:
        with cupy.cuda.Device(context.ordinal):
            # Keep the Module and not the RawModule: a RawModule refers to its Module only through a
            # cache that may be cleared.
            module = cupy.RawModule(code=text, options=options, backend="nvrtc").module
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernel source {name!r} does not compile:\n{error}") from error
    return LoadedModule(cu.CUmodule(module.ptr), module)


def _digest_of_includes(source: KernelSource) -> str:
    digest = hashlib.sha256()
    headers = included_files(source.text, include_folders(source.folder))
    for path, content in sorted(headers.items()):
        digest.update(f"{path}\0{content}\0".encode())
    return digest.hexdigest()
