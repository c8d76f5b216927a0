"""``graft doctor``: check the machine and suggest fixes.

With ``--watch PROGRAM [ARGS...]``, the command does not check the machine. It runs a program on the
soft device and reports whether the GIL and the CUDA driver can cause a deadlock in the program. The
module `graft.tools.lock_order` describes the method.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from graft.cudagraph.driver import chooser
from graft.cudagraph.errors import GraftError, OptionError
from graft.cudagraph.kernels.compiler import COMPILER_ADVICE, PREBUILT
from graft.cudagraph.kernels.nvrtc import missing_compiler
from graft.native import _native
from graft.native.errors import short_repr
from graft.tools import lock_order

#: Default of ``--limit`` in seconds.
WATCH_LIMIT_S = 60
#: Distributions that graft requires.
REQUIRED_PACKAGES = ("numpy", "cuda-bindings", "safetensors", "tokenizers", "jinja2", "tqdm")
#: Time limit of compiling and loading a kernel in a new process.
KERNEL_LIMIT_S = 60.0
#: Width of the column with the names of the checks.
NAME_WIDTH = 13
HOST_COMPILER_ADVICE = "the soft device compiles kernels with it: apt install g++"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str  #: name of the check
    #: ``"ok"``; ``"missing"`` if graft does not work without this component; or ``"absent"`` if
    #: graft works without it.
    status: str
    detail: str  #: version, path or error that the check found
    advice: str = ""  #: suggested action if the status is not ``"ok"``


def version_of(package: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None if absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Finding:
    """Check the interpreter and the operating system."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("python", "missing", detail, "graft runs on Linux")
    return Finding("python", "ok", detail)


def check_packages() -> Finding:
    """Check the required packages."""
    missing = []
    parts = []
    for name in REQUIRED_PACKAGES:
        version = version_of(name)
        if version is None:
            missing.append(name)
            version = "not installed"
        parts.append(f"{name} {version}")
    detail = ", ".join(parts)
    if missing:
        return Finding("packages", "missing", detail, f"pip install {' '.join(missing)}")
    return Finding("packages", "ok", detail)


def check_native() -> Finding:
    """Report the path of graft's native module, which this program has already imported."""
    return Finding("native part", "ok", str(_native.__file__))


def check_compiler() -> Finding:
    """Check the C++ compiler that the soft device uses to compile kernels.

    A wheel contains compiled kernels, with which graft runs most models without a compiler.
    """
    from graft.native.softcuda.compile import KernelCompileError, compiler

    try:
        command = compiler()
    except KernelCompileError as error:
        status = "absent" if PREBUILT.is_dir() else "missing"
        return Finding("compiler", status, error.log, HOST_COMPILER_ADVICE)
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if done.returncode or not done.stdout:
        detail = f"{' '.join(command)} does not run: {done.stderr}"
        return Finding("compiler", "missing", detail, HOST_COMPILER_ADVICE)
    return Finding("compiler", "ok", done.stdout.splitlines()[0])


def is_wsl() -> bool:
    """Return whether this is the Windows Subsystem for Linux."""
    return "microsoft" in platform.release().lower()


def check_driver() -> Finding:
    """Query NVIDIA's driver in a child process, so that this process cannot hang or crash."""
    properties, error = chooser.probe_cuda()
    number = properties.get("version", 0)  # CUDA version: 1000 * major + 10 * minor
    major = number // 1000
    minor = number % 1000 // 10
    detail = f"CUDA {major}.{minor}, " if number else ""
    if error:
        return Finding(
            "nvidia driver",
            "absent",
            detail + error,
            "graft uses the soft device; install NVIDIA's driver "
            + ("for Windows (not in WSL2) " if is_wsl() else "")
            + "to use a GPU",
        )
    detail += ", ".join(properties["devices"])
    if is_wsl():
        detail += (
            "; on WSL2, a kernel's stores to host memory may reach the host late: the engine "
            "queries its stream every millisecond while it waits for a round"
        )
    return Finding("nvidia driver", "ok", detail)


def check_device() -> Finding:
    """Open the device that graft selects on this machine."""
    from graft.cudagraph.device import open_device
    from graft.cudagraph.graph.mailbox import TIMED_DEVICE_S, limits_kernel_time

    choice = os.environ.get("GRAFT_DEVICE", "auto")
    try:
        device = open_device()
    except GraftError as error:
        return Finding(
            "device",
            "missing",
            f"GRAFT_DEVICE={choice}: {error}",
            "set GRAFT_DEVICE to auto, cuda or soft",
        )
    if limits_kernel_time(device):
        return Finding(
            "device",
            "ok",
            f"{device.describe()}; its driver limits the run time of kernels, as for GPUs with a "
            f"display: a spinning kernel waits for host work for at most {TIMED_DEVICE_S:g} s",
        )
    return Finding("device", "ok", device.describe())


