"""Compile CUDA C++ kernels for the soft device with the system's C++ compiler.

The source is preprocessed, its ``extern "C" __global__`` functions are located, declarations of
dynamic shared memory are rewritten, and the result is compiled together with the shim header into
an ELF image for ``cuModuleLoadData``. Images are cached in a directory that processes may share.
A wheel contains the images of graft's own kernels (`prebuild`), which therefore need no compiler.
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
from .scratch import scratch_folder

__all__ = ["KernelCompileError", "compile_cpu", "compiler"]

_unusable_caches: set[Path] = set()
#: Maximum bytes of statically declared shared memory per block, as on a GPU.
MAX_STATIC_SHARED = 48 * 1024
#: Size of the SHA-256 digest that follows the image in a cache file.
DIGEST_BYTES = 32
#: Directory of the headers that kernel sources may include.
INCLUDE = Path(__file__).resolve().parent / "include"

# -ffast-math is not used: a product and a sum are fused only where the source calls fmaf, and the
# compiler does not reorder floating-point operations.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fno-builtin-printf",  # otherwise the compiler replaces some calls of printf by puts
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-fno-semantic-interposition",
    "-fvisibility=hidden",
    "-Wl,-z,now",
)
#: Flags that are added if ``SOFTCUDA_ALIGNMENT=1`` is set. A misaligned access then causes a fault.
ALIGNMENT = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-DSOFTCUDA_ALIGNMENT=1")
#: Flags for a source that contains ``#pragma softcuda quick``. Long sources whose loops gain little
#: from -O3 contain this line, so that they compile faster.
QUICK = ("-O1", "-ftree-vectorize")
# -fno-gnu-unique, because the workers' copies of an image would share unique symbols
# (INVARIANTS.md K2).
GCC_ONLY = ("-fno-gnu-unique", "-fmax-errors=8", "-fvect-cost-model=dynamic")
#: Flags for images that run on other processors too, and the processor features that these images
#: need (names in /proc/cpuinfo), by machine.
PORTABLE: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86_64": (
        ("-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mlzcnt", "-mmovbe"),
        frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")),
    ),
    "aarch64": ((), frozenset()),
}


class KernelCompileError(Exception):
    """A kernel source cannot be compiled for the soft device.

    Attributes
    ----------
    name : str
        Name of the source.
    log : str
        Output of the compiler, or the reason why a check failed.
    """

    def __init__(self, name: str, log: str) -> None:
        super().__init__(f"kernel source {name!r} does not compile for the soft device:\n{log}")
        self.name = name
        self.log = log


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: ``$CXX``, or the first of g++, c++ and clang++.

    Raises
    ------
    KernelCompileError
        No compiler is found.
    """
    configured = os.environ.get("CXX")
    candidates = (configured,) if configured else ("g++", "c++", "clang++")
    for candidate in candidates:
        words = candidate.split()
        if words and shutil.which(words[0]):
            return tuple(words)
    raise KernelCompileError(
        "<any>",
        f"no C++ compiler was found (CXX={configured!r}); the soft device compiles kernels with "
        "g++ or clang++ (apt install g++), except for those that a wheel of graft contains",
    )


@functools.cache
def compiler_version() -> str:
    """Return the output of the C++ compiler's option ``--version``."""
    return subprocess.run(
        [*compiler(), "--version"], capture_output=True, text=True, check=False
    ).stdout


@functools.cache
def _toolchain() -> tuple[tuple[str, ...], str]:
    """Return the flags for the target processor, and a digest that is part of cache file names.

    The digest covers everything besides the source that determines an image: the compiler's
    version, the processor, the flags, the shim headers in ``include/`` and this file.
    """
    flags = compiler_flags()
    flags += ("-march=native",) if platform.machine() == "x86_64" else ("-mcpu=native",)
    return flags, digest([compiler_version(), processor_flags(), *flags, _shim_digest()])


