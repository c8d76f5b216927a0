"""EAGLE-3 draft head (Li et al., 2025): a decoder layer over [embedding, feature], or several.

Entry i pairs the target's feature of token i with the embedding of token i + 1, at rotary position
i; its output predicts token i + 2 and is the feature of the next draft step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.cache.kv import PagedKV
from graft.models.drafters.base import Drafter, DrafterContext, DraftVocab, TreeShape, check_target
from graft.models.drafters.feed import Feed
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import Eagle3Config
from graft.models.llm.kernel_library import Norm
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack, check_cache
from graft.models.llm.weights import Matrix, Weights
from graft.sampling.checks import expect

# Needed by training only.
_TRAINING = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


class Eagle3Head:
    """An EAGLE-3 head of a Llama target, with a cache of its own.

    As with the target, all work of one head must be ordered.

    Parameters
    ----------
    checkpoint : official names (``midlayer.*``) or those of converted ones (``layers.0.*``).
    target : gives the embedding where the head has none of its own, and the rows of the output
        head, those of ``d2t`` where the vocabulary is pruned, where the head has none.
    kv : the head's shape.
    max_rows : most rows of one call.

    Attributes
    ----------
    draft_vocab : columns of the draft logits.
    d2t : int32[draft_vocab], target id of each draft id; None when the vocabularies are one.
    t2d : int32[vocab], draft id of each target id or -1; or None.

    Raises
    ------
    CheckpointError, ConfigError, ShapeError
        Also when the head was made for another target.
    """

    def __init__(
        self,
        device: Device,
        config: Eagle3Config,
        checkpoint: Checkpoint,
        target: LlamaModel,
        kv: PagedKV,
        *,
        max_rows: int,
    ) -> None:
        check_target(target, vocab_size=config.vocab_size, hidden_size=config.target_hidden_size)
        check_cache(config, kv, config.num_hidden_layers)
        if max_rows < 1:
            raise OptionError(f"max_rows is {max_rows}, expected at least 1")
        self.device = device
        self.config = config
        self.target = target
        self.kv = kv
        self.max_rows = max_rows
        self.draft_vocab = config.draft_vocab_size
        self.kernels = target.kernels
        self.feature_layers = config.resolve_feature_layers(target.config.num_hidden_layers)
        layers = self._load(Weights(device, checkpoint))
        hidden = config.hidden_size
        self.stack = DecoderStack(
            self.kernels, config, layers, kv, max_rows=max_rows, attention_width=2 * hidden
        )
        self._fused = device.empty((max_rows, hidden), "float32")
        self._picked = device.empty((max_rows, hidden), "float32")

    def _load(self, weights: Weights) -> list[DecoderLayer]:
        config = self.config
        checkpoint = weights.checkpoint
        hidden = config.hidden_size
        vocab = config.vocab_size
        draft = config.draft_vocab_size
        prefix = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"
        self.fc = weights.matrix("fc.weight", hidden, 3 * config.target_hidden_size)
        layers = [DecoderLayer.load(weights, prefix, config, 2 * hidden, self.kernels)]
        layers += [
            DecoderLayer.load(weights, f"layers.{i}", config, hidden, self.kernels)
            for i in range(1, config.num_hidden_layers)
        ]
        self.hidden_norm = weights.vector(f"{prefix}.hidden_norm.weight", hidden)
        self.final_norm = weights.vector("norm.weight", hidden)
        shared = hidden == self.target.config.hidden_size
        if "embed_tokens.weight" in checkpoint:
            self.embedding = weights.matrix("embed_tokens.weight", vocab, hidden)
        elif shared:
            self.embedding = self.target.embedding
        else:
            raise CheckpointError(
                f"{checkpoint.path}: embed_tokens.weight is missing, and the target's embedding "
                f"is {self.target.config.hidden_size} wide, not {hidden}"
            )
        maps = read_draft_map(checkpoint, draft, vocab)
        lent = self.target.lm_head
        if "lm_head.weight" in checkpoint:
            self.lm_head = weights.matrix("lm_head.weight", draft, hidden)
        elif shared:
            self.lm_head = (
                lent if maps is None else self.device.from_host(lent.to_host()[maps[0]], lent.dtype)
            )
        else:
            raise CheckpointError(
                f"{checkpoint.path}: lm_head.weight is missing, and the target's is "
                f"{self.target.config.hidden_size} wide, not {hidden}"
            )
        self.d2t = None if maps is None else self.device.from_host(maps[0])
        self.t2d = None if maps is None else self.device.from_host(maps[1])
        weights.finish(("d2t", *_TRAINING))
        return layers

    def entries(self, lane: Lane, rows: Rows, features: DeviceArray) -> DeviceArray:
        """Feed entries with true features.

        Parameters
        ----------
        rows : ``token`` is the NEXT token (t_{i+1}) of entry i, ``pos`` is i.
        features : float32[R, 3 target_hidden], low | mid | high of token i.

        Returns
        -------
        DeviceArray
            float32[R, hidden] before the final norm; a view that the next call overwrites.
        """
        n = rows.check(self.max_rows)
        expect("features", features, "float32", R=n, width=3 * self.config.target_hidden_size)
        fused = self._fused[:n]
        self.kernels.linear(lane, features, self.fc, fused, name="fc")
        return self._run(lane, rows, fused)

    def step(
        self, lane: Lane, rows: Rows, hidden: DeviceArray, logits: DeviceArray | None = None
    ) -> DeviceArray:
        """Feed entries whose feature is the head's own output `hidden`, float32[B, hidden].

        Returns as `entries`; `hidden` may be what an earlier call returned. `logits`, float32[B,
        draft_vocab], gets up to rounding what `head` makes of it.
        """
        n = rows.check(self.max_rows)
        expect("hidden", hidden, "float32", B=n, width=self.config.hidden_size)
        final = self._final(n, self.stack.layers[-1].down)
        out = self._run(lane, rows, hidden, None if logits is None else final)
        if logits is not None:
            self.kernels.linear(lane, final, self.lm_head, logits, name="draft head")
        return out

    def head(
        self, lane: Lane, out: DeviceArray, logits: DeviceArray, index: DeviceArray | None = None
    ) -> DeviceArray:
        """Final norm and output head: out float32[B, hidden] to logits float32[B, draft_vocab].

        Returns `out`; or its rows `index`, int32[B], whose logits they then are, as `gather` does.
        """
        final = self._final(logits.shape[0])
        if index is None:
            self.kernels.norm(lane, out, final.weight, final.eps, final.out)
        else:
            out = self.gather(lane, out, index, norm=final)
        self.kernels.linear(lane, final, self.lm_head, logits, name="draft head")
        return out

    def _final(self, rows: int, writer: Matrix | None = None) -> Norm:
        return self.stack.buffers.norm(rows, self.final_norm, self.lm_head, writer)

    def gather(
        self,
        lane: Lane,
        out: DeviceArray,
        index: DeviceArray,
        *,
        again: bool = False,
        norm: Norm | None = None,
    ) -> DeviceArray:
        """Rows `index` (int32[B]) of `out`: float32[B, hidden], a view the next gather reuses.

        `out` may be what a gather returned if this one is `again`, and its view lasts until
        `entries`.
        """
        picked = (self._fused if again else self._picked)[: index.shape[0]]
        self.kernels.gather(lane, out, index, picked, norm=norm)
        return picked

    def _run(
        self, lane: Lane, rows: Rows, hidden: DeviceArray, ending: Norm | None = None
    ) -> DeviceArray:
        n = rows.count
        config = self.config
        residual = self.stack.buffers.residual[:n]
        x = self.stack.buffers.attention_input[:n]
        self.kernels.eagle_input(
            lane,
            rows.token,
            self.embedding,
            hidden,
            self.stack.layers[0].input_norm,
            self.hidden_norm,
            config.rms_norm_eps,
            config.norm_before_residual,
            x,
            residual,
        )
        self.stack.run(lane, rows, x, final_norm=ending)
        return residual


class Eagle3(Drafter):
    """Drafts with an EAGLE-3 head: entries with true features, then with its own."""

    lookahead = 1

    def __init__(self, head: Eagle3Head, shape: TreeShape) -> None:
        self.head = head
        self.shape = shape
        self.taps = head.feature_layers
        self.vocab = DraftVocab(head.draft_vocab, head.d2t, head.t2d)
        self.caches = (head.kv,)
        self._hidden: DeviceArray | None = None  # of the level written last

    @classmethod
    def from_dir(cls, folder: Path, config: Eagle3Config, room: DrafterContext) -> Eagle3:
        """Load a checkpoint's head; raises as `Eagle3Head`."""
        cache = room.cache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.dtype
        )
        head = Eagle3Head(
            room.device, config, Checkpoint(folder), room.target, cache, max_rows=room.max_rows
        )
        return cls(head, TreeShape.by_level(room.drafts, room.tree))

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        self.head.entries(lane, following, _given(features))

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        out = self.head.entries(lane, feed.committed(lane), _given(feed.features))
        if feed.width == 1:
            return None
        logits = feed.logits[: feed.batch]
        self._hidden = self.head.head(lane, out, logits, feed.last)
        return logits

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        rows = feed.drafts(lane, level)
        hidden = _given(self._hidden)
        if feed.branch > 1:
            hidden = self.head.gather(lane, hidden, feed.origin, again=True)
        logits = feed.logits[: rows.count]
        self._hidden = self.head.step(lane, rows, hidden, logits)
        return logits


