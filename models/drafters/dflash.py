"""Block drafters, which compute the logits of all drafts in one forward pass.

There are three kinds:

* DFlash (arXiv 2602.06036).
* DFlash2, which adds convolutions and a candidate selector (module `dflash2`).
* DSpark (arXiv 2607.05147), which adds a Markov head. Its logits depend on the previous draft.

The input of the forward pass is a block of rows: the last committed token, followed by mask tokens.
The rows of a block attend to each other and to a context. The context has one vector per committed
position: norm(fc x), where x is the concatenation of the outputs of some layers of the target.
Every layer of the drafter computes keys and values of the context, with the same projection weights
as for the rows of the block, and stores these keys and values in the drafter's KV cache. A row of
DFlash predicts the token at its own position, so the first row, whose token is already known,
predicts nothing. A row of DSpark predicts the next token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape, check_target
from graft.models.drafters.dflash2 import Convolutions, Selector
from graft.models.drafters.feed import Feed
from graft.models.errors import DrafterError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import DFlashConfig
from graft.models.llm.kernels.operands import KVWrite
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack
from graft.models.llm.weights import Weights
from graft.sampling.sampler import DraftVocab

__all__ = ["DFlash"]

KERNELS = Path(__file__).resolve().parent / "kernels" / "dflash.cu"
_BLOCK = 64


class DFlash(Drafter):
    """Drafter that drafts level by level from logits of a single forward pass.

    The logits of DFlash do not depend on the drafts, so `logits_at_once` is set.

    Parameters
    ----------
    folder
        A folder with config.json and tensors with the published names. All kinds have ``fc``,
        ``hidden_norm``, ``layers.{i}.*`` and ``norm``. ``embed_tokens`` and ``lm_head`` are needed
        only if they differ from the target's. DSpark adds ``markov_head.*``. DFlash2 adds
        ``candidate_selector.*`` and, in every layer, ``attention_conv.*`` and ``mlp_conv.*``. A
        confidence head is ignored.
    context
        Arguments from the engine.

    Raises
    ------
    CheckpointError
        If tensors are missing or do not match the config.
    ConfigError
        If the config is invalid, the drafter was made for another target, or its sliding window
        is shorter than the engine's max_length.
    """

    lookahead = 1
    feeds_blocks = True

    def __init__(self, folder: Path, context: DrafterContext) -> None:
        config = DFlashConfig.from_dir(folder).for_length(context.max_length, folder)
        device = context.device
        target = context.target
        rows = context.max_rows
        check_target(
            target,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_target_layers,
        )
        self._config = config
        self._kernels = target.kernels
        self.feature_layers = config.target_layer_ids
        self.vocab = DraftVocab(config.vocab_size)
        self.shape = _draft_shape(config, context)
        nodes = context.slots * self.shape.branch
        level_rows = context.slots * len(self.shape.levels)
        weights = Weights(device, Checkpoint(folder))
        layers = self._load(weights, target)
        self._convolutions = None
        self._selector = None
        if config.selector_rank:
            self.num_candidates = config.selector_top_k
            self._convolutions = Convolutions(weights, config, self._kernels, rows)
            self._selector = Selector(weights, config, self._kernels, level_rows, nodes)
        self.logits_at_once = not (config.markov_rank or config.selector_rank)
        weights.finish(("rotary_emb.inv_freq", "confidence_head."))
        heads = config.num_key_value_heads
        dim = config.head_dim
        self._kv = context.make_cache(config.num_hidden_layers, heads, dim, config.dtype)
        self.caches = (self._kv,)
        self._stack = DecoderStack(self._kernels, config, layers, self._kv, max_rows=rows)
        self._context_kv = device.empty((rows, 2 * heads * dim), "float32")
        self._previous = device.empty((nodes, max(config.markov_rank, 1)), "float32")
        row_of_node = np.arange(nodes, dtype=np.int32) // self.shape.branch
        self._row_of_node = device.from_host(row_of_node)
        # The rows of this array are token, slot, position and last attended position.
        self._block = device.zeros((4, rows), "int32")
        self._block_rows = device.load(KERNELS)["block_rows"]

    def _load(self, weights: Weights, target: LlamaModel) -> list[DecoderLayer]:
        """Upload the tensors, except those of DFlash2, and return the decoder layers."""
        config = self._config
        hidden = config.hidden_size
        vocab = config.vocab_size
        rank = config.markov_rank
        self._embedding = target.embedding
        if "embed_tokens.weight" in weights.checkpoint:
            self._embedding = weights.matrix("embed_tokens.weight", vocab, hidden)
        self._head = target.lm_head
        if "lm_head.weight" in weights.checkpoint:
            self._head = weights.matrix("lm_head.weight", vocab, hidden)
        self._fc = weights.matrix("fc.weight", hidden, len(self.feature_layers) * hidden)
        self._context_norm = weights.vector("hidden_norm.weight", hidden)
        layers = [
            DecoderLayer.load(weights, f"layers.{i}", config, hidden, self._kernels)
            for i in range(config.num_hidden_layers)
        ]
        self._norm = weights.vector("norm.weight", hidden)
        self._markov: tuple[DeviceArray, DeviceArray] | None = None
        if rank:
            w1 = weights.matrix("markov_head.markov_w1.weight", vocab, rank)
            w2 = weights.matrix("markov_head.markov_w2.weight", vocab, rank)
            self._markov = (w1, w2)
        return layers

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        self._write_context(lane, next_rows, features)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        self._write_context(lane, feed.committed(lane), feed.features)
        if feed.width == 1:
            return None
        config = self._config
        kernels = self._kernels
        batch = feed.batch
        rows, attend_rows = self._lay_out_block(lane, feed)
        count = rows.count
        self._run_layers(lane, batch, rows, attend_rows)
        residual = self._stack.buffers.residual[:count]
        normed = self._stack.buffers.normed[:count]
        kernels.norms.rms_norm(lane, residual, self._norm, config.rms_norm_eps, normed)
        first = config.first_row * batch
        # The round no longer needs the logits of the target. Their buffer, which is large enough,
        # is reused for the logits of the drafter.
        logits = feed.scratch.logits[: count - first]
        kernels.products.linear(lane, normed[first:], self._head, logits, name="draft head")
        factor = config.output_multiplier
        cap = config.final_logit_softcapping
        if factor != 1 or cap:
            kernels.elementwise.scale(lane, logits, factor, cap)
        if self._selector:
            self._selector.choose(lane, normed[first:], logits)
        return self._level(lane, feed, 0, rows.token[:batch])

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        previous = None if self.logits_at_once else feed.drafts(lane, level).token
        return self._level(lane, feed, level, previous)

    def all_levels(self, feed: Feed) -> DeviceArray:
        return feed.scratch.logits[: len(self.shape.levels) * feed.batch]

    def _lay_out_block(self, lane: Lane, feed: Feed) -> tuple[Rows, Rows]:
        """Lay out the rows of the blocks of all requests.

        Returns
        -------
        rows : Rows
            Rows of the blocks with their tokens and positions.
        attend_rows : Rows
            The same rows, but the position of each row is the last position that it attends to,
            which is the end of its block.
        """
        config = self._config
        width = config.first_row + len(self.shape.levels)
        count = width * feed.batch
        token = self._block[0][:count]
        slot = self._block[1][:count]
        pos = self._block[2][:count]
        last = self._block[3][:count]
        args = [
            feed.row_slot,
            feed.state.array,
            feed.sampler.rows,
            feed.sampler.row_words,
            feed.batch,
            width,
            config.mask_token_id,
            token,
            slot,
            pos,
            last,
        ]
        lane.kernel(self._block_rows, -(-count // _BLOCK), _BLOCK, args, name="block rows")
        return Rows(token, slot, pos), Rows(token, slot, last)

    def _run_layers(self, lane: Lane, batch: int, rows: Rows, attend_rows: Rows) -> None:
        """Embed the rows of the block and run the decoder layers."""
        config = self._config
        kernels = self._kernels
        residual = self._stack.buffers.residual[: rows.count]
        x = self._stack.input_norm(rows.count)
        is_scaled = config.input_embedding_scale != 1
        # The gather kernel also computes the norm, unless a scaling or a convolution has to run
        # between the gather and the norm.
        norm = None if is_scaled or self._convolutions else x
        kernels.elementwise.gather(
            lane, self._embedding, rows.token, residual, name="embed", norm=norm
        )
        if is_scaled:
            kernels.elementwise.scale(lane, residual, config.input_embedding_scale)
        if self._convolutions:
            self._convolutions.run(lane, self._stack, rows, attend_rows, batch)
            return
        if is_scaled:
            kernels.norms.rms_norm(lane, residual, x.weight, config.rms_norm_eps, x.out)
        self._stack.run(lane, rows, x, attend_rows=attend_rows)

    def _level(
        self, lane: Lane, feed: Feed, level: int, previous: DeviceArray | None
    ) -> DeviceArray:
        """Return the logits of a level.

        In a tree, all nodes of the level use the logits of the same row.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        feed
            Inputs and output buffers of the round.
        level
            Level, from 0.
        previous
            int32[B] or, in a tree, int32[B * branch]: the token before each row or node. None if
            the logits do not depend on it.
        """
        begin = level * feed.batch
        logits = feed.scratch.logits[begin : begin + feed.batch]
        if level and feed.branch > 1:
            row_of_node = self._row_of_node[: feed.batch * feed.branch]
            self._kernels.elementwise.gather(
                lane, logits, row_of_node, feed.logits, name="nodes' logits"
            )
            logits = feed.logits
        if self._markov is not None and previous is not None:
            w1, w2 = self._markov
            gathered_rows = self._previous[: logits.shape[0]]
            self._kernels.elementwise.gather(lane, w1, previous, gathered_rows, name="draft before")
            self._kernels.products.linear(
                lane, gathered_rows, w2, logits, residual=logits, name="markov head"
            )
        if self._selector and previous is not None:
            self._selector.score(lane, logits, level, feed.batch, previous)
        return logits

    def _write_context(self, lane: Lane, rows: Rows, features: DeviceArray | None) -> None:
        """Compute the context of committed positions and write its keys and values to the cache."""
        if features is None:
            raise DrafterError(
                "a block drafter needs features of the target: pass them to prefill and start"
            )
        config = self._config
        kernels = self._kernels
        count = rows.check(self._block.shape[1])
        queries = config.num_attention_heads * config.head_dim
        residual = self._stack.buffers.residual[:count]
        context = self._stack.buffers.normed[:count]
        kv = self._context_kv[:count]
        kernels.products.linear(lane, features, self._fc, residual, name="fc")
        kernels.norms.rms_norm(lane, residual, self._context_norm, config.rms_norm_eps, context)
        for layer, weights in enumerate(self._stack.layers):
            write = KVWrite(self._stack.rope_table, rows, self._kv, layer, heads=0)
            key_value = weights.qkv[queries:]
            kernels.attention.project_qkv(lane, context, key_value, kv, write, weights.head_norms)


def _draft_shape(config: DFlashConfig, context: DrafterContext) -> TreeShape:
    """Return the requested draft shape, limited to the levels of a block."""
    max_levels = config.block_size - config.first_row
    if context.tree is None:
        return TreeShape.by_level(min(context.max_drafts, max_levels))
    tree = context.tree._replace(levels=min(context.tree.levels, max_levels))
    return TreeShape.by_level(context.max_drafts, tree)
