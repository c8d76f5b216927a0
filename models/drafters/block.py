"""Block drafters, which compute the logits of all drafts in one forward pass.

There are three kinds, each with a module of its own: `DFlash`, `DFlash2` and `DSpark`. This module
contains their common part.

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
from graft.models.drafters.feed import Feed
from graft.models.errors import ConfigError, DrafterError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import DFlashConfig
from graft.models.llm.kernels.operands import KVWrite, Norm
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack
from graft.models.llm.weights import Weights
from graft.sampling.rows import DraftVocab

__all__ = ["BlockDrafter"]


KERNELS = Path(__file__).resolve().parent / "kernels" / "dflash.cu"
_BLOCK = 64


class BlockDrafter(Drafter):
    """Base class of the drafters that draft level by level from logits of a single forward pass.

    A subclass sets `kind`, the kind of its checkpoints (`DFlashConfig.kind`). It overrides
    `_load_extras`, which uploads the tensors that only this kind has, and those methods of the
    forward pass in which this kind differs.

    Raises
    ------
    CheckpointError
        If tensors are missing or do not match the config.
    ConfigError
        If the config is invalid, is that of another kind of drafter, was made for another target,
        or has a sliding window that is shorter than the engine's max_length.
    """

    lookahead = 1
    feeds_blocks = True
    kind: str

    def __init__(self, folder: Path, context: DrafterContext) -> None:
        config = DFlashConfig.from_dir(folder).for_length(context.max_length, folder)
        if config.kind != self.kind:
            raise ConfigError(f"{folder}: expected a {self.kind} drafter, not {config.kind}")
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
        weights = Weights(device, Checkpoint(folder))
        hidden = config.hidden_size
        vocab = config.vocab_size
        self._embedding = weights.matrix_or(target.embedding, "embed_tokens.weight", vocab, hidden)
        self._head = weights.matrix_or(target.lm_head, "lm_head.weight", vocab, hidden)
        self._fc = weights.matrix("fc.weight", hidden, len(self.feature_layers) * hidden)
        self._context_norm = weights.vector("hidden_norm.weight", hidden)
        layers = [
            DecoderLayer.load(weights, f"layers.{i}", config, hidden, self._kernels)
            for i in range(config.num_hidden_layers)
        ]
        self._norm = weights.vector("norm.weight", hidden)
        self._load_extras(weights, context, nodes)
        weights.finish(("rotary_emb.inv_freq", "confidence_head."))
        heads = config.num_key_value_heads
        dim = config.head_dim
        self._kv = context.make_cache(config.num_hidden_layers, heads, dim, config.dtype)
        self.caches = (self._kv,)
        self._stack = DecoderStack(self._kernels, config, layers, self._kv, max_rows=rows)
        self._context_kv = device.empty((rows, 2 * heads * dim), "float32")
        row_of_node = np.arange(nodes, dtype=np.int32) // self.shape.branch
        self._row_of_node = device.from_host(row_of_node)
        # The rows of this array are token, slot, position and last attended position.
        self._block = device.zeros((4, rows), "int32")
        self._block_rows = device.load(KERNELS)["block_rows"]

    def _load_extras(self, weights: Weights, context: DrafterContext, nodes: int) -> None:
        """Upload the tensors that only a subclass's kind of drafter has; by default none.

        `nodes` is the maximum number of draft-tree nodes of a level, of all requests together.
        """

    def _choose_candidates(self, lane: Lane, normed: DeviceArray, logits: DeviceArray) -> None:
        """Add the kernels that choose candidate ids for all draft levels; by default none.

        They run after the kernels that compute the logits of all levels from `normed` [R, hidden],
        the final hidden states.
        """

    def _adjust_level(
        self, lane: Lane, feed: Feed, level: int, logits: DeviceArray, previous: DeviceArray
    ) -> None:
        """Add the kernels that change a level's logits in place, depending on earlier drafts.

        `previous` contains the token before each row of `logits`: one row per request or, in a
        tree, one per node. The method is called only if the drafter does not set `logits_at_once`.
        """

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
        self._choose_candidates(lane, normed[first:], logits)
        return self._level(lane, feed, 0, None if self.logits_at_once else rows.token[:batch])

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        previous = None if self.logits_at_once else feed.drafts(lane, level).token
        return self._level(lane, feed, level, previous)

    def all_levels(self, feed: Feed) -> DeviceArray:
        return feed.scratch.logits[: len(self.shape.levels) * feed.batch]

    def _lay_out_block(self, lane: Lane, feed: Feed) -> tuple[Rows, Rows]:
        """Add the kernel that writes the rows of all requests' blocks; return two versions of them.

        In the first version, `pos` is the position of the row itself. In the second version, which
        attention uses, `pos` is the last position to which the row attends: the end of its block.
        """
        config = self._config
        width = config.first_row + len(self.shape.levels)
        count = width * feed.batch
        token = self._block[0][:count]
        slot = self._block[1][:count]
        pos = self._block[2][:count]
        last = self._block[3][:count]
        args = [*feed.round_args, feed.batch, width, config.mask_token_id, token, slot, pos, last]
        lane.kernel(self._block_rows, -(-count // _BLOCK), _BLOCK, args, name="block rows")
        return Rows(token, slot, pos), Rows(token, slot, last)

    def _run_layers(self, lane: Lane, batch: int, rows: Rows, attend_rows: Rows) -> None:
        """Embed the tokens of the blocks and run the decoder layers.

        `rows` and `attend_rows` are the two versions of the rows that `_lay_out_block` returns.
        """
        x = self._stack.input_norm(rows.count)
        self._embed(lane, rows, x)
        self._stack.run(lane, rows, x, attend_rows=attend_rows)

    def _embed(self, lane: Lane, rows: Rows, norm: Norm | None) -> None:
        """Write the embeddings of `rows` to the residual stream, and with `norm` to its output."""
        kernels = self._kernels
        residual = self._stack.buffers.residual[: rows.count]
        scale = self._config.input_embedding_scale
        # The gather kernel also computes the norm, unless the embeddings must be scaled first.
        gather_norm = norm if scale == 1 else None
        kernels.elementwise.gather(
            lane, self._embedding, rows.token, residual, name="embed", norm=gather_norm
        )
        if scale != 1:
            kernels.elementwise.scale(lane, residual, scale)
            if norm is not None:
                kernels.norms.rms_norm(lane, residual, norm.weight, norm.eps, norm.out)

    def _level(
        self, lane: Lane, feed: Feed, level: int, previous: DeviceArray | None
    ) -> DeviceArray:
        """Return the logits of a draft level: one row per request or, in a tree, one per node.

        All nodes of a request and level start with the same logits, those of one row of the
        request's block. `previous` contains the token before each returned row; None if the logits
        do not depend on it.
        """
        begin = level * feed.batch
        logits = feed.scratch.logits[begin : begin + feed.batch]
        if level and feed.branch > 1:
            row_of_node = self._row_of_node[: feed.batch * feed.branch]
            self._kernels.elementwise.gather(
                lane, logits, row_of_node, feed.logits, name="nodes' logits"
            )
            logits = feed.logits
        if previous is not None:
            self._adjust_level(lane, feed, level, logits, previous)
        return logits

    def _write_context(self, lane: Lane, rows: Rows, features: DeviceArray | None) -> None:
        """Write keys and values of committed positions, computed from `features`, to the cache."""
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
    """Return the requested draft shape, with at most as many levels as a block can draft."""
    max_levels = config.block_size - config.first_row
    if context.tree is None:
        return TreeShape.by_level(min(context.max_drafts, max_levels))
    tree = context.tree._replace(levels=min(context.tree.levels, max_levels))
    return TreeShape.by_level(context.max_drafts, tree)
