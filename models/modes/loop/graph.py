"""Graph of a generation loop: a WHILE node whose body is one round.

::

    loop_begin - WHILE ( begin - target forward - verify - decide - publish - draft ... )

The round of the body is that of `RoundGraph`. Steps of the grammar on the host are mailboxes with
spinning kernels, because the driver allows no host nodes in the body. After verification, the
kernel ``decide`` chooses whether the loop runs another replay. The results of the replay contain
this decision. All replays of a loop have the same batch rows. A request that ends
leaves its row empty.
"""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.conditional import Condition, condition, while_
from graft.cudagraph.graph.graph import GraphLane
from graft.models.drafters.feed import RoundScratch
from graft.models.modes.loop.control import LoopControl
from graft.models.round.round import RoundGraph, RoundParts

__all__ = ["GenerationGraph"]

_KERNELS = Path(__file__).parent / "kernels" / "loop.cu"
_THREADS = 32
_NO_LIMIT = 2**31 - 1


class GenerationGraph(RoundGraph):
    """Rounds of one batch bucket and draft length that one launch repeats.

    Parameters
    ----------
    parts, scratch, batch, drafts, made
        As in `RoundGraph`.
    control
        Words that host and device share.
    grammar
        Where the grammar steps run: one of `GRAMMAR_STEPS`, or "none" without grammar steps.
    max_rounds
        Maximum number of replays of a loop; None sets no limit.
    """

    repeats = True

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return "loop"

    def __init__(
        self,
        parts: RoundParts,
        scratch: RoundScratch,
        batch: int,
        drafts: int,
        made: int,
        control: LoopControl,
        grammar: str = "none",
        max_rounds: int | None = None,
    ):
        self._control = control
        self._max_rounds = _NO_LIMIT if max_rounds is None else max_rounds
        self._kernels = parts.device.load(_KERNELS)
        self._goes_on: Condition
        try:
            super().__init__(parts, scratch, batch, drafts, made, grammar)
        except OptionError as error:
            raise OptionError(
                f"generation='graph' requires a drafter that runs on the device: {error}"
            ) from error

    def _make_lanes(self) -> tuple[GraphLane, GraphLane]:
        """Add the WHILE node and return the lanes of its body."""
        graph = self.graphs[0]
        lane = graph.lane("loop")
        parts = self.parts
        args = [
            parts.replay,
            *super()._input_args(),
            self.batch,
            self._control.inputs["unguided"],
            parts.state.array,
            parts.state.slots,
            parts.exchange.memory,
            parts.exchange.layout,
            self._control.loop,
            self._control.row_slot,
        ]
        lane.kernel(self._kernels["loop_begin"], 1, _THREADS, args, name="loop begin")
        self._goes_on = condition(graph, 1, name="another round")
        body = while_(lane, self._goes_on, name="rounds")
        return body.lane("model"), body.lane("grammar")

    def _input_args(self) -> list[object]:
        """Return the input ring of the body: one entry, which is stamped with the next replay."""
        control = self._control
        return [control.row_slot, self.batch, control.loop[1:], 1, 1]

    def _before_publishing(self) -> None:
        """Add the kernel that decides whether the loop runs another replay."""
        parts = self.parts
        control = self._control
        last = control.rows["last"]
        args = [
            parts.replay,
            control.row_slot,
            self.batch,
            parts.state.array,
            parts.state.slots,
            control.inputs["reserved"],
            2 * parts.width,
            control.slack,
            self._max_rounds,
            control.words["end_loop"],
            control.words["released"],
            last,
            last.stride,
            last.slots,
            control.loop,
            self._goes_on,
        ]
        self._model.kernel(self._kernels["loop_decide"], 1, _THREADS, args, name="decide")
