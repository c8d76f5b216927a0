"""Selection of the transport of host work.

A transport is one of the ways to run a host step in a graph: a CUDA host node ("native"), or a
mailbox whose wait is a batch memory operation ("mailbox") or a spinning kernel ("spinkernel").
Transports with a mailbox are probed in a child process before they are selected.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os

from graft.cudagraph.driver.chooser import SONAME, run_python_child
from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.errors import OptionError
from graft.cudagraph.host.hostwork import MIN_SPIN_CORES, usable_cores
from graft.cudagraph.kernels.compiler import KERNELS, cache_folder
from graft.native import _native

TRANSPORTS = ("auto", "native", "mailbox", "spinkernel")
#: Transports that use a worker thread, in the order in which "auto" tries them.
WORKER_TRANSPORTS = ("mailbox", "spinkernel")
#: Prefixes of the environment variables that can change whether a transport works: settings of the
#: drivers, and variables by which profilers and sanitizers load themselves into a process. In a
#: tool that runs each kernel several times, such as ncu, a wait for a mailbox may never end.
#: A stored result of a probe is used only if these variables have the same values.
VARIABLE_PREFIXES = (
    *("CUDA_", "SOFTCUDA_"),
    *("LD_PRELOAD", "CUPTI_", "NSYS", "NV_", "NVIDIA_", "NVTX_INJECTION", "QUADD_"),
)
#: Sources of the kernels of the transports.
KERNEL_SOURCES = ("mailbox.cu", "graft.cuh")
REPLAYS = 3
REPLAY_LIMIT_S = 2.0
#: Time limit for starting Python, opening the device and compiling two small kernels on a busy
#: machine.
CHILD_LIMIT_S = 60.0

#: Program of the probe: three replays of a graph with one mailbox. The program runs in a child
#: process, because a driver that does not support the transport may hang.
_PROBE = f"""
import sys
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph.graph import Graph
try:
    device = open_device(sys.argv[1], int(sys.argv[2]))
    stream, graph, seen = device.stream(), Graph(device, "probe"), []
    add = getattr(graph.lane("main"), sys.argv[3])
    add(lambda: seen.append(1), deadline_s={REPLAY_LIMIT_S} / 2, name="probe")
    run = graph.instantiate()
    for _ in range({REPLAYS}):
        run.launch(stream)
        run.synchronize({REPLAY_LIMIT_S})
    print("answered", len(seen))
except GraftError as error:
    print("refused", " ".join(str(error).split()))
"""


@functools.cache
def probe_transport(transport: str, kind: str, ordinal: int = 0) -> str:
    """Run one small graph with a transport in a child process, to find out whether it works.

    The transport, "mailbox" or "spinkernel", is the name of the lane method that the probe calls.
    `kind` and `ordinal` select the device as in :func:`open_device`. Return the reason why the
    transport does not work on the device; "" if it works.
    """
    if transport not in WORKER_TRANSPORTS:
        raise OptionError(f"transport {transport!r} needs no probe")
    output, reason = run_python_child(
        "-c",
        _PROBE,
        kind,
        str(ordinal),
        transport,
        limit_s=CHILD_LIMIT_S,
        environment={**os.environ, "GRAFT_DEVICE": kind},
    )
    if output == f"answered {REPLAYS}":
        return ""
    return reason or output


def transport_problem(transport: str, device: Context) -> str:
    """Return the reason why a transport does not work on a device; "" if it works.

    The transport is probed, unless an earlier process has done so with success under the same
    conditions: GPU, driver library, build of graft, kernels of the transports, and environment
    variables of the driver, profilers and sanitizers. A failure is not remembered, because its
    reason may be temporary.
    """
    success = cache_folder() / "transports" / _probe_key(transport, device)
    if success.exists():
        return ""
    reason = probe_transport(transport, device.kind, device.ordinal)
    if not reason:
        with contextlib.suppress(OSError):  # the file only saves the time of a later probe
            success.parent.mkdir(exist_ok=True)
            success.touch()
    return reason


def _probe_key(transport: str, device: Context) -> str:
    """Return a digest of the conditions under which the result of a probe is valid."""
    libraries = [os.stat(path) for path in (_native.__file__, _native.loaded_library(SONAME))]
    gpu = bytes(call(cu.cuDeviceGetUuid, call(cu.cuDeviceGet, device.ordinal)).bytes)
    conditions = (
        transport,
        gpu,
        call(cu.cuDriverGetVersion),
        [(library.st_size, library.st_mtime_ns) for library in libraries],
        _PROBE,
        [(KERNELS / name).read_text() for name in KERNEL_SOURCES],
        [
            (name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES) and name != "CUDA_LOG_FILE"
        ],
    )
    return hashlib.sha256(repr(conditions).encode()).hexdigest()


def choose_transport(requested: str, device: Context) -> tuple[str, str]:
    """Check a requested transport, or select one if "auto" is requested; see `TRANSPORTS`.

    "auto" selects the first of "mailbox" and "spinkernel" whose probe passes, and "native" if both
    probes fail. With fewer than 4 usable cores it selects "native" without a probe, because a
    worker thread would compete with other threads for a core.

    Return the transport and the reason for the selection in one line. OptionError is raised if the
    transport is unknown, or was requested by name and does not work on this machine.
    """
    if requested not in TRANSPORTS:
        raise OptionError(f"transport must be one of {', '.join(TRANSPORTS)}, not {requested!r}")
    if requested == "native":
        return requested, "requested"
    if requested != "auto":
        reason = transport_problem(requested, device)
        if reason:
            raise OptionError(f"transport {requested!r} does not work on this machine: {reason}")
        return requested, "requested"
    cores = usable_cores()
    if cores < MIN_SPIN_CORES:
        return "native", f"{cores} usable cores, fewer than {MIN_SPIN_CORES}"
    failures: list[str] = []
    for transport in WORKER_TRANSPORTS:
        reason = transport_problem(transport, device)
        if not reason:
            return transport, "; ".join([f"{cores} usable cores, probe passed", *failures])
        failures.append(f"no {transport}: {reason}")
    return "native", "; ".join(failures)