def check_transports() -> Finding:
    """Test each transport (mechanism by which a CUDA graph runs host work) in a child process."""
    from graft.cudagraph.device import open_device
    from graft.cudagraph.host.transports import choose_transport, probe_transport

    try:
        device = open_device()
    except GraftError:
        return Finding("host work", "missing", "no device", "see the finding for the device")
    errors = {}
    for transport in ("mailbox", "spinkernel"):
        error = probe_transport(transport, device.kind, device.ordinal)
        if error:
            errors[transport] = error
    chosen, reason = choose_transport("auto", device)
    detail = f"grammars use {chosen} ({reason})"
    if errors:
        failures = [f"{transport} does not work: {error}" for transport, error in errors.items()]
        advice = "; ".join(failures)
        return Finding("host work", "absent", detail, advice)
    return Finding("host work", "ok", f"{detail}; mailbox and spinkernel work")


#: Program that compiles and loads a kernel on the GPU. It prints the compiler and why CuPy does not
#: work ("" if it does), or "refused" and an error.
KERNEL_TEST = """
import warnings
warnings.simplefilter("ignore")
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.kernels.compiler import TEST_KERNEL, cupy_problem
from graft.cudagraph.kernels.kernels import load_text
try:
    device = open_device("cuda")
    load_text(device, TEST_KERNEL, "test.cu")["graft_test"]
    print("compiled", cupy_problem(device.ordinal))
except GraftError as error:
    print("refused", " ".join(str(error).split()))
"""


def check_cupy() -> Finding:
    """Check that CuPy, which compiles kernels for GPUs, is installed, without importing it."""
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        version = version_of(package)
        if version:
            return Finding("cupy", "ok", f"{package} {version}")
    return Finding("cupy", "absent", "not installed", f"to use a GPU, {COMPILER_ADVICE}")


def check_gpu_compiler() -> Finding:
    """Compile a kernel of one line and load it on the GPU, in a child process.

    The test does not run if graft would not use a GPU.
    """
    name = "gpu compiler"
    if os.environ.get("GRAFT_DEVICE") == "soft":
        return Finding(name, "ok", "not needed, because GRAFT_DEVICE=soft")
    _, reason = chooser.probe_cuda()
    if reason:
        return Finding(name, "ok", "not needed without a GPU")
    output, error = chooser.run_python_child("-c", KERNEL_TEST, limit_s=KERNEL_LIMIT_S)
    result, _, detail = output.partition(" ")
    if result != "compiled":
        detail = error or detail
        return Finding(name, "missing", f"no kernel can be compiled: {detail}", COMPILER_ADVICE)
    if detail:
        return Finding(name, "absent", f"NVRTC without CuPy works; {detail}", COMPILER_ADVICE)
    return Finding(name, "ok", "CuPy compiles and loads a kernel")


def check_nvrtc() -> Finding:
    """Check that NVRTC, which compiles kernels without CuPy, can be loaded."""
    reason = missing_compiler()
    if not reason:
        version = version_of("nvidia-cuda-nvrtc")
        return Finding("nvrtc", "ok", f"nvidia-cuda-nvrtc {version}" if version else "found")
    return Finding(
        "nvrtc",
        "absent",
        "not installed",
        "NVRTC is required for GRAFT_CODE=ptx, and on a GPU without CuPy: "
        "pip install nvidia-cuda-nvrtc",
    )


def check_backend(name: str, requirement: str, fallback: str = "") -> Finding:
    """Check that the grammar backend `name` is installed in a version that graft can use.

    The native library of the backend must have all methods and symbols that graft calls.
    `requirement` has the arguments of ``pip install`` that install the backend. `fallback` says
    what graft does without the backend; it is empty if graft cannot run without it.
    """
    version = version_of(name)
    status = "absent" if fallback else "missing"
    if version is None:
        return Finding(name, status, f"not installed{fallback}", f"pip install {requirement}")
    try:
        build = importlib.import_module(f"graft.grammar.backends.{name}").load_native()
    except GraftError as error:
        return Finding(name, status, f"{version}: {error}{fallback}", f"pip install {requirement}")
    detail = f"{version} ({build})" if build else version
    return Finding(name, "ok", f"{detail}, all required symbols found")


def check_xgrammar() -> Finding:
    """Check XGrammar, the optional backend."""
    return check_backend(
        "xgrammar",
        "--no-deps xgrammar==0.2.8 (its wheel depends on torch, which graft does not use)",
        "; LLGuidance is used for all grammars",
    )


