"""DFlash (arXiv 2602.06036): a block drafter, whose one pass gives the logits of all drafts.

What it knows of a committed position is c = norm(fc [outputs of some layers of the target]), which
becomes keys and values of each of its layers by the very projections that make those of the block:
the last token and masks behind it. The block's rows attend to all of that and to one another.
Row j predicts the token at its own position, by the target's head.
"""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.checkpoint import Checkpoint
from graft.models.config import DFlashConfig
from graft.models.drafters.base import Drafter, DrafterRoom, DraftVocab, TreeShape, check_target
from graft.models.errors import DrafterError
from graft.models.feed import Feed
from graft.models.llama import DecoderLayer, Scratch, run_layer
from graft.models.rows import Rows
from graft.models.weights import Weights

__all__ = ["DFlash"]

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "dflash.cu"
_BLOCK = 64


class DFlash(Drafter):
    """Drafts a chain, all levels from one pass; the draft of a level reads no other draft.

    Parameters
    ----------
    folder : config.json and tensors as published: ``fc``, ``hidden_norm``, ``layers.{i}.*`` and
        ``norm``; embedding and head are the target's.

    Raises
    ------
    CheckpointError, ConfigError
        Also when it was made for another target.
    """

    def __init__(self, folder: Path, room: DrafterRoom) -> None:
        config, device, target = DFlashConfig.from_dir(folder), room.device, room.target
        check_target(target, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
                     num_hidden_layers=config.num_target_layers)  # fmt: skip
        hidden, self.taps = config.hidden_size, config.target_layer_ids
        self._config, self._target, self._layers = config, target, target.layers
        self.shape = TreeShape.by_level(min(room.drafts, config.block_size - 1))
        self.vocab = DraftVocab(config.vocab_size)
        weights = Weights(device, Checkpoint(folder))
        self._fc = weights.matrix("fc.weight", hidden, len(self.taps) * hidden)
        self._context_norm = weights.vector("hidden_norm.weight", hidden)
        self._decoder = [DecoderLayer.load(weights, f"layers.{i}", config, hidden)
                         for i in range(config.num_hidden_layers)]  # fmt: skip
        self._norm = weights.vector("norm.weight", hidden)
        weights.finish(("rotary_emb.inv_freq",))
        heads, dim = config.num_key_value_heads, config.head_dim
        self._kv = room.cache(config.num_hidden_layers, heads, dim, config.dtype)
        self.caches, rows = (self._kv,), room.max_rows
        self._turn = device.from_host(config.rope.table(self._kv.positions, dim))
        self._scratch = Scratch(device, config, rows, hidden)
        self._context_kv = device.empty((rows, 2 * heads * dim), "float32")
        self._block = device.zeros((4, rows), "int32")  # token, slot, position, last attended one

    def prefill(
        self, lane: Lane, own: Rows, following: Rows | None, features: DeviceArray | None
    ) -> None:
        if following is not None:
            self._absorb(lane, following, features)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray:
        self._absorb(lane, feed.committed(lane), feed.features)
        config, layers, scratch = self._config, self._layers, self._scratch
        n, eps = feed.batch * feed.width, config.rms_norm_eps
        block = token, slot, pos, last = [self._block[i][:n] for i in range(4)]
        args = [feed.row_slot, feed.state.array, feed.sampler.rows, feed.sampler.row_words,
                feed.batch, feed.width, config.mask_token_id, *block]  # fmt: skip
        kernel = self._target.device.load(KERNELS)["block_rows"]
        lane.kernel(kernel, -(-n // _BLOCK), _BLOCK, args, name="block rows")
        stream, normed = scratch.stream[:n], scratch.normed[:n]
        layers.gather(lane, self._target.embedding, token, stream, name="embed")
        rows, attending = Rows(token, slot, pos), Rows(token, slot, last)
        for i, weights in enumerate(self._decoder):
            layers.norm(lane, stream, weights.input_norm, eps, normed)
            run_layer(lane, layers, config, weights, scratch, self._kv, i, self._turn, rows,
                      normed, attending=attending)  # fmt: skip
        layers.norm(lane, stream, self._norm, eps, normed)
        # The target's logits have been read: theirs is the place for those of as many rows less B.
        logits = feed.scratch.logits[: n - feed.batch]
        layers.linear(lane, normed[feed.batch :], self._target.lm_head, logits, name="lm head")
        return self.step(lane, feed, 0)

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        return feed.scratch.logits[level * feed.batch : (level + 1) * feed.batch]

    def _absorb(self, lane: Lane, rows: Rows, features: DeviceArray | None) -> None:
        """Write keys and values of committed positions."""
        if features is None:
            raise DrafterError("DFlash needs features of the target")
        config, layers, scratch = self._config, self._layers, self._scratch
        n, queries = rows.check(self._block.shape[1]), config.num_attention_heads * config.head_dim
        stream, context, kv = scratch.stream[:n], scratch.normed[:n], self._context_kv[:n]
        layers.linear(lane, features, self._fc, stream, name="fc")
        layers.norm(lane, stream, self._context_norm, config.rms_norm_eps, context)
        for i, weights in enumerate(self._decoder):
            layers.linear(lane, context, weights.qkv[queries:], kv, name="context kv")
            if weights.head_norms is not None:
                layers.head_norm(lane, kv, weights.head_norms, 0, config.rms_norm_eps)
            layers.rope_and_store(lane, kv, self._turn, rows, self._kv, i, 0)
