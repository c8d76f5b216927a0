"""Machine code and resource usage of the kernels, compiled for NVIDIA GPUs by NVRTC without a GPU.

The source text and the compiler options are the same as those that CuPy passes to NVRTC when graft
runs on hardware. The resource usage consists of the registers, the shared memory and the spilled
bytes that ptxas prints. For kernels that use tensor cores, it also contains the numbers of
instructions in the main loop, which is the loop with the most MMA instructions.

Compilation takes most of the time of the tests that read machine code, so its results are stored in
graft's cache folder. The cache key of a result covers all that the result depends on: the source
text with its includes, the options, and the files of NVRTC and nvdisasm.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from graft.cudagraph.kernels.compiler import cache_folder, include_folders, nvrtc_options
from graft.cudagraph.kernels.nvrtc import nvrtc_library
from graft.cudagraph.kernels.signature import kernel_parameters
from graft.native.softcuda.compile import included_files

#: Compute capabilities times 10, such as 90 for sm_90.
ARCHITECTURES = (80, 90, 100, 120)
PACKAGES = ("cudagraph", "sampling", "grammar", "models", "tools")
#: Compiler options that CuPy appends. ``-ftz=true`` flushes denormals to zero, as the soft device
#: does.
CUPY_OPTIONS = ("--device-as-default-execution-space", "-ftz=true")

#: Kernel files declare macros that the loader may define. These are the values to compile.
STORAGE = ("float", "fp16_t", "bf16_t")
MACRO_VALUES = {
    "WEIGHT": (*STORAGE, "e4m3_t"),
    "CACHE": STORAGE,
    "OUT": STORAGE,
    "HEAD_DIM": ("32", "64", "128"),
    "BLOCK": ("1", "128"),
    "CHUNK": ("1", "64"),
    "SAMPLE_BLOCK": ("1", "512", "1024"),
    "NORM_THREADS": ("1", "256"),
    "CACHE16": STORAGE[1:],
    "WIDE_HEAD": ("64", "128"),
    "WEIGHT16": ("bf16_t", "fp16_t"),
    "WEIGHT8": ("0", "1"),
    "SPLIT_X": ("0", "1"),
    "TILES": ("1", "2"),
    "ROW_BLOCK": ("32", "64", "128", "256"),
    "OUTPUTS": ("128", "256"),
    "POLLS": ("32",),
    "X16": ("0", "1"),
    "BIAS": ("0", "1"),
    "GATED": ("0", "1"),
    "ROPE_HEAD_DIM": ("0", "64", "128"),
}
#: Macros that set the size of the tiles of a product, and their values that are also compiled in
#: combination with the macros for inputs of 16 bits and for weights of 8 bits.
TILE_MACROS = {
    "TILES": MACRO_VALUES["TILES"],
    "ROW_BLOCK": MACRO_VALUES["ROW_BLOCK"],
    "OUTPUTS": ("256",),
}
Macros: TypeAlias = tuple[tuple[str, str], ...]
_X16 = ("X16", "1")
_WEIGHT8: Macros = (("WEIGHT8", "1"),)
_GATED: Macros = (("GATED", "1"), ("OUT", "bf16_t"), _X16)
_BIAS: Macros = (("BIAS", "1"),)
_ROPE: Macros = (("ROPE_HEAD_DIM", "128"), _X16)
TILE_MACRO_COMBINATIONS = (
    _WEIGHT8,
    _GATED,
    _GATED + _WEIGHT8,
    _ROPE,
    _ROPE + _WEIGHT8,
    _ROPE + _BIAS,
)

# Patterns for kernel files.
MACRO_DEFAULT = re.compile(r"^#ifndef (\w+)\n#define \1 (\S+)\n#endif", re.M)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
# Patterns for the log of --ptxas-options=-v.
STACK = re.compile(r"(\d+) bytes stack frame")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# A line of nvdisasm's output: a label, a kernel, or an instruction with its operands.
SASS = re.compile(
    r"^(\.L_\w+):|^\.text\.(\w+):|^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?\s*(\S+)(.*?);", re.M
)
#: Instructions that are counted in main loops.
COUNTED_INSTRUCTIONS = {
    "mma": re.compile("[HQ]MMA"),
    "load": re.compile(r"LDG\.(.*\.)?128"),
    "copy": re.compile(r"LDGSTS\.(.*\.)?128"),
    "shared load": re.compile(r"LDS\.128"),
    "local": re.compile("LDL|STL"),
    "all": re.compile(""),
}


@dataclass(frozen=True)
class Variant:
    """A kernel file with the macros it is compiled with."""

    path: Path  #: kernel file
    defines: Macros = ()  #: names and values of the macros

    @property
    def title(self) -> str:
        """Package, file name and macros in one line."""
        package = self.path.parent.parent.name
        macros = [f"{name}={value}" for name, value in self.defines]
        return " ".join([f"{package}/{self.path.name}", *macros])


@dataclass(frozen=True)
class Usage:
    """Resource usage of a kernel as reported by ptxas."""

    variant: str  #: title of the variant
    kernel: str  #: name of the kernel
    arch: str  #: architecture, such as "sm_90"
    registers: int  #: registers per thread
    shared_bytes: int  #: static shared memory per block
    spilled_bytes: int  #: bytes of spill stores and spill loads per thread
    #: Size of the stack frame per thread. The frame holds spilled registers, and arrays with
    #: indices that are known only at run time.
    stack_bytes: int = 0
    #: Instruction counts of the main loop, by the keys of `COUNTED_INSTRUCTIONS`.
    loop: Counter[str] = field(default_factory=Counter)


class CompileError(Exception):
    """NVRTC rejected a kernel. The message contains its log."""


# Variants -----------------------------------------------------------------------------------------


def package_folder(package: str) -> Path:
    """Return the folder of a subpackage of graft."""
    module = importlib.import_module(f"graft.{package}")
    return Path(module.__path__[0])


def macro_defaults(path: Path) -> dict[str, str]:
    """Return the macros of a kernel file and its includes that kernel loading may set.

    Returns
    -------
    dict
        Default value of each macro by its name.
    """
    text = path.read_text()
    found = dict(MACRO_DEFAULT.findall(text))
    for name in INCLUDE.findall(text):
        if (path.parent / name).exists():
            found |= macro_defaults(path.parent / name)
    return found


def file_variants(path: Path) -> list[Variant]:
    """Return the variants of a kernel file.

    One variant has the default values of all macros. For each macro and each of its other values,
    there is a variant that changes only this macro. A file that uses one of the `TILE_MACROS` also
    has one variant per entry of `TILE_MACRO_COMBINATIONS`.

    Raise CompileError if `MACRO_VALUES` does not contain a macro of the file.
    """
    variants = [Variant(path)]
    for name, default in sorted(macro_defaults(path).items()):
        if name not in MACRO_VALUES:
            raise CompileError(f"{path.name}: macro {name} is missing in MACRO_VALUES")
        for value in MACRO_VALUES[name]:
            if value != default:
                variants.append(_variant(path, (), name, value))
        for value in TILE_MACROS.get(name, ()):
            for macros in TILE_MACRO_COMBINATIONS:
                variants.append(_variant(path, macros, name, value))
    return variants


def _variant(path: Path, macros: Macros, name: str, value: str) -> Variant:
    """Return the variant with `macros`, macro `name` set to `value`, and macros that this requires.

    Tiles of 256 rows or columns require inputs of 16 bits.
    """
    if name in ("ROW_BLOCK", "OUTPUTS") and value == "256" and _X16 not in macros:
        macros = (*macros, _X16)
    return Variant(path, (*macros, (name, value)))


def all_variants(packages: Iterable[str] = PACKAGES) -> list[Variant]:
    """Return the variants of all kernel files, except files that only the soft device uses."""
    variants = []
    for package in packages:
        for path in sorted(package_folder(package).glob("**/kernels/*.cu")):
            if not path.stem.endswith("_thread"):
                variants += file_variants(path)
    return variants


def entry_names(path: Path) -> list[str]:
    """Return the names of the ``extern "C" __global__`` functions of a file, in order."""
    return list(kernel_parameters(path.read_text()))


# Compilation --------------------------------------------------------------------------------------


def _check(result: Sequence[Any]) -> Any:
    """Check the status of an NVRTC call, and return the call's value if it has one."""
    status = result[0]
    if int(status):
        raise CompileError(f"NVRTC call failed: {status}")
    if len(result) > 1:
        return result[1]
    return None


