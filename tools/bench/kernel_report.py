"""Compile every kernel for real GPUs with NVRTC, which needs no GPU, and table what ptxas says.

The text and the options are those that CuPy passes to NVRTC on hardware. Of kernels on tensor cores
the main loop is counted: the one with most steps. Usage::

    python -m graft.tools.bench.kernel_report [--arch 80 90 100 120]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graft.cudagraph.compiler import nvrtc_options
from graft.cudagraph.signature import kernel_kinds
from graft.tools.report import table

ARCHITECTURES = (80, 90, 100, 120)
ROOMS = ("cudagraph", "sampling", "models", "tools")
# CuPy appends these to whatever it is given (denormals flush to zero, as on the soft device).
CUPY_OPTIONS = ("--device-as-default-execution-space", "-ftz=true")

#: Values that the wrappers give to the definitions which kernel texts leave open.
STORAGE = ("float", "fp16_t", "bf16_t")
VALUES = {
    "WEIGHT": (*STORAGE, "e4m3_t"),
    "CACHE": STORAGE,
    "OUT": STORAGE,
    "HEAD_DIM": ("32", "64", "128"),
    "CHUNK": ("1", "64"),
    "SAMPLE_BLOCK": ("1", "512", "1024"),
    "NORM_THREADS": ("1", "256"),
    "CACHE16": STORAGE[1:],
    "WIDE_HEAD": ("64", "128"),
    "WEIGHT16": ("bf16_t", "fp16_t"),
    "WEIGHT8": ("0", "1"),
    "SPLIT": ("0", "1"),
    "TILES": ("1", "2"),
    "ROW_BLOCK": ("32", "64", "128"),
    "X16": ("0", "1"),
    "GATED": ("0", "1"),
    "TURNED": ("0", "64", "128"),
}
#: What says how many rows a product takes at once, and what else is defined where x is rounded or
#: weights have 8 bits.
SIZES = ("TILES", "ROW_BLOCK")
_EIGHT = (("WEIGHT8", "1"),)
_ROUNDED = ((("GATED", "1"), ("OUT", "bf16_t"), ("X16", "1")), (("TURNED", "128"), ("X16", "1")))
MORE = (_EIGHT, *(more + eight for more in _ROUNDED for eight in ((), _EIGHT)))

DEFAULT = re.compile(r"^#ifndef (\w+)\n#define \1 (\S+)\n#endif", re.M)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
STACK = re.compile(r"(\d+) bytes stack frame")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SASS = re.compile(
    r"^(\.L_\w+):|^\.text\.(\w+):|^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?\s*(\S+)(.*?);", re.M
)
#: What main loops are counted for, and how nvdisasm spells it.
COUNTED = {
    "mma": re.compile("[HQ]MMA"),
    "load": re.compile(r"LDG\.(.*\.)?128"),
    "copy": re.compile(r"LDGSTS\.(.*\.)?128"),
    "shared load": re.compile(r"LDS\.128"),
    "local": re.compile("LDL|STL"),
}


@dataclass(frozen=True)
class Variant:
    """A kernel file with the definitions it is compiled with."""

    path: Path
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """File and definitions in one line."""
        room = self.path.parent.parent.name
        return " ".join([f"{room}/{self.path.name}", *(f"{k}={v}" for k, v in self.defines)])


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of one kernel; bytes are per thread, shared memory per block.

    ``loop`` counts steps of tensor cores and 16-byte accesses of the main loop, see `main_loops`.
    """

    variant: str
    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    stack_bytes: int = 0  # arrays with run-time indices, and what is spilled
    loop: Counter[str] = field(default_factory=Counter)


class CompileError(Exception):
    """NVRTC refused a kernel; the text is its log."""


def room_folder(room: str) -> Path:
    """Folder that a room is imported from."""
    module = importlib.import_module(f"graft.{room}")
    return Path(module.__path__[0])


def definitions(path: Path) -> dict[str, str]:
    """Names that a kernel file, or a file it includes, leaves to its loader, with defaults."""
    text = path.read_text()
    found = dict(DEFAULT.findall(text))
    for name in INCLUDE.findall(text):
        if (path.parent / name).exists():
            found |= definitions(path.parent / name)
    return found


def file_variants(path: Path) -> list[Variant]:
    """The file as it stands, once for each other value of each definition, and what products of
    rounded rows, with weights of 16 bits or 8, are launched with.

    Raises
    ------
    CompileError
        When the file has a definition whose values `VALUES` does not list.
    """
    found = [Variant(path)]
    for name, default in sorted(definitions(path).items()):
        if name not in VALUES:
            raise CompileError(f"{path.name}: {name} is not in kernel_report.VALUES")
        found += [Variant(path, ((name, v),)) for v in VALUES[name] if v != default]
        if name in SIZES:
            found += [Variant(path, (*more, (name, v))) for more in MORE for v in VALUES[name]]
    return found


def all_variants(rooms: Iterable[str] = ROOMS) -> list[Variant]:
    """Every variant of every kernel file of the rooms, but those of the soft device alone."""
    files = [
        path
        for room in rooms
        for path in sorted(room_folder(room).glob("**/kernels/*.cu"))
        if not path.stem.endswith("_thread")
    ]
    return [variant for path in files for variant in file_variants(path)]


