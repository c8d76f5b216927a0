"""Kernel text to loaded module: NVRTC through CuPy on CUDA, the C++ compiler on the soft device.

This is the one place where the two devices differ above the driver.
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
#: Folder that holds graft's packages. Kernels include headers of other packages relative to it:
#: ``#include "sampling/kernels/slot.cuh"``.
INCLUDE_ROOT = KERNELS.parents[1]


def cache_folder() -> Path:
    """Return where compiled kernels are kept: $GRAFT_CACHE, else ~/.cache/graft.

    What lies there is loaded and run. So a folder of somebody else's, one that others may write to
    or one that cannot be written is not used: a private one takes its place until the process ends,
    and a warning says so.
    """
    named = os.environ.get("GRAFT_CACHE")
    return _usable(Path(named) if named else Path(os.path.expanduser("~/.cache/graft")))


@functools.cache
def _usable(folder: Path) -> Path:
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
            f"compiled kernels are not kept, as {folder} cannot be used: {error}", stacklevel=4
        )
        private = tempfile.mkdtemp(prefix="graft-kernels-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)


def nvrtc_options(
    path: Path | None = None, defines: Mapping[str, object] | None = None
) -> list[str]:
    """Return the options that a kernel text is compiled with on CUDA.

    Parameters
    ----------
    path : Path, optional
        The text's file; its folder is searched for includes.
    defines : mapping, optional
        Macros.
    """
    folders = include_folders(None if path is None else Path(path).parent)
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    return ["--std=c++17", *macros, *(f"-I{folder}" for folder in folders)]


def include_folders(folder: Path | None) -> list[Path]:
    """Return the include folders: graft's root, `cudagraph/kernels` and the folder of the text."""
    folders = [INCLUDE_ROOT, KERNELS]
    if folder is not None and folder.resolve() not in folders:
        folders.append(folder.resolve())
    return folders


def compile_text(
    context: Context, text: str, name: str, defines: Mapping[str, str], folder: Path | None
) -> tuple[Any, object]:
    """Compile and load; returns the CUmodule and what keeps it loaded."""
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
    # CuPy's cache key does not cover included files, so their digest becomes part of the text.
    digest = hashlib.sha256()
    for path, header in sorted(included_files(text, include_folders(folder)).items()):
        digest.update(f"{path}\0{header}\0".encode())
    stamped = f'// includes: {digest.hexdigest()}\n#line 1 "{name}"\n{text}'
    path = None if folder is None else folder / name
    options = tuple(nvrtc_options(path, defines))
    try:
        with cupy.cuda.Device(context.ordinal):
            # Keep the Module itself: RawModule only finds it in a cache that can be emptied.
            module = cupy.RawModule(code=stamped, options=options, backend="nvrtc").module
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernel text {name!r} does not compile:\n{error}") from error
    return cu.CUmodule(module.ptr), module