def compiler_flags() -> tuple[str, ...]:
    """Return the flags that depend on the kind of compiler."""
    return () if "clang" in compiler_version() else GCC_ONLY


@functools.cache
def _shim_digest() -> str:
    """Return a digest of the machine's name, the common flags, the shim headers and this file."""
    parts = [platform.machine(), *FLAGS]
    for header in sorted(INCLUDE.glob("*.h")):
        parts += [header.name, header.read_text()]
    return digest([*parts, Path(__file__).read_text()])


def digest(parts: Sequence[str]) -> str:
    """Return the SHA-256 digest of a list of texts as a hexadecimal string."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def processor_flags() -> str:
    """Return the lines of /proc/cpuinfo that describe the processor's instruction set."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    keys = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in info.splitlines() if line.startswith(keys)}))


_INCLUDE_LINE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


@functools.lru_cache(maxsize=256)
def _file(path: str, _modified_ns: int, _size: int) -> tuple[str, list[str]]:
    """Return the text of a file and the names of the files that it includes.

    The result is cached until the file's modification time or size changes.
    """
    text = Path(path).read_text()
    return text, _INCLUDE_LINE.findall(text)


def _collect_includes(names: Sequence[str], folders: Sequence[str], found: dict[str, str]) -> None:
    """Add to `found` the files `names` in `folders` and all files that they include."""
    for name in names:
        for folder in folders:
            path = os.path.normpath(os.path.join(folder, name))
            if path in found:
                break
            if os.path.isfile(path):
                status = os.stat(path)
                found[path], included = _file(path, status.st_mtime_ns, status.st_size)
                _collect_includes(included, [os.path.dirname(path), *folders], found)
                break


def included_files(text: str, folders: Sequence[Path]) -> dict[str, str]:
    """Return the files in `folders` that `text` includes, directly or not: their texts by path."""
    found: dict[str, str] = {}
    _collect_includes(_INCLUDE_LINE.findall(text), [str(folder) for folder in folders], found)
    return found


def compile_cpu(
    source: str,
    name: str,
    *,
    defines: Mapping[str, str] | None = None,
    include_dirs: Sequence[Path] = (),
    cache_dir: Path,
    prebuilt_dir: Path | None = None,
) -> bytes:
    """Compile a kernel source to an ELF image for the soft device.

    Parameters
    ----------
    source : str
        CUDA C++ source code with at least one ``extern "C" __global__`` function.
    name : str
        Name of the source in error messages, usually a file name.
    defines : mapping of str to str, optional
        Values of macros by name, as for the compiler option ``-D``.
    include_dirs : sequence of Path
        Directories in which included files are searched.
    cache_dir : Path
        Directory of compiled images. It is created if it does not exist; concurrent processes may
        share it.
    prebuilt_dir : Path, optional
        Directory of images that `prebuild` has compiled. If it contains an image of this source,
        and the processor can run the image, no compiler is needed.

    Returns
    -------
    bytes
        ELF image for ``cuModuleLoadData``.

    Raises
    ------
    KernelCompileError
        The source does not compile, defines no kernel, declares too much shared memory, or has
        writable state outside of parameters and shared memory. Such state would exist once per
        worker thread.
    """
    folders = [_resolved(os.path.abspath(folder)) for folder in include_dirs]
    defined = sorted((defines or {}).items())
    macros = [f"-D{macro}={value}" for macro, value in defined]
    checks_alignment = os.environ.get("SOFTCUDA_ALIGNMENT") == "1"
    included = included_files(source, folders)
    if prebuilt_dir is not None and not checks_alignment and _runs_portable_images():
        try:
            return (prebuilt_dir / _portable_name(source, name, macros, included)).read_bytes()
        except FileNotFoundError:
            pass
    flags, identity = _toolchain()
    if checks_alignment:
        flags += ALIGNMENT
    parts = [identity, name, source, *flags, *macros]
    for path, text in included.items():
        parts += [os.path.basename(path), text]  # not the folder: copies of graft share images
    cached = Path(cache_dir) / f"{digest(parts)[:40]}.so"
    image = _read_cached(cached)
    if image is None:
        with scratch_folder("softcuda-build-") as scratch:
            image = _build(source, name, macros, folders, flags, scratch).read_bytes()
        _write_cached(cached, image)
    return image


