"""DFlash2, which adds convolutions over the rows of a block and a candidate selector to DFlash.

A block is the group of rows from which one request drafts (module `dflash`). Every layer convolves
the input and the output of its attention and of its MLP along the rows of the block. The result for
a row depends on the row and on previous rows. The convolution kernel is the sum of two kernels: a
static kernel for each column, and a dynamic kernel that is computed from the row for each group of
columns. The context vectors are not convolved.

The selector makes the logits of a level depend on the previous draft. With u the logits of a row
and h its final hidden state, the k most likely ids x of the row get the scores

    u(x) + sum over r of predecessor[previous token]_r (W h)_r successor[x]_r

The drafts are sampled from the softmax of the scores, from left to right. All other ids get logits
so low that they are not sampled, in their original order. The grammar tests the k candidates first
(`Drafter.num_candidates`), and then the most likely of the other ids. The published selector does
not define scores for them.
"""

from __future__ import annotations

from typing import NamedTuple

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.llm.config import DFlashConfig
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderStack
from graft.models.llm.weights import Weights
from graft.sampling.loading import load, row_block

__all__ = ["Convolutions", "Selector"]


class _Convolution(NamedTuple):
    """Weights of the convolutions before and after one attention or MLP.

    Attributes
    ----------
    base
        float32[2, size, hidden], static kernels. Index 0 is the convolution before the attention or
        MLP, index 1 the convolution after it.
    projection
        [columns, hidden], matrix that computes the dynamic kernels of a row.
    """

    base: DeviceArray
    projection: DeviceArray

    @staticmethod
    def load(weights: Weights, prefix: str, config: DFlashConfig) -> _Convolution:
        size = config.conv_kernel_size
        hidden = config.hidden_size
        columns = _dynamic_columns(config)
        return _Convolution(
            weights.vector(f"{prefix}.base_kernel", 2, size, hidden),
            weights.matrix(f"{prefix}.kernel_projection.weight", columns, hidden),
        )


def _dynamic_columns(config: DFlashConfig) -> int:
    groups = config.hidden_size // config.conv_group_size
    return 2 * config.conv_kernel_size * groups


class Convolutions:
    """Convolutions before and after the attention and the MLP of all layers.

    Parameters
    ----------
    weights
        Source of the tensors.
    config
        Shape of the drafter.
    kernels
        Kernel library.
    max_rows
        Maximum number of rows in a call, over the blocks of all requests.
    """

    def __init__(
        self, weights: Weights, config: DFlashConfig, kernels: ModelKernels, max_rows: int
    ) -> None:
        self._layers = []
        for i in range(config.num_hidden_layers):
            attention = _Convolution.load(weights, f"layers.{i}.attention_conv", config)
            mlp = _Convolution.load(weights, f"layers.{i}.mlp_conv", config)
            self._layers.append((attention, mlp))
        self._dynamic = kernels.device.empty((max_rows, _dynamic_columns(config)), "float32")
        self._convolved = kernels.device.empty((max_rows, config.hidden_size), "float32")

    def run(
        self, lane: Lane, stack: DecoderStack, rows: Rows, attend_rows: Rows, row_stride: int
    ) -> None:
        """Run all layers of `stack` as `DecoderStack.run` does, and add the convolutions.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        stack
            Decoder layers; ``stack.buffers.normed`` is overwritten.
        rows
            Rows of all blocks.
        attend_rows
            The same rows for the attention kernel. Their ``pos`` is not the row's own position but
            the last position that the row attends to.
        row_stride
            Distance between consecutive rows of a block, in rows.
        """
        count = rows.count
        kernels = stack.kernels
        eps = stack.config.rms_norm_eps
        residual = stack.buffers.residual[:count]
        x = stack.buffers.normed[:count]
        dynamic = self._dynamic[:count]
        convolved = self._convolved[:count]

        def convolve_input(norm: DeviceArray, convolution: _Convolution) -> None:
            kernels.norms.rms_norm(lane, residual, norm, eps, x)
            kernels.products.linear(lane, x, convolution.projection, dynamic, name="kernels")
            kernels.elementwise.convolve(
                lane, x, convolution.base, dynamic, 0, row_stride, convolved
            )

        def convolve_output(convolution: _Convolution) -> None:
            base = convolution.base
            kernels.elementwise.convolve(lane, x, base, dynamic, 1, row_stride, residual, residual)

        for layer, (attention, mlp) in enumerate(self._layers):
            weights = stack.layers[layer]
            convolve_input(weights.input_norm, attention)
            stack.attention(lane, layer, rows, convolved, x, attend_rows=attend_rows)
            convolve_output(attention)
            convolve_input(weights.post_norm, mlp)
            stack.mlp(lane, layer, convolved, x)
            convolve_output(mlp)


