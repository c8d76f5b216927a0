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

from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.llm.config import DFlashConfig
from graft.models.llm.kernel_library import ModelKernels
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderStack
from graft.models.llm.weights import Weights
from graft.sampling.loading import load, row_block

__all__ = ["Convolutions", "Selector"]


class Convolutions:
    """Of all layers, before and behind attention and MLP; for `rows` rows of all blocks."""

    def __init__(
        self, weights: Weights, config: DFlashConfig, kernels: ModelKernels, rows: int
    ) -> None:
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
        self._dynamic = kernels.device.empty((rows, columns), "float32")
        self._convolved = kernels.device.empty((rows, hidden), "float32")

    def run(
        self, lane: Lane, stack: DecoderStack, rows: Rows, attend_rows: Rows, row_stride: int
    ) -> None:
        """Run all layers of `stack` with convolutions, like `DecoderStack.run`.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        stack
            Decoder layers; overwrites ``stack.buffers.normed``.
        rows
            Rows of all blocks.
        attend_rows
            Rows that give the last position to attend to.
        row_stride
            Distance between consecutive rows of a block.
        """
        count = rows.count
        kernels = stack.kernels
        eps = stack.config.rms_norm_eps
        residual = stack.buffers.residual[:count]
        x = stack.buffers.normed[:count]
        dynamic = self._dynamic[:count]
        convolved = self._convolved[:count]

        def before(norm: DeviceArray, site: tuple[DeviceArray, DeviceArray]) -> None:
            base, projection = site
            kernels.norm(lane, residual, norm, eps, x)
            kernels.linear(lane, x, projection, dynamic, name="kernels")
            kernels.convolve(lane, x, base, dynamic, 0, row_stride, convolved)

        def after(site: tuple[DeviceArray, DeviceArray]) -> None:
            kernels.convolve(lane, x, site[0], dynamic, 1, row_stride, residual, residual)

        for layer, (attention_site, mlp_site) in enumerate(self._sites):
            weights = stack.layers[layer]
            before(weights.input_norm, attention_site)
            stack.attention(lane, layer, rows, convolved, x, attend_rows=attend_rows)
            after(attention_site)
            before(weights.post_norm, mlp_site)
            stack.mlp(lane, layer, convolved, x)
            after(mlp_site)


class Selector:
    """Scores the best ids of every level by the tokens before.

    Parameters
    ----------
    rows, nodes : of all levels, and of one; a tree has several nodes to a row.
    """

    def __init__(
        self, weights: Weights, config: DFlashConfig, kernels: ModelKernels, rows: int, nodes: int
    ) -> None:
        device = kernels.device
        vocab = config.vocab_size
        self._rank = config.selector_rank
        self._count = config.selector_top_k
        self._model_kernels = kernels
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
        self._model_kernels.linear(
            lane, normed, self._projection, self._hidden[:rows], name="selector"
        )
        lane.kernel(
            self._kernels["selector_best"],
            rows,
            self._block,
            [logits, vocab, self._count, best],
            name="best ids",
        )
        self._model_kernels.gather(
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
        self._model_kernels.gather(
            lane, self._predecessors, before, predecessor, name="predecessors"
        )
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
