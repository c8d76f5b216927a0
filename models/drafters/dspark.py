"""DSpark (arXiv 2607.05147), a block drafter with a Markov head.

To the logits of each level, the Markov head adds logits that depend on the previous draft.
"""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import DrafterContext
from graft.models.drafters.block import BlockDrafter
from graft.models.drafters.feed import Feed
from graft.models.llm.weights import Weights

__all__ = ["DSpark"]


class DSpark(BlockDrafter):
    """Drafter that adds ``w2 @ w1[previous token]`` to the logits of a single forward pass.

    The folder has the tensors of a `DFlash` folder and ``markov_head.*``.
    """

    kind = "DSpark"

    def _load_extras(self, weights: Weights, context: DrafterContext, nodes: int) -> None:
        vocab = self._config.vocab_size
        rank = self._config.markov_rank
        self._w1 = weights.matrix("markov_head.markov_w1.weight", vocab, rank)
        self._w2 = weights.matrix("markov_head.markov_w2.weight", vocab, rank)
        self._previous = context.device.empty((nodes, rank), "float32")

    def _adjust_level(
        self, lane: Lane, feed: Feed, level: int, logits: DeviceArray, previous: DeviceArray
    ) -> None:
        rows = self._previous[: logits.shape[0]]
        self._kernels.elementwise.gather(lane, self._w1, previous, rows, name="draft before")
        self._kernels.products.linear(
            lane, rows, self._w2, logits, residual=logits, name="markov head"
        )
