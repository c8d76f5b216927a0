"""Drafts without a model: what followed the last tokens where they stood before.

Prompt lookup (Saxena, 2023): the longest suffix of a request's tokens that occurs earlier in it,
and the tokens behind that place. All on the device; the host knows nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.drafters.base import Drafter, DrafterRoom, TreeShape
from graft.models.feed import Feed
from graft.models.rows import Rows

__all__ = ["NGram"]

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "ngram.cu"
_BLOCK = 128


class NGram(Drafter):
    """Drafts from a request's own tokens, or from those of all requests.

    Parameters
    ----------
    longest, shortest : of the suffixes that are looked up, tokens.
    public : look in the tokens of every slot, those of requests that are over included. A
        request's drafts then depend on others; its tokens do not, or by rejection their law.
    oldest : of several places that fit as well, take the earliest; else the latest.

    Raises
    ------
    OptionError
        Unless ``1 <= shortest <= longest``.
    """

    def __init__(self, room: DrafterRoom, *, longest: int = 4, shortest: int = 1,
                 public: bool = False, oldest: bool = False):
        if not 1 <= shortest <= longest:
            raise OptionError(f"n-grams of {shortest} to {longest} tokens: 1 <= shortest <= "
                              "longest is needed")
        self.shape = TreeShape(room.drafts)
        self._options = (longest, shortest, int(public), int(oldest))
        self._history = room.device.from_host(np.full((room.slots, room.length), -1, np.int32))
        self._kernels = room.device.load(KERNELS)

    def prefill(
        self, lane: Lane, own: Rows, following: Rows | None, features: DeviceArray | None
    ) -> None:
        self._note(lane, own)

    def start(self, lane: Lane, feed: Feed) -> None:
        self._note(lane, feed.committed(lane, shift=1))
        slots, length = self._history.shape
        args = [feed.row_slot, feed.state.array, slots, self._history, length, self.shape.nodes,
                *self._options, feed.proposal]
        lane.kernel(self._kernels["propose_ngram"], feed.batch, _BLOCK, args, name="n-gram")

    def _note(self, lane: Lane, rows: Rows) -> None:
        args = [rows.token, rows.slot, rows.pos, rows.count, self._history, self._history.shape[1]]
        lane.kernel(self._kernels["note_tokens"], -(-rows.count // _BLOCK), _BLOCK, args,
                    name="note tokens")
