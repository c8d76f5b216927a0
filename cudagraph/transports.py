"""Selection of the transport of host work; each one is probed in a child process."""

from __future__ import annotations

import functools
import os

from graft.cudagraph.chooser import run_python_child
from graft.cudagraph.context import Context
from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import MIN_SPIN_CORES, usable_cores

TRANSPORTS = ("auto", "native", "mailbox", "spinkernel")
#: Transports that use a worker thread, in the order in which "auto" tries them.
WORKER_TRANSPORTS = ("mailbox", "spinkernel")
REPLAYS = 3
REPLAY_LIMIT_S = 2.0
#: Time limit for starting Python, opening the device and compiling two small kernels on a busy
#: machine.
CHILD_LIMIT_S = 60.0

#: Program of the probe: three replays of one request and its wait. If the driver hangs, only the
#: child process does.
_PROBE = f"""
import sys
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph
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
    """Try a transport in a child process.

    Parameters
    ----------
    transport
        "mailbox" or "spinkernel": also the name of the lane method that is tried.
    kind, ordinal
        Device.

    Returns
    -------
    str
        "" if the transport works, otherwise the reason why it does not.
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


def choose_transport(requested: str, device: Context) -> tuple[str, str]:
    """Resolve a transport.

    "auto" selects the mailbox if 4 cores or more are usable and its probe passes, otherwise the
    spinning kernel if its probe passes, otherwise native host nodes. With fewer cores it selects
    native host nodes, because a worker thread would compete with the work for a core.

    Parameters
    ----------
    requested
        Entry of `TRANSPORTS`.
    device
        Device to probe.

    Returns
    -------
    (str, str)
        Transport and the reason for it, in one line.

    Raises
    ------
    OptionError
        The transport is unknown, or was requested by name and does not work on this machine.
    """
    if requested not in TRANSPORTS:
        raise OptionError(f"transport must be one of {', '.join(TRANSPORTS)}, not {requested!r}")
    if requested == "native":
        return requested, "requested"
    if requested != "auto":
        reason = probe_transport(requested, device.kind, device.ordinal)
        if reason:
            raise OptionError(f"transport {requested!r} does not work on this machine: {reason}")
        return requested, "requested"
    cores = usable_cores()
    if cores < MIN_SPIN_CORES:
        return "native", f"{cores} usable cores, fewer than {MIN_SPIN_CORES}"
    failures: list[str] = []
    for transport in WORKER_TRANSPORTS:
        reason = probe_transport(transport, device.kind, device.ordinal)
        if not reason:
            return transport, "; ".join([f"{cores} usable cores, probe passed", *failures])
        failures.append(f"no {transport}: {reason}")
    return "native", "; ".join(failures)
