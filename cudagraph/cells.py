"""Payloads that change between replays without touching a graph.

A node's parameters belong to the graph; what changes from replay to replay lives in a
:class:`Cell`. An executable sets its value for the launches from then on; launches in flight keep
the one they had. A value goes as soon as no replay can ask for it, so a million changes weigh
nothing.
"""

from __future__ import annotations

from graft.cudagraph.errors import OptionError
from graft.native import _native


class Cell:
    """A value that host steps of one graph get; see :meth:`Graph.cell` and ``GraphExec.set``.

    Python work gets it as its first argument, native work its address in place of ``data``: an int,
    or the host address of pinned memory.
    """

    def __init__(self, state: _native.GraphState, value: object, name: str) -> None:
        self.name = name
        self.state = state
        self.native = _native.PayloadCell(value, address_of(value))

    @property
    def held(self) -> int:
        """Values held now: the present one and those that launches in flight may ask for."""
        return self.native.size

    def __repr__(self) -> str:
        return f"<Cell {self.name!r}, {self.held} values>"


def address_of(value: object) -> int:
    """Return what native work gets for a value; 0 for what only Python can use."""
    address = value if isinstance(value, int) else getattr(value, "host_ptr", 0)
    if not isinstance(address, int) or not -(1 << 63) <= address < 1 << 64:
        raise OptionError(f"{value!r} is no address that native work could get")
    return address % (1 << 64)
