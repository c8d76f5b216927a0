"""CUDA graphs with host work: devices, memory, kernels, streams, lanes and graphs.

See README.md for an introduction. Importing this package loads no driver; :func:`open_device` does.

Terms:

* The *soft device* is a CPU implementation of the part of the CUDA driver API that graft uses.
* A *lane* is an in-order sequence of device and host work, on a stream or in a graph.
* A *mark* is a point in a lane that other lanes can wait for.
* A *host step* is CPU work that a graph runs: a Python callable or a native function.
* A *replay* is one launch of an executable graph. Replays are numbered from 1.
* A *payload* is a value that a host step receives and that can be changed between replays.
"""

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.driver.pinned import PinnedField, PinnedSlots, Ring
from graft.cudagraph.errors import (
    DeadlineError,
    DeviceError,
    GraftError,
    HostWorkError,
    KernelError,
    OptionError,
    ShapeError,
)
from graft.cudagraph.graph.conditional import Condition, condition, if_, if_else, switch_, while_
from graft.cudagraph.graph.graph import Graph, GraphBody, GraphExec, GraphLane
from graft.cudagraph.graph.mailbox import MailboxWorker
from graft.cudagraph.graph.nodes import Node
from graft.cudagraph.host.hostwork import NativeWork, PythonWork, check_captured, hostfunc
from graft.cudagraph.host.payload import Payload
from graft.cudagraph.kernels.kernels import Kernel, KernelModule, load_image, load_text
from graft.cudagraph.lanes import Lane, StreamLane
from graft.cudagraph.streams import Event, Stream

__all__ = [
    "check_captured",
    "Condition",
    "condition",
    "DeadlineError",
    "Device",
    "DeviceArray",
    "DeviceError",
    "Event",
    "GraftError",
    "Graph",
    "GraphBody",
    "GraphExec",
    "GraphLane",
    "hostfunc",
    "HostWorkError",
    "if_",
    "if_else",
    "Kernel",
    "KernelError",
    "KernelModule",
    "Lane",
    "load_image",
    "load_text",
    "MailboxWorker",
    "NativeWork",
    "Node",
    "open_device",
    "OptionError",
    "Payload",
    "PinnedArray",
    "PinnedField",
    "PinnedSlots",
    "PythonWork",
    "Ring",
    "ShapeError",
    "Stream",
    "StreamLane",
    "switch_",
    "while_",
]