def compile_variant(variant: Variant, arch: int) -> list[Usage]:
    """Compile a variant for an architecture, such as 90 for sm_90. Return the usage per kernel."""
    cubin, log = compile_cubin(variant, arch)
    usages = parse_log(variant.title, f"sm_{arch}", log)
    if b"mma.sync" not in _text_with_includes(variant.path):
        return usages
    loops = parse_sass(disassemble(cubin))
    return [replace(usage, loop=loops.get(usage.kernel, Counter())) for usage in usages]


def compile_cubin(
    variant: Variant, arch: int, more_options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Return the machine code (an ELF file) of a variant, and the log of NVRTC.

    `more_options` override the options that graft and CuPy pass to NVRTC. The result is stored in
    graft's cache folder.
    """
    options = [
        *nvrtc_options(variant.path, dict(variant.defines)),
        *CUPY_OPTIONS,
        f"-arch=sm_{arch}",
        "--ptxas-options=-v",
        *more_options,
    ]
    text = variant.path.read_text()
    headers = included_files(text, include_folders(variant.path.parent))
    key = [variant.path.name, text, *map(str, sorted(headers.items())), *options]

    def compile_now() -> list[str]:
        cubin, log = _compile(variant, options)
        return [base64.b64encode(cubin).decode(), log]

    encoded, log = _stored([*key, _file_identity(nvrtc_library())], compile_now)
    return base64.b64decode(encoded), log


def _compile(variant: Variant, options: Sequence[str]) -> tuple[bytes, str]:
    """Compile a variant with NVRTC. Return its machine code and the log."""
    from cuda.bindings import nvrtc

    text = variant.path.read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(text, variant.path.name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        buffer = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0").decode(errors="replace")
        if int(status):
            raise CompileError(f"{variant.title}: {status.name}\n{log}")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin), log


def _file_identity(path: Path) -> str:
    """Return path, size and modification time of a file."""
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _stored(key: Sequence[str], make: Callable[[], Any]) -> Any:
    """Return the stored result of a key. If there is none, call `make` and store its result."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = Path(cache_folder(), "machine_code", digest)
    with contextlib.suppress(FileNotFoundError):
        return json.loads(zlib.decompress(path.read_bytes()))
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(json.dumps(result).encode(), 1))
    os.replace(file.name, path)
    return result