def check_llguidance() -> Finding:
    """Check LLGuidance, the default backend."""
    return check_backend("llguidance", "llguidance==1.9.1")


def check_tvm_ffi() -> Finding:
    """Check tvm-ffi, through which graft calls XGrammar, the optional backend."""
    version = version_of("apache-tvm-ffi")
    if version:
        return Finding("tvm-ffi", "ok", version)
    advice = "pip install apache-tvm-ffi==0.1.15.post2"
    return Finding("tvm-ffi", "absent", "not installed; XGrammar cannot be used", advice)


def check_demo_model() -> Finding:
    """Check that the package contains the demo model."""
    from graft.tools.demo_model import DRAFTERS, demo_model

    folders = dict.fromkeys(folder for name in DRAFTERS for folder in demo_model(name))
    missing = [str(folder) for folder in folders if not (folder / "model.safetensors").exists()]
    if missing:
        return Finding(
            "demo model",
            "absent",
            f"no model in {', '.join(missing)}",
            "use graft generate with --model and --draft",
        )
    return Finding("demo model", "ok", str(demo_model()[0].parent))


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_native,
    check_compiler,
    check_driver,
    check_cupy,
    check_nvrtc,
    check_gpu_compiler,
    check_xgrammar,
    check_llguidance,
    check_tvm_ffi,
    check_demo_model,
    check_device,
    check_transports,
)


def examine() -> Iterator[Finding]:
    """Run the checks one after another, and yield the finding of each check as soon as it ends."""
    for check in CHECKS:
        yield check()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft doctor``."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="SECONDS",
        help="with --watch: time after which a driver call or host function counts as hanging "
        f"(default {WATCH_LIMIT_S})",
    )
    parser.add_argument(
        "--watch",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM [ARGS...]",
        help="run a program (a .py file, -m MODULE, -c CODE or an executable) on the soft device "
        "and report possible GIL deadlocks; exit status 0: none, 1: none, but the program "
        "failed, 2: nothing could be observed, 3: potential deadlock, 4: the program hung",
    )
    parser.set_defaults(run=run)


def run_watch(program: list[str], limit_s: int, as_json: bool) -> int:
    """Run a program on the soft device, print the lock-order report, and return the exit status.

    The report is printed as JSON to stdout, or as text to stderr.
    """
    sys.stdout.flush()
    stdout = sys.stderr.fileno() if as_json else None
    report, status = lock_order.run_watched(program, limit_s, stdout=stdout)
    if as_json:
        print(json.dumps({**report.to_json(), "status": status}, indent=1))
    else:
        print(lock_order.format_report(report, status), file=sys.stderr)
    if report.verdict == "none":
        return lock_order.FAILED if status else 0
    statuses = {"potential": lock_order.POTENTIAL, "unseen": lock_order.UNSEEN}
    return statuses.get(report.verdict, lock_order.DEADLOCK)


def read_watch_options(options: argparse.Namespace) -> list[str]:
    """Return the program that follows --watch, and apply the options that precede the program.

    argparse does not parse the arguments after --watch. Therefore, this function parses the options
    --json and --limit if they occur between --watch and the program, and stores them in `options`.

    Raise OptionError if the value of --limit is not a number.
    """
    program = list(options.watch)
    while program and program[0].startswith(("--json", "--limit")):
        name, has_value, value = program.pop(0).partition("=")
        if name == "--json":
            options.json = True
        elif name == "--limit":
            if not has_value and program:
                value = program.pop(0)
            if not value.isdecimal():
                raise OptionError(f"--limit must be a number of seconds, got {short_repr(value)}")
            options.limit = int(value)
    return program


def run(options: argparse.Namespace) -> int:
    """Print the findings, and return 1 if a required component is missing.

    With --watch, run a program instead and search for deadlocks between the GIL and the CUDA
    driver. The exit status, a constant of the module `lock_order`, then says what was found.
    """
    if options.watch is not None:
        program = read_watch_options(options)
        limit_s = WATCH_LIMIT_S if options.limit is None else options.limit
        return run_watch(program, limit_s, options.json)
    if options.limit is not None:
        raise OptionError("--limit requires --watch")
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            _print_finding(finding)
    healthy = all(finding.status != "missing" for finding in findings)
    if options.json:
        report = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    return 0 if healthy else 1


def _print_finding(finding: Finding) -> None:
    """Print a finding in one line, and the advice in a second line if there is any."""
    print(f"{finding.name:<{NAME_WIDTH}}  {finding.status:<7}  {finding.detail}", flush=True)
    if finding.status != "ok" and finding.advice:
        print(f"{'':<{NAME_WIDTH}}           -> {finding.advice}", flush=True)
