"""The nodes of a mailbox: its request and its wait, built together.

The wait descends from its request, and the request from everything that is on the lane before: a
worker can then never be asked for something that stands behind its own answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graft.cudagraph import nodes
from graft.cudagraph.hostwork import HostWork
from graft.cudagraph.kernels import PackedArgs
from graft.cudagraph.mailbox import ACK, GAVE_UP, REQUEST, Limits, Mailbox, MailboxWorker
from graft.cudagraph.memory import PinnedArray
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.graph import GraphLane

__all__ = ["add_mailbox"]

ONE = (1, 1, 1)


def add_mailbox(
    lane: GraphLane,
    work: HostWork,
    worker: MailboxWorker | None,
    limits: Limits,
    output: PinnedArray | None,
    name: str | None,
    *,
    spinning: bool = False,
) -> None:
    """Do what GraphLane.mailbox and GraphLane.spin say."""
    graph = lane.graph
    box = Mailbox(
        graph.device, work, graph.worker if worker is None else worker, limits,
        spinning=spinning, output=output,
    )  # fmt: skip
    title = name or box.item.title
    owners = (graph.status.owner, *box.owners)
    assert box.counter is not None
    request = box.kernels["mailbox_request"]
    asks = request.pack((box.counter, box.device_address(REQUEST)))

    def attach_port(handle: int) -> tuple:
        return box.attach(handle, graph.state, title, owners)

    def make_request(handle: int, after: list[Any], _: tuple) -> Any:
        return nodes.add_kernel(handle, after, request.function, ONE, ONE, 0, asks)

    def attach_owners(handle: int) -> tuple:
        return _native.attach_keep(handle, owners)

    def make_wait(handle: int, after: list[Any], _: tuple) -> Any:
        return nodes.add_answer_wait(handle, after, box.device_address(ACK))

    def make_spin(handle: int, after: list[Any], _: tuple) -> Any:
        return nodes.add_kernel(handle, after, wait.function, ONE, ONE, 0, waits)

    wait = box.kernels["mailbox_wait"]
    words = (box.device_address(ACK), box.device_address(GAVE_UP))
    waits: PackedArgs = wait.pack((box.counter, *words, int(limits.device_s * 1e9)))
    with graph.editing():
        ends = graph.end(lane.name)
        graph.add("request", f"request: {title}", lane.name, attach_port, make_request)
        try:
            make = make_spin if spinning else make_wait
            graph.add("wait", f"answer: {title}", lane.name, attach_owners, make)
        except BaseException:
            graph.undo(ends)
            raise
