"""Graph of a generation loop: a WHILE node whose body is one round.

::

    loop begin - WHILE ( begin - target forward - verify - decide - publish - draft ... )

The body is the round of `RoundGraph` without grammar steps on the host, because the driver allows
no host nodes in the body of a WHILE node. A round counts as one *replay*, whether it is a launch of
its own or one iteration of a loop. After verification, the kernel ``decide`` chooses whether the
loop runs another replay. The results of the replay contain this decision. All replays of a loop
have the same batch rows. After a request has ended, its row is empty.
"""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import PinnedSlots, replay_word
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.conditional import Condition, condition, while_
from graft.cudagraph.graph.graph import GraphLane
from graft.models.drafters.feed import RoundScratch
from graft.models.round.round import RoundGraph, RoundResources
from graft.native import _native

__all__ = ["LOOP_ENTRIES", "LoopControl", "LoopGraph"]

#: Number of entries of the output ring of an engine with generation loops. A loop ends when all
#: entries but one contain results that the host has not read.
LOOP_ENTRIES = 64

_KERNELS = Path(__file__).parent / "kernels" / "loop.cu"
_THREADS = 32


class LoopControl:
    """State that all generation loops of an engine share.

    At most one loop of several replays runs at a time. A loop is identified by the number of its
    first replay.

    Parameters
    ----------
    device
        Device of the engine.
    max_batch
        Maximum number of batch rows.
    slack
        Number of positions, after a request's last possible position, to which drafts of a tree may
        write. The request needs pages for them, too.
    entries
        Number of entries of the output ring.

    Attributes
    ----------
    words
        Pinned words ``end_loop`` and ``released``, with which the host controls the running loop
        (kernels/loop.cu).
    rows
        Pinned field ``last``, int32 [entries, 1]: for each replay in the output ring, whether it is
        the last one of its loop.
    loop
        int32 [3] on the device: the struct ``Loop`` of kernels/loop.cu.
    row_slot, reserved
        int32 [max_batch] on the device: slot of each batch row, and number of positions for which
        this slot has pages.
    """

    def __init__(self, device: Device, max_batch: int, slack: int, entries: int):
        self.slack = slack
        self.words = PinnedSlots(
            device, 1, {"end_loop": ("int32", (1,)), "released": ("int32", (1,))}
        )
        self.rows = PinnedSlots(device, entries, {"last": ("int32", (1,))})
        self.loop: DeviceArray = device.zeros((3,), "int32")
        self.row_slot: DeviceArray = device.zeros((max_batch,), "int32")
        self.reserved: DeviceArray = device.zeros((max_batch,), "int32")

    def end(self, first: int) -> None:
        """Ask the loop that began with replay `first` to end."""
        _native.store_release_i32(self.words["end_loop"].host_ptr, replay_word(first))

    def release(self, replay: int) -> None:
        """Tell the device that the host has read the results of all replays up to `replay`."""
        _native.store_release_i32(self.words["released"].host_ptr, replay_word(replay))

    def is_last(self, replay: int) -> bool:
        """Return whether a replay is the last one of its loop.

        The results of the replay must have been published.
        """
        field = self.rows["last"]
        return bool(field.array[replay % field.slots, 0])

    def close(self) -> None:
        """Release the pinned memory."""
        self.words.close()
        self.rows.close()


class LoopGraph(RoundGraph):
    """Graph of a generation loop for one batch bucket and draft length.

    One launch runs many rounds.

    Parameters
    ----------
    resources, scratch, batch, drafts, max_new_drafts
        As in `RoundGraph`.
    control
        State that all generation loops share with each other and with the host.
    """

    def __init__(
        self,
        resources: RoundResources,
        scratch: RoundScratch,
        batch: int,
        drafts: int,
        max_new_drafts: int,
        control: LoopControl,
    ):
        self._control = control
        self._kernels = resources.device.load(_KERNELS)
        self._goes_on: Condition
        try:
            super().__init__(
                resources, scratch, batch, drafts, max_new_drafts, has_host_steps=False
            )
        except OptionError as error:
            raise OptionError(
                f"generation='graph' requires a drafter that runs on the device: {error}"
            ) from error

    @property
    def kind(self) -> str:
        """Kind of the graph: always "loop"."""
        return "loop"

    def _make_lanes(self) -> tuple[GraphLane, GraphLane]:
        """Add the WHILE node and return the lanes of its body."""
        graph = self.graphs[0]
        lane = graph.lane("loop")
        inputs = self.resources.inputs
        reserved = inputs["reserved"]
        max_rounds = inputs["max_rounds"]
        args = [
            self.resources.replay,
            *super()._input_args(),
            reserved,
            reserved.stride,
            max_rounds,
            max_rounds.stride,
            self.batch,
            self._control.loop,
            self._control.row_slot,
            self._control.reserved,
        ]
        lane.kernel(self._kernels["loop_begin"], 1, _THREADS, args, name="loop begin")
        self._goes_on = condition(graph, 1, name="another round")
        body = while_(lane, self._goes_on, name="rounds")
        return body.lane("model"), body.lane("grammar", urgent=True)

    def _input_args(self) -> list[object]:
        """Return the arguments of the kernel ``round_begin`` for its input ring.

        The host publishes inputs only once per loop, and ``loop_begin`` copies them to the device.
        In the body, ``round_begin`` therefore reads this copy as a ring with one entry. The stamp
        of the entry, which says for which replay it is valid, is the number of the loop's next
        replay.
        """
        control = self._control
        return [control.row_slot, self.batch, control.loop[1:], 1, 1]

    def _before_publishing(self) -> None:
        """Add the kernel that decides whether the loop runs another replay."""
        resources = self.resources
        control = self._control
        last = control.rows["last"]
        args = [
            resources.replay,
            control.row_slot,
            self.batch,
            resources.state.array,
            resources.state.slots,
            control.reserved,
            2 * resources.width,
            control.slack,
            control.words["end_loop"],
            control.words["released"],
            last,
            last.stride,
            last.slots,
            control.loop,
            self._goes_on,
        ]
        self._model.kernel(self._kernels["loop_decide"], 1, _THREADS, args, name="decide")
