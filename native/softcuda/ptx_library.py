"""Compile the PTX library, with which the soft device runs PTX, when it is first needed.

The library is compiled from ``ptx/`` with the system's C++ compiler, as kernels for the soft device
are, and kept in the same cache. Its file name depends on the sources, the compiler and the
instruction set, so machines with different processors may share a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .compile import INCLUDE, compiler, compiler_version, digest, processor_flags, run_compiler
from .scratch import scratch_folder

__all__ = ["build_ptx_library"]

SOURCES = Path(__file__).resolve().parent / "ptx"
#: Compiler flags by the feature of an x86-64 processor that they require (its name in
#: /proc/cpuinfo). They are used if the processor has all of these features. AVX-512 is not used,
#: because GCC 12 cannot compile the sources with it.
AVX2 = {"avx2": "-mavx2", "fma": "-mfma", "bmi1": "-mbmi", "bmi2": "-mbmi2"}


def build_ptx_library(cache_dir: Path) -> Path:
    """Return the path of the PTX library in a cache. Compile the library if it is not there.

    If several processes need the library at the same time, one of them compiles it and the others
    wait.

    Parameters
    ----------
    cache_dir : Path
        Directory of the cache. It is created if it does not exist.

    Raises
    ------
    KernelCompileError
        No compiler is found, or the library does not compile.
    """
    flags = [*(SOURCES / "compile_flags.txt").read_text().split(), *_instruction_set()]
    sources = sorted(SOURCES.glob("*.cpp"))
    headers = [*SOURCES.glob("*.h"), *INCLUDE.glob("softcuda_*")]
    identity = [compiler_version(), platform.machine(), *flags]
    for path in (*sources, *sorted(headers)):
        identity += [path.name, path.read_text()]
    library = Path(cache_dir) / f"libgraft_ptx-{digest(identity)[:40]}.so"
    if library.is_file():
        return library
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(library.with_suffix(".lock")):
        if not library.is_file():
            _compile(sources, flags, library)
    return library


def _instruction_set() -> list[str]:
    available = processor_flags().split()
    return list(AVX2.values()) if all(flag in available for flag in AVX2) else []


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock on a file for as long as the context lasts.

    On a file system without locks, several processes may compile the library at the same time,
    which is harmless, because each stores its result atomically (`_store`).
    """
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(sources: list[Path], flags: list[str], library: Path) -> None:
    """Compile the sources, as many at a time as there are cores, and link them to `library`."""
    cores = len(os.sched_getaffinity(0))
    with scratch_folder("softcuda-build-") as scratch, ThreadPoolExecutor(cores) as pool:

        def compile_one(source: Path) -> str:
            object_file = scratch / f"{source.stem}.o"
            arguments = [*flags, f"-I{INCLUDE}", "-c", str(source), "-o", str(object_file)]
            run_compiler(f"ptx/{source.name}", arguments)
            return str(object_file)

        compiler()  # raises an error here, rather than in each thread, if there is no compiler
        # The largest files take longest and are compiled first.
        by_size = sorted(sources, key=lambda path: -path.stat().st_size)
        objects = list(pool.map(compile_one, by_size))
        linked = scratch / library.name
        run_compiler("ptx", ["-shared", "-Wl,--no-undefined", "-o", str(linked), *objects])
        _store(linked, library)


def _store(linked: Path, library: Path) -> None:
    """Copy a file into the cache atomically, so that no process loads an incomplete library."""
    handle, name = tempfile.mkstemp(prefix="keep-", dir=library.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(linked.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, library)
    except BaseException:
        os.unlink(name)
        raise
