"""``graft doctor``: what this machine has, what is missing, and what to do about it.

``graft doctor --watch PROGRAM [ARGS...]`` runs a program on the soft device instead and says
whether it can deadlock between the GIL and the driver; see :mod:`graft.tools.watch`.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass

from graft.cudagraph import chooser
from graft.cudagraph.errors import GraftError, OptionError
from graft.native import _native
from graft.tools import watch

LIMIT_S = 60


@dataclass(frozen=True)
class Finding:
    """One line of the report; `status` is "ok", "absent" (graft works without) or "missing"."""

    name: str
    status: str
    detail: str
    advice: str = ""


def version_of(package: str) -> str | None:
    """Installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Finding:
    """The interpreter and the system."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("python", "missing", detail, "graft runs on Linux")
    return Finding("python", "ok", detail)


def check_packages() -> Finding:
    """The pinned packages that every part of graft imports."""
    names = ("numpy", "cuda-bindings", "safetensors", "tokenizers", "jinja2", "tqdm")
    found = {name: version_of(name) for name in names}
    lacking = [name for name, version in found.items() if version is None]
    detail = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if lacking:
        return Finding("packages", "missing", detail, f"pip install {' '.join(lacking)}")
    return Finding("packages", "ok", detail)


def check_native() -> Finding:
    """graft's own C++ part, without which this program would not run."""
    return Finding("native part", "ok", str(_native.__file__))


def check_compiler() -> Finding:
    """The C++ compiler, which compiles kernels for the soft device."""
    from graft.native.softcuda.compile import KernelCompileError, compiler

    try:
        command = compiler()
    except KernelCompileError as error:
        return Finding(
            "compiler",
            "missing",
            error.log,
            "the soft device compiles kernels with it: apt install g++",
        )
    said = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if said.returncode or not said.stdout:
        return Finding(
            "compiler",
            "missing",
            f"{' '.join(command)} does not run: {said.stderr}",
            "the soft device compiles kernels with it: apt install g++",
        )
    return Finding("compiler", "ok", said.stdout.splitlines()[0])


def check_driver() -> Finding:
    """NVIDIA's driver, asked in a child process."""
    found, why = chooser.probe_cuda()
    number = found.get("version", 0)
    detail = f"CUDA {number // 1000}.{number % 1000 // 10}, " if number else ""
    if why:
        return Finding(
            "nvidia driver",
            "absent",
            detail + why,
            "graft runs on the soft device without it; a GPU needs NVIDIA's driver",
        )
    return Finding("nvidia driver", "ok", detail + ", ".join(found["devices"]))


def check_device() -> Finding:
    """The device that graft would open now."""
    from graft.cudagraph.device import open_device

    wanted = os.environ.get("GRAFT_DEVICE", "auto")
    try:
        device = open_device()
    except GraftError as error:
        return Finding(
            "device",
            "missing",
            f"GRAFT_DEVICE={wanted}: {error}",
            "GRAFT_DEVICE is auto, cuda or soft",
        )
    return Finding("device", "ok", device.describe())


def check_transports() -> Finding:
    """How host work can be part of graphs here; each way is tried in a child process."""
    from graft.cudagraph.device import open_device
    from graft.cudagraph.transports import choose_transport, probe_transport

    try:
        device = open_device()
    except GraftError:
        return Finding("host work", "missing", "no device", "see the line of the device")
    lacking = {
        t: why
        for t in ("mailbox", "spinkernel")
        if (why := probe_transport(t, device.kind, device.ordinal))
    }
    chosen, reason = choose_transport("auto", device)
    detail = f"the grammar takes {chosen} ({reason})"
    if lacking:
        said = "; ".join(f"no {transport}: {why}" for transport, why in lacking.items())
        return Finding("host work", "absent", detail, said)
    return Finding("host work", "ok", f"{detail}; mailbox and spinkernel answered")


def check_cupy() -> Finding:
    """CuPy, which compiles kernels on CUDA; it is not imported here."""
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        version = version_of(package)
        if version:
            return Finding("cupy", "ok", f"{package} {version}")
    return Finding(
        "cupy",
        "absent",
        "not installed",
        "CUDA needs it: pip install 'graft-cuda[cuda13]' (or [cuda12])",
    )


def check_backend(name: str, advice: str, without: str = "") -> Finding:
    """A grammar backend; its methods and symbols are probed as an engine would."""
    version = version_of(name)
    if version is None:
        status = "absent" if without else "missing"
        return Finding(name, status, f"not installed{without}", f"pip install {advice}")
    try:
        said = importlib.import_module(f"graft.grammar.backends.{name}").load_native()
    except GraftError as error:
        return Finding(name, "missing", f"{version}: {error}", f"pip install {advice}")
    return Finding(name, "ok", f"{version}{f' ({said})' if said else ''}, symbols as known")