def entry_names(path: Path) -> list[str]:
    """Kernels that a file's text declares (``extern "C" __global__``), in order."""
    return list(kernel_kinds(path.read_text()))


def _value(result: Sequence[Any]) -> Any:
    if int(result[0]):
        raise CompileError(f"NVRTC call failed: {result[0]}")
    return result[1] if len(result) > 1 else None


def compile_variant(variant: Variant, arch: int) -> list[Usage]:
    """Compile to machine code of ``sm_<arch>`` and return one usage for each entry.

    Raises
    ------
    CompileError
        With NVRTC's log when the text does not compile.
    """
    from cuda.bindings import nvrtc

    options = [
        *nvrtc_options(variant.path, dict(variant.defines)),
        *CUPY_OPTIONS,
        f"-arch=sm_{arch}",
        "--ptxas-options=-v",
    ]
    text = variant.path.read_bytes()
    program = _value(nvrtc.nvrtcCreateProgram(text, variant.path.name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(_value(nvrtc.nvrtcGetProgramLogSize(program)))
        _value(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.rstrip(b"\0").decode(errors="replace")
        if int(status):
            raise CompileError(f"{variant.title} for sm_{arch}: {status.name}\n{said}")
        usages = parse_log(variant.title, f"sm_{arch}", said)
        code = bytearray(_value(nvrtc.nvrtcGetCUBINSize(program)))
        _value(nvrtc.nvrtcGetCUBIN(program, code))
        loops = main_loops(bytes(code)) if b"mma.sync" in _texts(variant.path) else {}
        return [replace(usage, loop=loops.get(usage.kernel, Counter())) for usage in usages]
    finally:
        _value(nvrtc.nvrtcDestroyProgram(program))


def _texts(path: Path) -> bytes:
    """A kernel file, and what it includes of its folder."""
    text = path.read_bytes()
    names = (path.parent / name for name in INCLUDE.findall(text.decode()))
    return text + b"".join(_texts(name) for name in names if name.exists())


def main_loops(code: bytes) -> dict[str, Counter[str]]:
    """What of `COUNTED` the loop with most steps of tensor cores holds, by kernel of a cubin.

    Raises
    ------
    CompileError
        Without nvdisasm, of the package nvidia-cuda-nvdisasm or on the path.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packed = [str(file.locate()) for file in files if file.name == "nvdisasm"]
    program = packed[0] if packed else shutil.which("nvdisasm")
    if program is None:
        raise CompileError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        text = subprocess.run(
            [program, "-c", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    found: dict[str, Counter[str]] = {}
    kernel = ""
    labels = dict[str, int]()
    steps = list[str]()
    for label, entry, step, rest in SASS.findall(text):
        if entry:
            kernel = entry
            labels = {}
            steps = []
        elif label:
            labels[label] = len(steps)
        else:
            steps.append(step)
            target = rest.partition("`(")[2].partition(")")[0]
            if step.startswith("BRA") and target in labels:
                loop = Counter(
                    name
                    for step in steps[labels[target] :]
                    for name, spelled in COUNTED.items()
                    if spelled.match(step)
                )
                found[kernel] = max(found.get(kernel, Counter()), loop, key=lambda c: c["mma"])
    return found


def parse_log(title: str, arch: str, log: str) -> list[Usage]:
    """Read the lines that ``--ptxas-options=-v`` writes for each entry."""
    usages = []
    for part in log.split("ptxas info    : Compiling entry function ")[1:]:
        name = part.split("'")[1]
        spills = SPILLS.search(part)
        used = USED.search(part)
        shared = SHARED.search(part)
        stack = STACK.search(part)
        if spills is None or used is None:
            raise CompileError(f"{title} for {arch}: no usage of {name} in the log:\n{part}")
        usages.append(
            Usage(
                title,
                name,
                arch,
                int(used[1]),
                int(shared[1]) if shared else 0,
                sum(map(int, spills.groups())),
                int(stack[1]) if stack else 0,
            )
        )
    return usages


def usage_table(usages: Iterable[Usage]) -> str:
    """One line for each kernel of a variant, the architectures side by side."""
    rows: dict[tuple[str, str], dict[str, Usage]] = {}
    for usage in usages:
        rows.setdefault((usage.variant, usage.kernel), {})[usage.arch] = usage
    arches = sorted({a for row in rows.values() for a in row}, key=lambda a: int(a[3:]))
    title = "registers / shared bytes / spilled bytes, main loop"
    return table(
        [
            (title, *arches),
            *(
                (
                    ": ".join(which),
                    *(
                        f"{u.registers}/{u.shared_bytes}/{u.spilled_bytes}"
                        + "".join(f" {count} {name}" for name, count in u.loop.items())
                        for u in (row[a] for a in arches)
                    ),
                )
                for which, row in rows.items()
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile everything, print the table; return 1 when a kernel does not compile."""
    parser = argparse.ArgumentParser(description="Compile every kernel with NVRTC (no GPU needed).")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    options = parser.parse_args(arguments)
    try:
        usages = [
            usage
            for variant in all_variants()
            for arch in options.arch
            for usage in compile_variant(variant, arch)
        ]
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(usage_table(usages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
