"""DFlash2, a block drafter with convolutions over the rows of a block and a candidate selector.

A block is the group of rows from which one request drafts (module `block`). Every layer convolves
the input and the output of its attention and of its MLP along the rows of the block. The result for
a row depends on the row and on previous rows. The convolution kernel is the sum of two kernels: a
static kernel for each column, and a dynamic kernel that is computed from the row for each group of
columns. The context vectors are not convolved.

The selector makes the logits of a level depend on the previous draft. With u the logits of a row
and h its final hidden state, the k most likely ids x of the row get the scores

    u(x) + sum over r of predecessor[previous token]_r (W h)_r successor[x]_r

The drafts are sampled from the softmax of the scores, from left to right. The published selector
defines no scores for the other ids. Here they get logits so low that they are not sampled, but keep
their relative order. The grammar tests the k candidates first (`Drafter.num_candidates`), and then
the most likely of the other ids.
"""

from __future__ import annotations

from typing import NamedTuple

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import DrafterContext
from graft.models.drafters.block import BlockDrafter
from graft.models.drafters.feed import Feed
from graft.models.llm.config import DFlashConfig
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderStack
from graft.models.llm.weights import Weights
from graft.sampling.kernels.loader import load, row_block

__all__ = ["DFlash2"]


class DFlash2(BlockDrafter):
    """Block drafter with convolutions and a candidate selector, as the module docstring describes.

    The folder has the tensors of a `DFlash` folder, ``candidate_selector.*`` and, in every layer,
    ``attention_conv.*`` and ``mlp_conv.*``.
    """

    kind = "DFlash2"

    def _load_extras(self, weights: Weights, context: DrafterContext, nodes: int) -> None:
        config = self._config
        self.num_candidates = config.selector_top_k
        level_rows = context.slots * len(self.shape.levels)
        self._convolutions = _Convolutions(weights, config, self._kernels, context.max_rows)
        self._selector = _Selector(weights, config, self._kernels, level_rows, nodes)

    def _run_layers(self, lane: Lane, batch: int, rows: Rows, attend_rows: Rows) -> None:
        self._embed(lane, rows, None)
        self._convolutions.run(lane, self._stack, rows, attend_rows, batch)

    def _choose_candidates(self, lane: Lane, normed: DeviceArray, logits: DeviceArray) -> None:
        self._selector.choose(lane, normed, logits)

    def _adjust_level(
        self, lane: Lane, feed: Feed, level: int, logits: DeviceArray, previous: DeviceArray
    ) -> None:
        self._selector.score(lane, logits, level, feed.batch, previous)


class _Convolution(NamedTuple):
    """Weights of the two convolutions around an attention or MLP: 0 before it, 1 after it.

    The coefficients of a convolution are the sum of static ones, in `base`, and dynamic ones, which
    the matrix `projection` computes from the hidden state of a row.
    """

    base: DeviceArray  # float32[2, size, hidden], static kernels
    projection: DeviceArray  # [columns, hidden]

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


class _Convolutions:
    """Convolutions before and after the attention and the MLP of all layers.

    `max_rows` is the maximum number of rows of a forward pass: the blocks of all requests.
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
        """Run all layers of `stack`, with a convolution before and after each attention and MLP.

        `rows` and `attend_rows` are as in `DecoderStack.run`. Rows are ordered by level and then by
        request, so two consecutive levels of a request are `row_stride` rows apart. The buffer
        ``stack.buffers.normed`` is overwritten.
        """
        count = rows.count
        kernels = stack.kernels
        eps = stack.config.rms_norm_eps
        residual = stack.buffers.residual[:count]
        plan = stack.plan_attention(lane, attend_rows)
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
            stack.attention(lane, layer, rows, convolved, x, plan)
            convolve_output(attention)
            convolve_input(weights.post_norm, mlp)
            stack.mlp(lane, layer, convolved, x)
            convolve_output(mlp)


class _Selector:
    """Candidate selector: chooses the most likely ids of each row of logits and scores them.

    `rows` is the maximum number of rows of logits: levels times requests. `nodes` is the maximum
    number of draft-tree nodes of one level, of all requests together; it is greater than the number
    of requests if several nodes of a request use the logits of one row.
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
        """Choose the most likely ids of each row of logits as its candidates, for calls of `score`.

        `normed` float32[R, hidden] contains the final hidden states, and `logits` float32[R, V] the
        logits. Both have one row per level and request.
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
        """Replace the logits of a level (from 0) with the scores of the candidates from `choose`.

        The module docstring defines the scores. `logits` is float32[nodes, V]. In a tree, the nodes
        of a request are consecutive rows, and their logits are equal before the call. `previous`
        int32[nodes] contains the token before each node.
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