def check_xgrammar() -> Finding:
    """XGrammar, which graft can do without."""
    return check_backend(
        "xgrammar",
        "--no-deps xgrammar==0.2.8 (its wheel asks for torch, which graft does not use)",
        "; LLGuidance serves alone",
    )


def check_llguidance() -> Finding:
    """LLGuidance, the usual backend."""
    return check_backend("llguidance", "llguidance==1.9.1")


def check_tvm_ffi() -> Finding:
    """tvm-ffi, through which XGrammar is driven."""
    version = version_of("apache-tvm-ffi")
    advice = "pip install apache-tvm-ffi==0.1.15.post2"
    return Finding("tvm-ffi", "ok" if version else "missing", version or "not installed", advice)


def check_demo_model() -> Finding:
    """The demo model that travels with the package."""
    from graft.tools.demo_model import DRAFTERS, demo_model

    folders = dict.fromkeys(p for name in DRAFTERS for p in demo_model(name))
    lacking = [str(p) for p in folders if not (p / "model.safetensors").exists()]
    if lacking:
        return Finding(
            "demo model",
            "absent",
            f"no model in {', '.join(lacking)}",
            "graft generate needs --model and --draft then",
        )
    return Finding("demo model", "ok", str(demo_model()[0].parent))


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_native,
    check_compiler,
    check_driver,
    check_cupy,
    check_xgrammar,
    check_llguidance,
    check_tvm_ffi,
    check_demo_model,
    check_device,
    check_transports,
)


def examine() -> list[Finding]:
    """Run every check. CuPy counts as missing where there is a GPU for it to serve."""
    found = [check() for check in CHECKS]
    has_gpu = any(f.name == "nvidia driver" and f.status == "ok" for f in found)
    if has_gpu and os.environ.get("GRAFT_DEVICE") != "soft":
        found = [
            Finding(f.name, "missing", f.detail, f.advice)
            if f.name == "cupy" and f.status == "absent"
            else f
            for f in found
        ]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft doctor``."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="SECONDS",
        help="with --watch: a driver call or host function that lasts longer hangs "
        f"(default {LIMIT_S})",
    )
    parser.add_argument(
        "--watch",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM [ARGS...]",
        help="run a program (a .py file, -m MODULE, -c CODE or an executable) on "
        "the soft device and look for GIL deadlocks, whether they happen or "
        "not; exit status 0: none, 1: none, but the program failed, 2: "
        "nothing could be seen, 3: potential, 4: it hung",
    )
    parser.set_defaults(run=run)


def run_watch(program: list[str], limit_s: int, as_json: bool) -> int:
    """Run a program under the watchdog and report to stderr, or as JSON to stdout."""
    sys.stdout.flush()
    report, status = watch.watch(program, limit_s, stdout=sys.stderr.fileno() if as_json else None)
    if as_json:
        print(json.dumps({**report.to_json(), "status": status}, indent=1))
    else:
        print(watch.show(report, status), file=sys.stderr)
    if report.verdict == "none":
        return watch.FAILED if status else 0
    return {"potential": watch.POTENTIAL, "unseen": watch.UNSEEN}.get(
        report.verdict, watch.DEADLOCK
    )


def watched(options: argparse.Namespace) -> list[str]:
    """The program behind --watch; the doctor's own options may stand before it too.

    Raises
    ------
    OptionError
        The limit is no number.
    """
    program = list(options.watch)
    while program and program[0].startswith(("--json", "--limit")):
        name, is_joined, value = program.pop(0).partition("=")
        if name == "--json":
            options.json = True
        elif name == "--limit":
            value = value if is_joined or not program else program.pop(0)
            if not value.isdecimal():
                raise OptionError(f"--limit takes seconds, not {value!r}")
            options.limit = int(value)
    return program


def run(options: argparse.Namespace) -> int:
    """Print the findings; returns 1 when something that graft needs is missing."""
    if options.watch is not None:
        program = watched(options)
        limit_s = LIMIT_S if options.limit is None else options.limit
        return run_watch(program, limit_s, options.json)
    if options.limit is not None:
        raise OptionError("--limit goes with --watch")
    found = examine()
    healthy = all(finding.status != "missing" for finding in found)
    if options.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(f) for f in found]}, indent=1))
        return 0 if healthy else 1
    width = max(len(finding.name) for finding in found)
    for finding in found:
        print(f"{finding.name:<{width}}  {finding.status:<7}  {finding.detail}")
        if finding.status != "ok" and finding.advice:
            print(f"{'':<{width}}  {'':<7}  -> {finding.advice}")
    return 0 if healthy else 1
