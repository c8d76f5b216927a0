"""Prompt lookup on the device, which drafts the continuation of earlier occurrences of a suffix.

The kernels search the token histories directly, with one thread block per request. A history takes
4 bytes per token. A suffix automaton would find the same occurrences, but is not used, because
every new token would require a serial traversal of suffix links to keep its counts exact.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.driver.cstruct import read_numbers
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape
from graft.models.drafters.feed import Feed
from graft.models.llm.rows import Rows
from graft.native.errors import short_repr
from graft.sampling.kernels.loader import row_block
from graft.sampling.tree import TreePlan

__all__ = ["PromptLookup"]

_KERNELS = Path(__file__).resolve().parent / "kernels" / "lookup.cu"
_VOTES = read_numbers(_KERNELS)
_MAX_KEPT = 1 << 12
_MAX_LENGTH = (1 << 26) - 1
_MAX_FACTOR = 1e6


class PromptLookup(Drafter):
    """Base class of `NGram` and `Suffix`, which stores the tokens of every slot and searches them.

    The suffix of a request is the sequence of its last tokens. An occurrence is an earlier position
    at which the same sequence ends. To draft a tree, the search is repeated for every node, with
    the drafts on the path to the node at the end of the suffix.

    There are two ways to choose drafts. With votes, each occurrence votes for the token that
    follows it. The score of a draft is the product of the vote shares on its path, and the drafts
    with the greatest scores are chosen. Without votes, the tokens after the best occurrence are
    drafted, then those after the next best.

    Parameters
    ----------
    longest, shortest
        Maximum and minimum number of tokens of a suffix that is searched for.
    drafts
        Maximum number of drafts per request; None: as many as a round can verify.
    public
        Whether to search the histories of all requests, including finished ones. The drafts of a
        request then depend on other requests. Its output tokens do not, except with rejection
        sampling, where other requests may change the tokens, but not their distribution.
    kept
        Number of histories of finished requests that are kept when their slots are reused. Only
        used with `public`. The oldest kept history is replaced first. The histories are freed
        together with the engine.
    oldest
        Whether to choose the earliest of several equally good occurrences instead of the latest.
        Occurrences in the request's own history are always preferred.
    vote
        Which occurrences vote: none ("NONE"), all that match at least `shortest` tokens ("ALL"), or
        those of the longest suffix that occurs ("LONGEST").
    factor
        Maximum number of drafts, as a multiple of the number of tokens of the matched suffix.
    threshold
        Minimum score of a draft, from 0 to 1.

    Raises
    ------
    OptionError
        If an option is out of range.
    """

    lookahead = 1

    def __init__(
        self,
        context: DrafterContext,
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
        drafts = context.max_drafts if drafts is None else drafts
        name = type(self).__name__
        for option, value, kind, low, high in (
            ("max_length", context.max_length, int, 1, _MAX_LENGTH),
            ("longest", longest, int, 1, _MAX_LENGTH),
            ("shortest", shortest, int, 1, longest),
            ("drafts", drafts, int, 1, context.max_drafts),
            ("kept", kept, int, 0, _MAX_KEPT),
            ("factor", factor, int | float, 0, _MAX_FACTOR),
            ("threshold", threshold, int | float, 0, 1),
        ):
            if not isinstance(value, kind) or not low <= value <= high:
                raise OptionError(
                    f"{name}: {option} is {short_repr(value)}, must be from {low} to {high}"
                )
        branch, levels, paths = context.tree or TreePlan(1, context.max_drafts)
        if paths:
            raise OptionError(f"{name}: draft_tree must be (branch, levels), not a list of paths")
        self.shape = TreeShape(context.max_drafts, branch=branch)
        self._slots = context.slots
        self._kept = kept if public else 0
        size = (context.slots + self._kept, context.max_length)
        self._histories = context.device.from_host(np.full(size, -1, np.int32))
        self._next_kept = context.device.zeros((1,), "int32")
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
        counts_votes = vote != "NONE" or branch > 1
        vocab = context.target.config.vocab_size if counts_votes else 1
        self._votes = context.device.zeros((context.slots, vocab), "int32")
        self._kernels = context.device.load(_KERNELS)
        self._block = row_block(context.device)

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        self._record(lane, rows)

    def resume(self, lane: Lane, rows: Rows) -> None:
        self._record(lane, rows)

    def start(self, lane: Lane, feed: Feed) -> None:
        self._record(lane, feed.committed(lane, shift=1))
        if feed.width == 1:
            return
        args = [
            feed.row_slot,
            feed.state.array,
            self._histories,
            *self._histories.shape,
            *self._options,
            self._votes.shape[1],
            self._votes,
            self.shape.nodes,
            feed.proposal,
            feed.parents,
        ]
        lane.kernel(self._kernels["propose_drafts"], feed.batch, self._block, args, name="look up")

    def _record(self, lane: Lane, rows: Rows) -> None:
        """Add a kernel that stores the tokens of `rows` in the token histories of their slots."""
        args = [
            rows.token,
            rows.slot,
            rows.pos,
            rows.count,
            self._histories,
            self._histories.shape[1],
            self._slots,
            self._kept,
            self._next_kept,
        ]
        lane.kernel(self._kernels["record_tokens"], 1, self._block, args, name="record tokens")
