"""Compile kernel text for the soft device with the system's C++ compiler.

The text is preprocessed, its ``extern "C" __global__`` entries are found, dynamic shared memory is
rewritten, and the result is built with the shim header into one ELF image for ``cuModuleLoadData``.
Images are kept in a cache directory that several processes may share.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from ._elf import shared_bytes, writable_globals

__all__ = ["KernelCompileError", "compile_cpu", "compiler"]

#: Bytes of statically declared shared memory a block may have on any GPU.
MAX_STATIC_SHARED = 48 * 1024
#: An image is kept with its SHA-256 behind it.
DIGEST_BYTES = 32
INCLUDE = Path(__file__).resolve().parent / "include"

# No -ffast-math: a multiply-add is what the text writes as fmaf, and nothing is reassociated.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fno-builtin-printf",  # the device's own, not puts
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-fno-semantic-interposition",
    "-fvisibility=hidden",
    "-Wl,-z,now",
)
#: With ``SOFTCUDA_ALIGNMENT=1`` in the environment: a misaligned access ends the kernel.
ALIGNMENT = (
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-DSOFTCUDA_ALIGNMENT=1",
)
#: For a text that says ``#pragma softcuda quick``: long, and with loops that need little more.
QUICK = ("-O1", "-ftree-vectorize")
# Statics of templates would otherwise be shared between the workers' copies of an image.
GCC_ONLY = ("-fno-gnu-unique", "-fmax-errors=8", "-fvect-cost-model=dynamic")


class KernelCompileError(Exception):
    """A kernel text could not be built for the soft device.

    Attributes
    ----------
    name : str
        The kernel text's name.
    log : str
        What the compiler (or the check that refused) said.
    """

    def __init__(self, name: str, log: str) -> None:
        super().__init__(f"kernel text {name!r} does not compile for the soft device:\n{log}")
        self.name = name
        self.log = log


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the C++ compiler's command: ``$CXX``, else g++, c++ or clang++ from the path.

    Raises
    ------
    KernelCompileError
        When there is none.
    """
    wanted = os.environ.get("CXX")
    for candidate in (wanted,) if wanted else ("g++", "c++", "clang++"):
        words = candidate.split()
        if words and shutil.which(words[0]):
            return tuple(words)
    raise KernelCompileError(
        "<any>", f"no C++ compiler found ($CXX is {wanted!r}); the soft device needs g++ or clang++"
    )


@functools.cache
def _toolchain() -> tuple[tuple[str, ...], str]:
    """Return the target flags and a digest of compiler, processor and shim."""
    version = subprocess.run(
        [*compiler(), "--version"], capture_output=True, text=True, check=False
    ).stdout
    flags: tuple[str, ...] = () if "clang" in version else GCC_ONLY
    flags += ("-march=native",) if platform.machine() == "x86_64" else ("-mcpu=native",)
    identity = [version, platform.machine(), _cpu_flags(), *FLAGS, *flags]
    for part in sorted(INCLUDE.glob("*.h")):
        identity += [part.name, part.read_text()]
    identity.append(Path(__file__).read_text())
    return flags, hashlib.sha256("\0".join(identity).encode()).hexdigest()


def _cpu_flags() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in info.splitlines() if line.startswith(wanted)}))


_INCLUDE_LINE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


@functools.lru_cache(maxsize=256)
def _file(path: str, _changed_ns: int, _size: int) -> tuple[str, list[str]]:
    """Return a file's text and what it includes, read once until the file changes."""
    text = Path(path).read_text()
    return text, _INCLUDE_LINE.findall(text)


def _includes(names: Sequence[str], folders: Sequence[str], seen: dict[str, str]) -> None:
    """Collect every file of ``folders`` that is included by one of ``names``, recursively."""
    for name in names:
        for folder in folders:
            path = os.path.normpath(os.path.join(folder, name))
            if path in seen:
                break
            if os.path.isfile(path):
                state = os.stat(path)
                seen[path], inner = _file(path, state.st_mtime_ns, state.st_size)
                _includes(inner, [os.path.dirname(path), *folders], seen)
                break


def included_files(text: str, folders: Sequence[Path]) -> dict[str, str]:
    """Return the text of every file below `folders` that `text` includes, by path, recursively."""
    found: dict[str, str] = {}
    _includes(_INCLUDE_LINE.findall(text), [str(folder) for folder in folders], found)
    return found


def compile_cpu(
    source: str,
    name: str,
    *,
    defines: Mapping[str, str] | None = None,
    include_dirs: Sequence[Path] = (),
    cache_dir: Path,
) -> bytes:
    """Build one kernel text into an ELF image for the soft device.

    Parameters
    ----------
    source : str
        CUDA C++ text with at least one ``extern "C" __global__`` function.
    name : str
        Names the text in error messages (usually the file's name).
    defines : mapping of str to str, optional
        Macros, as ``-D`` would define them.
    include_dirs : sequence of Path
        Where ``#include "x.cuh"`` looks.
    cache_dir : Path
        Folder of built images; created when missing, safe for concurrent processes.

    Returns
    -------
    bytes
        The image, to be given to ``cuModuleLoadData``.

    Raises
    ------
    KernelCompileError
        The text does not compile, has no entry, or keeps state outside parameters and shared
        memory (which would exist once per worker thread).
    """
    folders = [Path(folder).resolve() for folder in include_dirs]
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    flags, identity = _toolchain()
    if os.environ.get("SOFTCUDA_ALIGNMENT") == "1":
        flags += ALIGNMENT
    included: dict[str, str] = {}
    _includes(_INCLUDE_LINE.findall(source), [str(folder) for folder in folders], included)
    parts = [identity, name, source, *flags, *macros]
    for path, text in sorted(included.items()):
        parts += [path, text]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
    kept = Path(cache_dir) / f"{key}.so"
    image = _read_kept(kept)
    if image is None:
        with tempfile.TemporaryDirectory(prefix="graft-build-") as scratch:
            image = _build(source, name, macros, folders, flags, Path(scratch)).read_bytes()
        _keep(kept, image)
    return image


