"""``graft soft PROGRAM [ARGS...]``: run a program on the soft device.

The soft device is a library that implements the CUDA driver API on the CPU. The library is
preloaded into the program, so that cuda.bindings, cuda.core and graft use it in place of NVIDIA's
``libcuda.so.1``. ``native/softcuda/README.md`` describes what the soft device supports.

Programs that compile kernels to cubins with NVRTC get PTX, which the soft device interprets: the
command preloads a library that forwards calls to NVRTC and returns PTX in place of cubins, and one
that hides nvJitLink, which would link PTX to machine code. It does so if cuda.core or numba-cuda is
installed, or with ``--code ptx``. With ``--code ptx``, graft compiles its own kernels to PTX too.
With ``--count FILE``, the soft device counts the instructions and the memory traffic of the
kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.cudagraph.driver.chooser import soft_library
from graft.cudagraph.errors import DeviceError, OptionError
from graft.cudagraph.kernels.compiler import cache_folder
from graft.cudagraph.kernels.nvrtc import missing_compiler, nvrtc_library
from graft.cudagraph.kernels.ptx import CODES, provide_ptx_library


def resolve_command(program: list[str]) -> list[str]:
    """Return the command line that runs a program.

    The program is a Python file, ``-m module``, ``-c code`` or an executable, followed by its
    arguments. A leading ``--`` is ignored. Raise OptionError if the program does not exist.
    """
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise OptionError(
            "there is no program to run: give a .py file, -m MODULE, -c CODE or an executable"
        )
    first = program[0]
    if first in ("-m", "-c") and len(program) > 1:
        return [sys.executable, *program]
    if first.endswith(".py") and Path(first).is_file():
        return [sys.executable, *program]
    path = shutil.which(first)
    if path is None:
        raise OptionError(
            f"there is no program {first!r}: it is neither a .py file nor an executable in PATH"
        )
    return [path, *program[1:]]


def soft_environment(
    code: str = "",
    racecheck: bool = False,
    seed: int | None = None,
    report: str = "",
    count: str = "",
) -> Mapping[str, str]:
    """Return the environment variables that make a program use the soft device.

    Raise DeviceError if the soft device is not built.

    Parameters
    ----------
    code
        Code of graft's kernels: "host" or "ptx"; "" keeps the setting of the environment, and
        lets programs that compile with NVRTC run if a library that does so is installed.
    racecheck
        Whether races in shared and global memory are detected when PTX runs.
    seed
        Value of ``SOFTCUDA_PTX_SEED``. If the variable is set, warps of PTX kernels run in a random
        order that the seed determines. None leaves the variable unchanged.
    report
        File to which faults are appended as lines of JSON, or "".
    count
        File to which the counts of instructions and memory traffic of each launch of a PTX kernel
        are appended as a line of JSON, or "".
    """
    library = soft_library()
    if not library.is_file():
        raise DeviceError(f"the soft device is not built: {library} does not exist (make setup)")
    variables = {**os.environ, "GRAFT_DEVICE": "soft"}
    preloaded = [str(library)]
    if code:
        variables["GRAFT_CODE"] = code
    if code == "ptx" or (code == "" and _compiles_with_nvrtc()):
        provide_ptx_library(cache_folder() / "soft")
        variables["SOFTCUDA_PTX_LIBRARY"] = os.environ["SOFTCUDA_PTX_LIBRARY"]
        variables["SOFTCUDA_NVRTC"] = str(nvrtc_library())
        preloaded += _compiler_wrappers(library.parent, nvrtc_library())
    if os.environ.get("LD_PRELOAD"):
        preloaded.append(os.environ["LD_PRELOAD"])
    variables["LD_PRELOAD"] = " ".join(preloaded)
    if racecheck:
        variables["SOFTCUDA_RACECHECK"] = "1"
    if seed is not None:
        variables["SOFTCUDA_PTX_SEED"] = str(seed)
    if report:
        variables["SOFTCUDA_REPORT"] = os.path.abspath(report)
    if count:
        variables["SOFTCUDA_COUNT"] = os.path.abspath(count)
    return variables


def _compiles_with_nvrtc() -> bool:
    """Return whether a library is installed whose programs compile kernels with NVRTC."""
    libraries = ("cuda.core", "numba_cuda")
    return any(importlib.util.find_spec(name) for name in libraries) and not missing_compiler()


def _compiler_wrappers(folder: Path, nvrtc: Path) -> list[str]:
    """Return the libraries in `folder` that replace NVRTC and nvJitLink, if they exist.

    The first one has the file name of `nvrtc` and returns PTX in place of cubins. The second one
    hides nvJitLink, so that cuda.core and numba-cuda link PTX with the driver. NVRTC's own library
    of built-in functions is added, because some versions of NVRTC find it only if it is loaded
    already.
    """
    major = nvrtc.name.rpartition(".")[2]
    names = (nvrtc.name, f"libnvJitLink.so.{major}")
    wrappers = [folder / name for name in names if (folder / name).is_file()]
    return [str(path) for path in (*wrappers, *nvrtc.parent.glob("libnvrtc-builtins.so.*"))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``graft soft``."""
    parser.add_argument(
        "--code",
        choices=CODES,
        default="",
        help="how graft's kernels run: compiled for the CPU (host, the default), or as PTX that "
        "the soft device interprets (ptx); other programs get PTX from NVRTC in place of cubins, "
        "unless --code host is given",
    )
    parser.add_argument(
        "--racecheck",
        action="store_true",
        help="report races in shared and global memory of kernels that are loaded as PTX",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="run the warps of PTX kernels in a random order and poison data that is not ready",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        default="",
        help="write faults to FILE, one JSON object per line",
    )
    parser.add_argument(
        "--count",
        metavar="FILE",
        default="",
        help="write to FILE as JSON, for each PTX kernel and grid, how many instructions of each "
        "class its launches executed and how many bytes they loaded and stored",
    )
    parser.add_argument(
        "--error-exitcode",
        type=int,
        metavar="N",
        help="exit with status N if the program, or a process that it starts, had a fault",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM [ARGS...]",
        help="a .py file, -m MODULE, -c CODE or an executable, with its arguments; put -- before a "
        "program that begins with a dash",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program and return its exit status.

    The program replaces this process unless ``--count`` or ``--error-exitcode`` is given.
    """
    command = resolve_command(options.program)
    sys.stdout.flush()
    if options.code != "ptx" and os.environ.get("GRAFT_CODE") != "ptx":
        for name in ("racecheck", "count"):
            if getattr(options, name):
                print(
                    f"graft: --{name} has an effect only on kernels loaded as PTX", file=sys.stderr
                )
    if options.code == "ptx":
        reason = missing_compiler()
        if reason:
            raise OptionError(reason)
    if options.report:
        Path(options.report).write_text("")
    if options.count or options.error_exitcode is not None:
        return _run_child(command, options)
    settings = options.code, options.racecheck, options.seed, options.report
    os.execve(command[0], command, soft_environment(*settings))


def _run_child(command: Sequence[str], options: argparse.Namespace) -> int:
    """Run the program in a child process and return its exit status.

    If the soft device reports a fault, return the value of the option ``--error-exitcode`` if it is
    given. With ``--count``, write the counts of kernel launches to the file that the option names.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(options.report or f"{folder}/faults.json")
        launches = Path(folder, "launches.json")
        environment = soft_environment(
            options.code,
            options.racecheck,
            options.seed,
            str(report),
            str(launches) if options.count else "",
        )
        status = subprocess.run(command, env=environment, check=False).returncode
        faults = report.read_text().splitlines() if report.exists() else []
        if options.count:
            lines = launches.read_text().splitlines() if launches.exists() else []
            write_counts(lines, Path(options.count))
    if faults and options.error_exitcode is not None:
        print(f"graft: {len(faults)} faults", file=sys.stderr)
        return int(options.error_exitcode)
    return status if status >= 0 else 128 - status


def write_counts(lines: Sequence[str], path: Path) -> None:
    """Write the soft device's counts of kernel launches to a file, as an array of JSON objects.

    `lines` has one JSON object per launch, with counts of instructions and memory traffic. Launches
    of one kernel with the same grid and block become one object. Its counts are sums, except
    ``longest_block_*`` and ``dependent_host_loads``, which are maxima.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        launch = json.loads(line)
        key = json.dumps([launch[name] for name in ("kernel", "grid", "block")])
        entry = found.get(key)
        if entry is None:
            found[key] = {"launches": 1, **launch}
            continue
        entry["launches"] += 1
        for name, value in launch.items():
            if isinstance(value, dict):
                entry[name] = dict(Counter(entry[name]) + Counter(value))
            elif name in ("blocks", "atomics"):
                entry[name] += value
            elif isinstance(value, int):
                entry[name] = max(entry[name], value)
    path.write_text(json.dumps(list(found.values()), indent=1) + "\n")
