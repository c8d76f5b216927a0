"""Block drafters: one pass gives the logits of all drafts. DFlash (arXiv 2602.06036), DFlash2, and
DSpark (arXiv 2607.05147), which adds to a row's logits what the draft before it makes likely.

What they know of a committed position is c = norm(fc [outputs of some layers of the target]), which
becomes keys and values of each layer by the very projections that make those of the block: the last
token and masks behind it. The block's rows attend to all of that and to one another. A row of
DFlash predicts the token at its own position, the first one none; one of DSpark the token behind.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.drafters.base import Drafter, DrafterContext, DraftVocab, TreeShape, check_target
from graft.models.drafters.dflash2 import Convolutions, Selector
from graft.models.drafters.feed import Feed
from graft.models.errors import ConfigError, DrafterError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import DFlashConfig
from graft.models.llm.kernel_library import KVWrite
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack
from graft.models.llm.weights import Weights

__all__ = ["DFlash"]

KERNELS = Path(__file__).resolve().parent / "kernels" / "dflash.cu"
_BLOCK = 64


class DFlash(Drafter):
    """Drafts level by level, all levels from one pass; those of DFlash are all there `at_once`.

    Parameters
    ----------
    folder : config.json and tensors as published: ``fc``, ``hidden_norm``, ``layers.{i}.*`` and
        ``norm``; ``embed_tokens`` and ``lm_head``, else the target's; for DSpark
        ``markov_head.*``; for DFlash2 ``candidate_selector.*``, and of layers ``attention_conv.*``
        and ``mlp_conv.*``. A confidence head is not used.

    Raises
    ------
    CheckpointError, ConfigError
        Also when it was made for another target, or sees fewer positions than requests may have.
    """

    lookahead = 1

    def __init__(self, folder: Path, room: DrafterContext) -> None:
        config = DFlashConfig.from_dir(folder)
        device = room.device
        target = room.target
        hidden = config.hidden_size
        vocab = config.vocab_size
        self.taps = config.target_layer_ids
        check_target(
            target, vocab_size=vocab, hidden_size=hidden, num_hidden_layers=config.num_target_layers
        )
        if config.sliding_window is not None and config.sliding_window < room.length:
            raise ConfigError(
                f"{folder}: sliding_window = {config.sliding_window} is implemented for requests "
                f"of so many positions, and max_length is {room.length}"
            )
        self._config = config
        self._kernels = target.kernels
        rank = config.markov_rank
        deepest = config.block_size - config.first_row
        tree = room.tree and room.tree._replace(levels=min(room.tree.levels, deepest))
        self.shape = TreeShape.by_level(room.drafts if tree else min(room.drafts, deepest), tree)
        self.vocab = DraftVocab(vocab)
        rows = room.max_rows
        nodes = room.slots * self.shape.branch
        weights = Weights(device, Checkpoint(folder))
        self._embedding, self._head = (
            weights.matrix(name, vocab, hidden) if name in weights.checkpoint else of_target
            for name, of_target in (
                ("embed_tokens.weight", target.embedding),
                ("lm_head.weight", target.lm_head),
            )
        )
        self._fc = weights.matrix("fc.weight", hidden, len(self.taps) * hidden)
        self._context_norm = weights.vector("hidden_norm.weight", hidden)
        layers = [
            DecoderLayer.load(weights, f"layers.{i}", config, hidden, self._kernels)
            for i in range(config.num_hidden_layers)
        ]
        self._norm = weights.vector("norm.weight", hidden)
        self._markov = (
            [
                weights.matrix(f"markov_head.markov_{name}.weight", vocab, rank)
                for name in ("w1", "w2")
            ]
            if rank
            else []
        )
        levels = room.slots * len(self.shape.levels)
        second = config.selector_rank > 0
        self._convolutions = Convolutions(weights, config, self._kernels, rows) if second else None
        self._selector = Selector(weights, config, self._kernels, levels, nodes) if second else None
        self.at_once = not (rank or second)
        weights.finish(("rotary_emb.inv_freq", "confidence_head."))
        heads = config.num_key_value_heads
        dim = config.head_dim
        self._kv = room.cache(config.num_hidden_layers, heads, dim, config.dtype)
        self.caches = (self._kv,)
        self._stack = DecoderStack(self._kernels, config, layers, self._kv, max_rows=rows)
        self._context_kv = device.empty((rows, 2 * heads * dim), "float32")
        self._before = device.empty((nodes, max(rank, 1)), "float32")
        self._row_of = device.from_host(np.arange(nodes, dtype=np.int32) // self.shape.branch)
        self._block = device.zeros((4, rows), "int32")  # token, slot, position, last attended one
        self._block_rows = device.load(KERNELS)["block_rows"]

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        self._absorb(lane, following, features)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        self._absorb(lane, feed.committed(lane), feed.features)
        if feed.width == 1:
            return None
        config = self._config
        kernels = self._kernels
        buffers = self._stack.buffers
        batch = feed.batch
        first = config.first_row * batch
        eps = config.rms_norm_eps
        n = first + len(self.shape.levels) * batch
        block = token, slot, pos, last = [self._block[i][:n] for i in range(4)]
        args = [
            feed.row_slot,
            feed.state.array,
            feed.sampler.rows,
            feed.sampler.row_words,
            batch,
            n // batch,
            config.mask_token_id,
            *block,
        ]
        lane.kernel(self._block_rows, -(-n // _BLOCK), _BLOCK, args, name="block rows")
        residual = buffers.residual[:n]
        normed = buffers.normed[:n]
        scaled = config.input_embedding_scale != 1
        x = self._stack.input_norm(n)
        kernels.gather(
            lane,
            self._embedding,
            token,
            residual,
            name="embed",
            norm=None if scaled or self._convolutions else x,
        )
        if scaled:
            kernels.scale(lane, residual, config.input_embedding_scale)
        if scaled and not self._convolutions:
            kernels.norm(lane, residual, x.weight, eps, x.out)
        rows = Rows(token, slot, pos)
        attending = Rows(token, slot, last)
        if self._convolutions:
            self._convolutions.run(lane, self._stack, rows, attending, batch)
        else:
            self._stack.run(lane, rows, x, attend_rows=attending)
        kernels.norm(lane, residual, self._norm, eps, normed)
        # The target's logits, of more rows, have been read: here is their place.
        logits = feed.scratch.logits[: n - first]
        kernels.linear(lane, normed[first:], self._head, logits, name="draft head")
        factor = config.output_multiplier
        cap = config.final_logit_softcapping
        if factor != 1 or cap:
            kernels.scale(lane, logits, factor, cap)
        if self._selector:
            self._selector.choose(lane, normed[first:], logits)
        return self._level(lane, feed, 0, token[:batch])

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        before = None if self.at_once else feed.drafts(lane, level).token
        return self._level(lane, feed, level, before)

    def all_levels(self, feed: Feed) -> DeviceArray:
        return feed.scratch.logits[: len(self.shape.levels) * feed.batch]

    def _level(self, lane: Lane, feed: Feed, level: int, before: DeviceArray | None) -> DeviceArray:
        """A level's logits, by the tokens before its own; of a tree, once for every node."""
        logits = feed.scratch.logits[level * feed.batch : (level + 1) * feed.batch]
        if level and feed.branch > 1:
            row_of = self._row_of[: feed.batch * feed.branch]
            self._kernels.gather(lane, logits, row_of, feed.logits, name="nodes' logits")
            logits = feed.logits
        if self._markov and before is not None:
            w1, w2 = self._markov
            picked = self._before[: logits.shape[0]]
            self._kernels.gather(lane, w1, before, picked, name="draft before")
            self._kernels.linear(lane, picked, w2, logits, residual=logits, name="markov head")
        if self._selector and before is not None:
            self._selector.score(lane, logits, level, feed.batch, before)
        return logits

    def _absorb(self, lane: Lane, rows: Rows, features: DeviceArray | None) -> None:
        """Write keys and values of committed positions."""
        if features is None:
            raise DrafterError("a block drafter needs features of the target")
        config = self._config
        kernels = self._kernels
        buffers = self._stack.buffers
        n = rows.check(self._block.shape[1])
        queries = config.num_attention_heads * config.head_dim
        residual = buffers.residual[:n]
        context = buffers.normed[:n]
        kv = self._context_kv[:n]
        kernels.linear(lane, features, self._fc, residual, name="fc")
        kernels.norm(lane, residual, self._context_norm, config.rms_norm_eps, context)
        for i, weights in enumerate(self._stack.layers):
            kernels.project_qkv(
                lane,
                context,
                weights.qkv[queries:],
                kv,
                KVWrite(self._stack.rope_table, rows, self._kv, i, 0),
                weights.head_norms,
            )