@functools.lru_cache(maxsize=256)
def _resolved(folder: str) -> Path:
    """Return an absolute path without symbolic links."""
    return Path(folder).resolve()


def build_portable(
    source: str, name: str, *, defines: Mapping[str, str], include_dirs: Sequence[Path]
) -> tuple[str, bytes]:
    """Compile a kernel source to an image that runs on other processors too.

    Return the image and the name of its file in the directory `prebuilt_dir` of `compile_cpu`.
    """
    folders = [folder.resolve() for folder in include_dirs]
    macros = [f"-D{macro}={value}" for macro, value in sorted(defines.items())]
    flags = (*compiler_flags(), *PORTABLE[platform.machine()][0])
    with scratch_folder("softcuda-build-") as scratch:
        image = _build(source, name, macros, folders, flags, scratch).read_bytes()
    return _portable_name(source, name, macros, included_files(source, folders)), image


def _portable_name(
    source: str, name: str, macros: Sequence[str], included: Mapping[str, str]
) -> str:
    """Return the file name of a portable image.

    The name does not depend on the paths of the included files, which differ after installation.
    """
    parts = [_shim_digest(), name, source, *macros, *included.values()]
    return f"{digest(parts)[:40]}.so"


@functools.cache
def _runs_portable_images() -> bool:
    """Return whether the processor can run portable images."""
    _, features = PORTABLE.get(platform.machine(), ((), frozenset(("unknown",))))
    return features <= set(processor_flags().split())


