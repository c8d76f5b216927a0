"""Compilation of kernel source: NVRTC through CuPy on CUDA, the C++ compiler on the soft device.

Above the driver API, this module is the only code that distinguishes the two devices.
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
from pathlib import Path
from typing import Any

from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import KernelError
from graft.native import _native
from graft.native.softcuda.compile import KernelCompileError, compile_cpu, included_files

KERNELS = Path(__file__).resolve().parent / "kernels"
#: Folder that contains graft's packages. Kernels include headers of other packages relative to it:
#: ``#include "sampling/kernels/slot.cuh"``.
INCLUDE_ROOT = KERNELS.parents[1]


def cache_folder() -> Path:
    """Return the folder for compiled kernels: $GRAFT_CACHE, otherwise ~/.cache/graft.

    Files in this folder are loaded and executed. A folder that belongs to another user, is
    writable for others, or cannot be written is therefore replaced by a private temporary folder,
    with a warning.
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
        warnings.warn(
            f"compiled kernels are not cached, because {folder} cannot be used: {error}",
            stacklevel=4,
        )
        private = tempfile.mkdtemp(prefix="graft-kernels-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)


def nvrtc_options(
    path: Path | None = None, defines: Mapping[str, object] | None = None
) -> list[str]:
    """Return the NVRTC options for a kernel source.

    Parameters
    ----------
    path
        Source file; its folder is added to the include path.
    defines
        Macros.
    """
    folders = include_folders(None if path is None else Path(path).parent)
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    return ["--std=c++17", *macros, *(f"-I{folder}" for folder in folders)]


def include_folders(folder: Path | None) -> list[Path]:
    """Return the include path: graft's root, `cudagraph/kernels` and the folder of the source."""
    folders = [INCLUDE_ROOT, KERNELS]
    if folder is not None and folder.resolve() not in folders:
        folders.append(folder.resolve())
    return folders


def compile_text(
    context: Context, text: str, name: str, defines: Mapping[str, str], folder: Path | None
) -> tuple[Any, object]:
    """Compile kernel source and load the module.

    Parameters
    ----------
    context
        Device to compile for.
    text
        CUDA C++ source.
    name
        Source name in compiler messages.
    defines
        Macros.
    folder
        Additional include folder.

    Returns
    -------
    (CUmodule, object)
        The module and the owner that keeps it loaded.

    Raises
    ------
    KernelError
        The source does not compile, or CuPy is missing on CUDA.
    """
    if context.kind == "soft":
        return _compile_soft(text, name, defines, folder)
    return _compile_cuda(context, text, name, defines, folder)


def _compile_soft(
    text: str, name: str, defines: Mapping[str, str], folder: Path | None
) -> tuple[Any, object]:
    try:
        image = compile_cpu(
            text,
            name,
            defines=defines,
            include_dirs=include_folders(folder),
            cache_dir=cache_folder() / "soft",
        )
    except KernelCompileError as error:
        raise KernelError(str(error)) from error
    # The soft device copies the image during the call.
    module = call(cu.cuModuleLoadData, image)
    return module, _native.Resource(_native.ResourceKind.MODULE, int(module))


def _compile_cuda(
    context: Context, text: str, name: str, defines: Mapping[str, str], folder: Path | None
) -> tuple[Any, object]:
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_folder() / "cupy"))
    try:
        import cupy
    except ImportError as error:
        raise KernelError(
            f"{name}: compiling for CUDA needs CuPy (pip install graft-cuda[cuda13])"
        ) from error
    # CuPy's cache key does not cover included files: put their digest into the source.
    digest = hashlib.sha256()
    for header, content in sorted(included_files(text, include_folders(folder)).items()):
        digest.update(f"{header}\0{content}\0".encode())
    source = f'// includes: {digest.hexdigest()}\n#line 1 "{name}"\n{text}'
    path = None if folder is None else folder / name
    options = tuple(nvrtc_options(path, defines))
    try:
        with cupy.cuda.Device(context.ordinal):
            # Keep the Module itself: RawModule holds it only in a cache that may be cleared.
            module = cupy.RawModule(code=source, options=options, backend="nvrtc").module
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernel source {name!r} does not compile:\n{error}") from error
    return cu.CUmodule(module.ptr), module
