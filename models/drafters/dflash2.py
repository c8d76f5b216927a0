"""What DFlash2 adds to DFlash: convolutions over the rows of a block, and a selector.

A layer convolves what its attention and its MLP read and what they make: each row with those before
it in the block, by a kernel that is the sum of one of each column and of one that the row makes for
a group of columns. The context goes through none.

The selector makes a level depend on the one before. With u the logits of a row and h its output,
its k best ids x get the scores u(x) + sum over r of predecessor[token before]_r (W h)_r
successor[x]_r, and drafts are drawn of these by softmax, left to right. All other ids keep their
order, so far below that chance does not find them; where a grammar takes all k, the best of the
others is drafted, for which the published selector has no score.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.cache.kv import PagedKV
from graft.models.llm.config import DFlashConfig, LlamaConfig
from graft.models.llm.layers import Layers
from graft.models.llm.llama import DecoderLayer, Scratch, attend, feed_forward
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Weights
from graft.sampling.loading import load, row_block

__all__ = ["Convolutions", "Selector"]


class Convolutions:
    """Of all layers, before and behind attention and MLP; for `rows` rows of all blocks."""

    def __init__(self, weights: Weights, config: DFlashConfig, layers: Layers, rows: int) -> None:
        size = config.conv_kernel_size
        hidden = config.hidden_size
        columns = 2 * size * (hidden // config.conv_group_size)
        self._sites = [
            [
                (
                    weights.vector(f"layers.{i}.{name}_conv.base_kernel", 2, size, hidden),
                    weights.matrix(
                        f"layers.{i}.{name}_conv.kernel_projection.weight", columns, hidden
                    ),
                )
                for name in ("attention", "mlp")
            ]
            for i in range(config.num_hidden_layers)
        ]
        self._dynamic = layers.device.empty((rows, columns), "float32")
        self._convolved = layers.device.empty((rows, hidden), "float32")

    def run_layers(
        self,
        apart: int,
        lane: Lane,
        layers: Layers,
        config: LlamaConfig,
        decoder: Sequence[DecoderLayer],
        scratch: Scratch,
        kv: PagedKV,
        turn: DeviceArray,
        rows: Rows,
        x: DeviceArray,
        attending: Rows,
    ) -> None:
        """`llama.run_layers` of blocks whose rows are so far apart; overwrites `x`."""
        n = rows.count
        eps = config.rms_norm_eps
        stream = scratch.stream[:n]
        dynamic = self._dynamic[:n]
        convolved = self._convolved[:n]

        def convolve(site: tuple[DeviceArray, DeviceArray]) -> None:
            layers.linear(lane, x, site[1], dynamic, name="kernels")
            layers.convolve(lane, x, site[0], dynamic, 0, apart, convolved)

        for i, (weights, (of_attention, of_mlp)) in enumerate(
            zip(decoder, self._sites, strict=True)
        ):
            layers.norm(lane, stream, weights.input_norm, eps, x)
            convolve(of_attention)
            attend(
                lane,
                layers,
                config,
                weights,
                scratch,
                kv,
                i,
                turn,
                rows,
                convolved,
                x,
                attending=attending,
            )
            layers.convolve(lane, x, of_attention[0], dynamic, 1, apart, stream, stream)
            layers.norm(lane, stream, weights.post_norm, eps, x)
            convolve(of_mlp)
            feed_forward(lane, layers, weights, scratch, convolved, x)
            layers.convolve(lane, x, of_mlp[0], dynamic, 1, apart, stream, stream)


class Selector:
    """Scores the best ids of every level by the tokens before.

    Parameters
    ----------
    rows, nodes : of all levels, and of one; a tree has several nodes to a row.
    """

    def __init__(
        self, weights: Weights, config: DFlashConfig, layers: Layers, rows: int, nodes: int
    ) -> None:
        device = layers.device
        vocab = config.vocab_size
        self._rank = config.selector_rank
        self._count = config.selector_top_k
        self._layers = layers
        self._projection, self._predecessors, self._successors = (
            weights.matrix(f"candidate_selector.{name}", size, columns)
            for name, size, columns in (
                ("hidden_projection.weight", self._rank, config.hidden_size),
                ("predecessor_codebook", vocab, self._rank),
                ("successor_codebook", vocab, self._rank),
            )
        )
        self._hidden, self._successor, self._predecessor = (
            device.empty((count, self._rank), "float32")
            for count in (rows, rows * self._count, nodes)
        )
        self._best = device.zeros((rows * self._count,), "int32")
        self._block = row_block(device)
        self._kernels = load(device, "selector", self._block)

    def choose(self, lane: Lane, normed: DeviceArray, logits: DeviceArray) -> None:
        """What every row selects from: outputs [R, hidden] and logits [R, V] of all levels."""
        rows, vocab = logits.shape
        best = self._best[: rows * self._count]
        self._layers.linear(lane, normed, self._projection, self._hidden[:rows], name="selector")
        lane.kernel(
            self._kernels["selector_best"],
            rows,
            self._block,
            [logits, vocab, self._count, best],
            name="best ids",
        )
        self._layers.gather(
            lane, self._successors, best, self._successor[: rows * self._count], name="successors"
        )

    def score(
        self, lane: Lane, logits: DeviceArray, level: int, batch: int, before: DeviceArray
    ) -> None:
        """Score a level's logits in place, given the token before each of their rows, of which a
        tree has several, by turns, to one of the block."""
        nodes, vocab = logits.shape
        first = level * batch
        k = self._count
        predecessor = self._predecessor[:nodes]
        self._layers.gather(lane, self._predecessors, before, predecessor, name="predecessors")
        args = [
            logits,
            vocab,
            nodes // batch,
            k,
            self._rank,
            self._best[first * k :],
            self._successor[first * k :],
            self._hidden[first:],
            predecessor,
        ]
        lane.kernel(self._kernels["selector_score"], nodes, self._block, args, name="select")