def _read_cached(path: Path) -> bytes | None:
    """Return a cached image, or None if it does not exist or its digest does not match."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    image = data[:-DIGEST_BYTES]
    digest = data[-DIGEST_BYTES:]
    if hashlib.sha256(image).digest() != digest:
        return None
    return image


def _write_cached(path: Path, image: bytes) -> None:
    """Write an image and its digest to the cache.

    The file is written atomically, so that another process never reads an incomplete one. If it
    cannot be written, the function warns once per folder.
    """
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
        _warn_about_cache(path.parent, error)


def _warn_about_cache(folder: Path, error: OSError) -> None:
    """Warn once per folder that kernels cannot be written to the cache.

    The warning names no source line, because the caller's code is not the cause of the error.
    """
    if folder not in _unusable_caches:
        _unusable_caches.add(folder)
        reason = error.strerror or error
        text = f"compiled kernels cannot be written to the cache {folder}: {reason}"
        warnings.warn_explicit(text, UserWarning, "graft", 1)


def _build(
    source: str,
    name: str,
    macros: Sequence[str],
    folders: Sequence[Path],
    flags: Sequence[str],
    scratch: Path,
) -> Path:
    """Preprocess, rewrite, compile and check a source. Return the path of the image."""
    macros = ["-D__SOFTCUDA__=1", *macros]
    search = [f"-I{folder}" for folder in (*folders, INCLUDE)]
    source_path = scratch / "source.cu"
    source_path.write_text(f'#line 1 "{name}"\n{source}')
    preprocess = ["-E", "-std=c++17", *flags, *macros, *search, "-x", "c++", str(source_path)]
    expanded = run_compiler(name, preprocess)
    unit_path = scratch / "unit.cc"
    unit_path.write_text(rewrite(expanded, name))
    image_path = scratch / "image.so"
    if "\n#pragma softcuda quick" in expanded:
        flags = [*QUICK, *flags]
    shim = ["-D__SOFTCUDA__=1", f"-I{INCLUDE}", "-include", str(INCLUDE / "softcuda_shim.h")]
    files = ["-x", "c++", str(unit_path), "-o", str(image_path), "-lm"]
    run_compiler(name, [*FLAGS, *flags, *shim, *files])
    _check_image(name, image_path.read_bytes())
    return image_path


def _check_image(name: str, image: bytes) -> None:
    """Reject an image with writable state outside of shared memory or with too much shared
    memory."""
    state = writable_globals(image)
    if state:
        raise KernelCompileError(
            name,
            "writable state outside of parameters and __shared__ memory is not supported: "
            + ", ".join(state),
        )
    for function, size in shared_bytes(image).items():
        if size > MAX_STATIC_SHARED:
            raise KernelCompileError(
                name,
                f"kernel {function!r} declares {size} bytes of __shared__ memory; at most "
                f"{MAX_STATIC_SHARED} are allowed. Dynamic shared memory may be larger",
            )


def run_compiler(name: str, arguments: Sequence[str]) -> str:
    """Run the compiler and return its standard output; raise KernelCompileError if it fails."""
    done = subprocess.run([*compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log = done.stderr or f"the compiler ended with exit status {done.returncode}"
        raise KernelCompileError(name, log)
    return done.stdout


_BOUNDS = r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)"
_ENTRY = re.compile(
    r'extern\s+"C"\s+(?:__forceinline__\s+)?__global__\s+'
    rf"(?:{_BOUNDS}\s*)?void\s+(?:{_BOUNDS}\s*)?(\w+)\s*\("
)
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?"
    r"((?:\w|::|\s|<|>|,)+?)\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(
    r"(?<![\w\"])static\s+(?!const\b|constexpr\b|inline\b|__device__|__forceinline__|__host__|"
    r"__noinline__|__shared__)[\w:<>\s*&]+?\b\w+\s*(?:\[[^\]]*\]\s*)*[=;]"
)
_STRING_OR_CHARACTER = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'')


def rewrite(unit: str, name: str) -> str:
    """Rewrite a preprocessed kernel source so that it compiles with the shim header.

    Each declaration of dynamic shared memory is replaced with a pointer to the block's memory. The
    kernel table, through which the device finds the kernels, is appended.

    Raises
    ------
    KernelCompileError
        The source defines no kernel, declares a writable static variable, or declares dynamic
        shared memory outside of a function.
    """
    _check_declarations(unit, name)
    unit = _DYNAMIC_SHARED.sub(_dynamic_shared_pointer, unit)
    bounds: dict[str, str] = {}
    for match in _ENTRY.finditer(unit):
        arguments = match[1] or match[2] or "0"
        bounds[match[3]] = arguments.split(",")[0]
    if not bounds:
        raise KernelCompileError(name, 'there is no extern "C" __global__ function')
    lines = [f"SOFTCUDA_ENTRY({entry}, ({bound}))" for entry, bound in bounds.items()]
    entries = ", ".join(f"&softcuda_entry_{entry}" for entry in bounds)
    lines.append(f"SOFTCUDA_IMAGE({entries})")
    return unit + '\n# 1 "softcuda-entries"\n' + "\n".join(lines) + "\n"


def _check_declarations(unit: str, name: str) -> None:
    """Reject writable statics, and dynamic shared memory outside of a function."""
    for match in _DYNAMIC_SHARED.finditer(unit):
        preceding = _STRING_OR_CHARACTER.sub("", unit[: match.start()])
        if preceding.count("{") <= preceding.count("}"):
            raise KernelCompileError(
                name, f"dynamic shared memory {match[4]!r} must be declared inside a function"
            )
    for match in _STATIC.finditer(unit):
        if not re.search(r"\bconst(?:expr)?\s+$", unit[: match.start()]):
            raise KernelCompileError(
                name, f"writable static state is not supported: {match[0].strip()}"
            )


def _dynamic_shared_pointer(match: re.Match[str]) -> str:
    """Return the declaration that replaces a declaration of dynamic shared memory."""
    element = match[2].strip()
    variable = match[4]
    return f"{element}* const {variable} = static_cast<{element}*>(softcuda_self.dynamic_shared);"
