"""Values that change between replays without an update of the graph.

The parameters of a node are fixed when the graph is instantiated. A value that changes from replay
to replay is stored in a :class:`Payload` instead. ``GraphExec.set_payload`` sets the value for all
later launches; launches in flight keep the value that they were launched with. A value is released
as soon as no replay can read it, so frequent changes do not accumulate memory.
"""

from __future__ import annotations

from graft.cudagraph.errors import OptionError
from graft.native import _native


class Payload:
    """A per-replay value that is passed to host steps of one graph.

    Created by :meth:`Graph.payload` and changed by :meth:`GraphExec.set_payload`. Python work
    receives the value as its first argument. Native work receives it in place of ``data``: the
    value must then be an int, or an object with a ``host_ptr`` such as a pinned array.
    """

    def __init__(self, state: _native.GraphState, value: object, name: str) -> None:
        self.name = name
        self.state = state
        self.native = _native.PayloadCell(value, native_address(value))

    @property
    def live_values(self) -> int:
        """Number of stored values.

        These are the current value and the older values that launches in flight may still read.
        """
        return self.native.size

    def __repr__(self) -> str:
        return f"<Payload {self.name!r}, {self.live_values} live values>"


def native_address(value: object) -> int:
    """Return the address that native work receives for a payload value.

    The address is the value itself if it is an int, otherwise its ``host_ptr``. A value without
    ``host_ptr`` has the address 0. An int that is not a 64-bit address raises OptionError.
    """
    address = value if isinstance(value, int) else getattr(value, "host_ptr", 0)
    if not isinstance(address, int) or not -(1 << 63) <= address < 1 << 64:
        raise OptionError(
            f"payload value {value!r} is not a 64-bit address that native work can receive"
        )
    return address % (1 << 64)
