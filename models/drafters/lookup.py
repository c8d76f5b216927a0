"""Drafts without a model: what followed the last tokens where they stood before.

All on the device; the host knows nothing of it. The texts themselves are searched, by a block of
threads per request: it takes 4 bytes a token, and finds what a suffix automaton would, whose exact
counts cost a serial walk of its links for every token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.cstruct import read_numbers
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape
from graft.models.drafters.feed import Feed
from graft.models.llm.rows import Rows
from graft.sampling.loading import row_block
from graft.sampling.tree import TreePlan

__all__ = ["PromptLookup"]

_KERNELS = Path(__file__).resolve().parent / "kernels" / "lookup.cu"
_VOTES = read_numbers(_KERNELS)
_MOST_KEPT = 1 << 12
_MOST_LENGTH = (1 << 26) - 1
_MOST_DRAFTED = 1e6


class PromptLookup(Drafter):
    """Base of `NGram` and `Suffix`: keeps what every slot said, and looks suffixes up in it.

    Of a tree every node is looked up, with the drafts down to it behind the suffix. Where places
    vote, the drafts are those of the greatest products of shares; else the best places are followed
    one behind the other.

    Parameters
    ----------
    longest, shortest : of the suffixes that are looked up, tokens.
    drafts : most drafts at once; default as many as a round has.
    public : look in the texts of all requests, also of those that are over. A request's drafts then
        depend on others; its tokens do not, or by rejection their law.
    kept : with `public`, requests whose texts are kept once their slot has been given to another;
        one more takes the place of the oldest. They go with the engine.
    oldest : of several places that count alike, take the earliest; else the latest. The request's
        own text comes before others'.
    vote : "NONE", "ALL" or "LONGEST", see kernels/texts.cu.
    factor : most drafts per token that fits.
    threshold : of the product of the drafts' shares, between 0 and 1.

    Raises
    ------
    OptionError
        Naming the option that is out of range.
    """

    lookahead = 1

    def __init__(
        self,
        room: DrafterContext,
        *,
        longest: int,
        shortest: int,
        drafts: int | None,
        public: bool,
        kept: int,
        oldest: bool,
        vote: str,
        factor: float,
        threshold: float,
    ):
        drafts = room.drafts if drafts is None else drafts
        for option, value, kind, low, high in (
            ("max_length", room.length, int, 1, _MOST_LENGTH),
            ("longest", longest, int, 1, _MOST_LENGTH),
            ("shortest", shortest, int, 1, longest),
            ("drafts", drafts, int, 1, room.drafts),
            ("kept", kept, int, 0, _MOST_KEPT),
            ("factor", factor, int | float, 0, _MOST_DRAFTED),
            ("threshold", threshold, int | float, 0, 1),
        ):
            if not isinstance(value, kind) or not low <= value <= high:
                raise OptionError(
                    f"{type(self).__name__}: {option} is {value!r}, must be from {low} to {high}"
                )
        branch, levels, paths = room.tree or TreePlan(1, room.drafts)
        if paths:
            raise OptionError(f"{type(self).__name__}: draft_tree is to be (branch, levels)")
        self.shape = TreeShape(room.drafts, branch=branch)
        self._slots = room.slots
        self._kept = kept * public
        size = (room.slots + self._kept, room.length)
        self._texts = room.device.from_host(np.full(size, -1, np.int32))
        self._begun = room.device.zeros((1,), "int32")
        self._options = (
            longest,
            shortest,
            int(public),
            int(oldest),
            _VOTES[f"VOTE_{vote}"],
            drafts,
            float(factor),
            float(threshold),
            branch,
            levels,
        )
        vocab = 1 if vote == "NONE" and branch == 1 else room.target.config.vocab_size
        self._votes = room.device.zeros((room.slots, vocab), "int32")
        self._kernels = room.device.load(_KERNELS)
        self._block = row_block(room.device)

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        self._note(lane, own)

    def resume(self, lane: Lane, own: Rows) -> None:
        self._note(lane, own)

    def start(self, lane: Lane, feed: Feed) -> None:
        self._note(lane, feed.committed(lane, shift=1))
        if feed.width == 1:
            return
        args = [
            feed.row_slot,
            feed.state.array,
            self._texts,
            *self._texts.shape,
            *self._options,
            self._votes.shape[1],
            self._votes,
            self.shape.nodes,
            feed.proposal,
            feed.parents,
        ]
        lane.kernel(self._kernels["propose_texts"], feed.batch, self._block, args, name="look up")

    def _note(self, lane: Lane, rows: Rows) -> None:
        args = [
            rows.token,
            rows.slot,
            rows.pos,
            rows.count,
            self._texts,
            self._texts.shape[1],
            self._slots,
            self._kept,
            self._begun,
        ]
        lane.kernel(self._kernels["note_tokens"], 1, self._block, args, name="note tokens")
