"""CUDA graphs with host work: devices, memory, kernels, streams, lanes and graphs.

See README.md for an introduction. Importing this package loads no driver; :func:`open_device` does.
"""

from graft.cudagraph.conditional import (
    Condition,
    condition,
    if_,
    if_else,
    while_,
)
from graft.cudagraph.device import Device, open_device
from graft.cudagraph.errors import (
    DeadlineError,
    DeviceError,
    GraftError,
    HostWorkError,
    KernelError,
    OptionError,
    ShapeError,
)
from graft.cudagraph.graph import Graph, GraphBody, GraphExec, GraphLane
from graft.cudagraph.hostwork import NativeWork, PythonWork, check_captured, hostfunc
from graft.cudagraph.kernels import Kernel, KernelModule, load_text
from graft.cudagraph.lanes import Lane, StreamLane
from graft.cudagraph.mailbox import MailboxWorker
from graft.cudagraph.memory import DeviceArray, PinnedArray
from graft.cudagraph.payload import Payload
from graft.cudagraph.pinned import PinnedField, PinnedSlots, Ring
from graft.cudagraph.streams import Event, Stream