class Selector:
    """Candidate selector: chooses the most likely ids of each row and scores them.

    Parameters
    ----------
    weights
        Source of the tensors.
    config
        Shape of the drafter.
    kernels
        Kernel library.
    rows
        Maximum number of rows, over all levels and requests.
    nodes
        Maximum number of nodes of one level. In a tree, several nodes use the logits of the same
        row.
    """

    def __init__(
        self, weights: Weights, config: DFlashConfig, kernels: ModelKernels, rows: int, nodes: int
    ) -> None:
        device = kernels.device
        vocab = config.vocab_size
        rank = config.selector_rank
        self._rank = rank
        self._count = config.selector_top_k
        self._model_kernels = kernels
        prefix = "candidate_selector"
        self._projection = weights.matrix(
            f"{prefix}.hidden_projection.weight", rank, config.hidden_size
        )
        self._predecessors = weights.matrix(f"{prefix}.predecessor_codebook", vocab, rank)
        self._successors = weights.matrix(f"{prefix}.successor_codebook", vocab, rank)
        self._hidden = device.empty((rows, rank), "float32")
        self._successor = device.empty((rows * self._count, rank), "float32")
        self._predecessor = device.empty((nodes, rank), "float32")
        self._best = device.zeros((rows * self._count,), "int32")
        self._block = row_block(device)
        self._kernels = load(device, "selector", self._block)

    def choose(self, lane: Lane, normed: DeviceArray, logits: DeviceArray) -> None:
        """Choose the candidates of every row.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        normed
            float32[R, hidden], final hidden states of all levels.
        logits
            float32[R, V], logits of all levels.
        """
        rows, vocab = logits.shape
        best = self._best[: rows * self._count]
        self._model_kernels.products.linear(
            lane, normed, self._projection, self._hidden[:rows], name="selector"
        )
        args = [logits, vocab, self._count, best]
        lane.kernel(self._kernels["selector_best"], rows, self._block, args, name="best ids")
        successor = self._successor[: rows * self._count]
        self._model_kernels.elementwise.gather(
            lane, self._successors, best, successor, name="successors"
        )

    def score(
        self, lane: Lane, logits: DeviceArray, level: int, batch: int, previous: DeviceArray
    ) -> None:
        """Score the logits of a level in place.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        logits
            float32[nodes, V]. In a tree, the logits of consecutive nodes come from the same row of
            the block.
        level
            Level, from 0.
        batch
            Number of requests.
        previous
            int32[nodes], token before each node.
        """
        nodes, vocab = logits.shape
        first = level * batch
        predecessor = self._predecessor[:nodes]
        self._model_kernels.elementwise.gather(
            lane, self._predecessors, previous, predecessor, name="predecessors"
        )
        args = [
            logits,
            vocab,
            nodes // batch,
            self._count,
            self._rank,
            self._best[first * self._count :],
            self._successor[first * self._count :],
            self._hidden[first:],
            predecessor,
        ]
        lane.kernel(self._kernels["selector_score"], nodes, self._block, args, name="select")