def _given(array: DeviceArray | None) -> DeviceArray:
    if array is None:
        raise OptionError("an EAGLE-3 head needs features: it was called out of order")
    return array


def read_draft_map(
    checkpoint: Checkpoint, draft: int, vocab: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Draft-to-target and target-to-draft ids, or None when the vocabularies are one.

    The checkpoint stores differences: target id = draft id + d2t[draft id].

    Returns
    -------
    d2t : np.ndarray
        int32[draft], absolute target ids, all different.
    t2d : np.ndarray
        int32[vocab], the inverse; -1 where the draft vocabulary lacks the id.
    """
    if "d2t" not in checkpoint:
        if draft != vocab:
            raise CheckpointError(
                f"{checkpoint.path}: d2t is missing, but draft_vocab_size {draft} is not "
                f"vocab_size {vocab}"
            )
        return None
    differences, _ = checkpoint.get("d2t", (draft,), ("int64", "int32"))
    ids = differences.astype(np.int64) + np.arange(draft)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        at = int(outside[0])
        raise CheckpointError(
            f"{checkpoint.path}: d2t maps draft id {at} to {int(ids[at])}, outside the target's "
            f"vocabulary of {vocab}"
        )
    inverse = np.full(vocab, -1, dtype=np.int32)
    inverse[ids] = np.arange(draft, dtype=np.int32)
    repeated = np.flatnonzero(inverse[ids] != np.arange(draft))
    if repeated.size:
        raise CheckpointError(
            f"{checkpoint.path}: d2t maps draft id {int(repeated[0])} to {int(ids[repeated[0]])}, "
            "as another draft id does"
        )
    return ids.astype(np.int32), inverse