def _read_kept(path: Path) -> bytes | None:
    """Return a kept image; None when there is none, or not all of it."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    image = data[:-DIGEST_BYTES]
    digest = data[-DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None


def _keep(path: Path, image: bytes) -> None:
    """Keep an image with its digest: another process, and the next start, see all of it or none."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix="keep-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(image + hashlib.sha256(image).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        warnings.warn(f"a compiled kernel cannot be kept in {path.parent}: {error}", stacklevel=3)


def _build(
    source: str,
    name: str,
    macros: Sequence[str],
    folders: Sequence[Path],
    flags: Sequence[str],
    scratch: Path,
) -> Path:
    text = f'#line 1 "{name}"\n{source}'
    search = [f"-I{folder}" for folder in (*folders, INCLUDE)]
    macros = ["-D__SOFTCUDA__=1", *macros]
    (scratch / "source.cu").write_text(text)
    expanded = _run(
        name,
        ["-E", "-std=c++17", *flags, *macros, *search, "-x", "c++", str(scratch / "source.cu")],
    )
    unit = rewrite(expanded, name)
    (scratch / "unit.cc").write_text(unit)
    built = scratch / "image.so"
    shim = ["-D__SOFTCUDA__=1", f"-I{INCLUDE}", "-include", str(INCLUDE / "softcuda_shim.h")]
    if "\n#pragma softcuda quick" in expanded:
        flags = [*QUICK, *flags]
    command = [*FLAGS, *flags, *shim, "-x", "c++", str(scratch / "unit.cc"), "-o", str(built)]
    _run(name, [*command, "-lm"])
    if state := writable_globals(built.read_bytes()):
        raise KernelCompileError(
            name,
            "writable state outside parameters and __shared__ memory: " + ", ".join(state),
        )
    for function, size in shared_bytes(built.read_bytes()).items():
        if size > MAX_STATIC_SHARED:
            raise KernelCompileError(
                name,
                f"kernel {function!r} declares {size} bytes of __shared__ memory; at most "
                f"{MAX_STATIC_SHARED} are possible (dynamic shared memory goes further)",
            )
    return built


def _run(name: str, arguments: Sequence[str]) -> str:
    done = subprocess.run([*compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelCompileError(name, done.stderr or f"the compiler exited {done.returncode}")
    return done.stdout


_BOUNDS = r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)"
_ENTRY = re.compile(
    r'extern\s+"C"\s+(?:__forceinline__\s+)?__global__\s+'
    rf"(?:{_BOUNDS}\s*)?void\s+(?:{_BOUNDS}\s*)?(\w+)\s*\("
)
_SHARED = re.compile(
    r"extern\s+__shared__\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?"
    r"((?:\w|::|\s|<|>|,)+?)\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(
    r"(?<![\w\"])static\s+(?!const\b|constexpr\b|inline\b|__device__|__forceinline__|__host__|"
    r"__noinline__|__shared__)[\w:<>\s*&]+?\b\w+\s*(?:\[[^\]]*\]\s*)*[=;]"
)
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'')


def rewrite(unit: str, name: str) -> str:
    """Rewrite a preprocessed kernel text for the shim; see the module's docstring."""
    for found in _SHARED.finditer(unit):
        plain = _STRING_OR_COMMENT.sub("", unit[: found.start()])
        if plain.count("{") <= plain.count("}"):
            raise KernelCompileError(
                name, f"dynamic shared memory {found[4]!r} must be declared inside a function"
            )
    for bad in _STATIC.finditer(unit):
        if not re.search(r"\bconst(?:expr)?\s+$", unit[: bad.start()]):
            raise KernelCompileError(
                name, f"writable static state is not supported: {bad[0].strip()}"
            )
    unit = _SHARED.sub(
        lambda found: (
            f"{found[2].strip()}* const {found[4]} = "
            f"static_cast<{found[2].strip()}*>(softcuda_self.dynamic_shared);"
        ),
        unit,
    )
    entries = [(found[3], found[1] or found[2] or "0") for found in _ENTRY.finditer(unit)]
    bounds = {entry: bound.split(",")[0] for entry, bound in entries}
    if not bounds:
        raise KernelCompileError(name, 'there is no extern "C" __global__ function')
    lines = [f"SOFTCUDA_ENTRY({entry}, ({bound}))" for entry, bound in bounds.items()]
    lines.append(f"SOFTCUDA_IMAGE({', '.join(f'&softcuda_entry_{e}' for e in bounds)})")
    return unit + '\n# 1 "softcuda-entries"\n' + "\n".join(lines) + "\n"