def _text_with_includes(path: Path) -> bytes:
    """Return the text of a kernel file followed by the texts of its includes in its folder."""
    text = path.read_bytes()
    included = (path.parent / name for name in INCLUDE.findall(text.decode()))
    return text + b"".join(_text_with_includes(file) for file in included if file.exists())


def parse_log(title: str, arch: str, log: str) -> list[Usage]:
    """Parse the log of ``--ptxas-options=-v``.

    Raise CompileError if the log does not contain the resource usage of a kernel.
    """
    usages = []
    for part in log.split("ptxas info    : Compiling entry function ")[1:]:
        kernel = part.split("'")[1]
        spills = SPILLS.search(part)
        used = USED.search(part)
        shared = SHARED.search(part)
        stack = STACK.search(part)
        if spills is None or used is None:
            raise CompileError(f"{title} for {arch}: the log has no usage of {kernel}:\n{part}")
        usages.append(
            Usage(
                variant=title,
                kernel=kernel,
                arch=arch,
                registers=int(used[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                spilled_bytes=sum(map(int, spills.groups())),
                stack_bytes=int(stack[1]) if stack else 0,
            )
        )
    return usages


# Machine code -------------------------------------------------------------------------------------


@functools.cache
def _find_nvdisasm() -> str:
    """Return the path of nvdisasm from the package nvidia-cuda-nvdisasm, or else from PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or []:
            if file.name == "nvdisasm":
                return str(file.locate())
    program = shutil.which("nvdisasm")
    if program is None:
        raise CompileError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    return program


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text, from the cache if possible."""
    program = _find_nvdisasm()

    def disassemble_now() -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [program, "-c", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    key = [hashlib.sha256(cubin).hexdigest(), _file_identity(Path(program))]
    return _stored(key, disassemble_now)


def kernel_instructions(text: str) -> dict[str, list[str]]:
    """Return the instructions of each kernel in nvdisasm's output, in the order of the code.

    An instruction is its name with all suffixes and its operands, such as ``FADD R4, R4, R7``.
    """
    found: dict[str, list[str]] = {}
    kernel = ""
    for label, entry, instruction, operands in SASS.findall(text):
        if entry:
            kernel = entry
            found[kernel] = []
        elif not label:
            found[kernel].append(instruction + operands)
    return found


def parse_sass(text: str) -> dict[str, Counter[str]]:
    """Count the instructions of the main loop of each kernel in nvdisasm's output.

    The main loop is the one with the most MMA instructions.
    """
    loops = count_loops(text)
    return {kernel: max(found, key=lambda counts: counts["mma"]) for kernel, found in loops.items()}


def count_loops(text: str) -> dict[str, list[Counter[str]]]:
    """Count the instructions of the loops of each kernel in nvdisasm's output.

    A loop consists of the instructions from a label to a branch back to this label. The result has
    the counts of `COUNTED_INSTRUCTIONS` by kernel, in the order of the branches.
    """
    found: dict[str, list[Counter[str]]] = {}
    kernel = ""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for label, entry, instruction, operands in SASS.findall(text):
        if entry:
            kernel = entry
            labels = {}
            instructions = []
        elif label:
            labels[label] = len(instructions)
        else:
            instructions.append(instruction)
            target = operands.partition("`(")[2].partition(")")[0]
            is_branch_back = instruction.startswith("BRA") and target in labels
            if is_branch_back:
                found.setdefault(kernel, []).append(_count(instructions[labels[target] :]))
    return found


def _count(instructions: Iterable[str]) -> Counter[str]:
    """Count the instructions that match each of the `COUNTED_INSTRUCTIONS`."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        for name, pattern in COUNTED_INSTRUCTIONS.items():
            if pattern.match(instruction):
                counts[name] += 1
    return counts
