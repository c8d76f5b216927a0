"""Optimistic mask rows: tokens are sampled without masks, and the grammar checks them.

Filling a mask row takes much longer than testing one token. In an *optimistic* graph, the mask rows
of most requests are therefore not filled. Their tokens are sampled without masks, and the grammar
checks them before verification. If a token is illegal, its mask row is filled, and the token is
sampled again::

    model    ... target forward - sample - publish -         - sample rejected tokens - verify ...
    grammar                                         `- check -^

Greedy and coupled sampling select the legal token with the highest score. If the best of all tokens
is legal, it is also the best of the legal ones, so outputs do not change.
"""

from __future__ import annotations

from graft.cudagraph.graph.graph import GraphLane
from graft.models.drafters.feed import Feed
from graft.models.modes.automaton_steps import MixedSteps
from graft.models.round.grammar_steps import GrammarSteps
from graft.models.round.timing import Stamps
from graft.sampling.sampler import Sampler

__all__ = ["OptimisticMixedSteps", "OptimisticSteps"]


class OptimisticSteps(GrammarSteps):
    """Adds host work, and checks the tokens that were sampled without masks."""

    def add_before_verification(
        self,
        model_lane: GraphLane,
        grammar_lane: GraphLane,
        sampler: Sampler,
        feed: Feed,
        stamps: Stamps,
    ) -> None:
        """Add the check of sampled tokens, and the sampling of rejected ones.

        The mask rows of rejected tokens are not copied to the device: few rows are rejected, and
        kernels read these rows from host memory.
        """
        sampler.publish_sampled(model_lane, feed.rows)
        stamps.end("sample")
        grammar_lane.wait(model_lane.record("tokens are sampled"))
        self._decoder.add(grammar_lane, self._decoder.check_work(), name="check")
        model_lane.wait(grammar_lane.record("check: done"))
        stamps.end("wait for check", "check")
        sampler.resample(model_lane, feed.scratch.logits[: feed.count], feed.rows)


class OptimisticMixedSteps(OptimisticSteps, MixedSteps):
    """Adds the steps of `MixedSteps`, and checks the tokens of requests that are not promoted."""
