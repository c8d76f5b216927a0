"""EAGLE-3 draft head (Li et al., 2025).

The head consists of one or more decoder layers. The input of the first layer is the concatenation
[embedding, feature]. The target's feature of a token is computed from the outputs of three target
layers. Entry i of the head's KV cache combines the target's feature of token i with the embedding
of token i + 1, at RoPE position i. The output of entry i predicts token i + 2. In the next draft
step, the output is used as the feature of token i + 1, because the target has not processed that
token yet.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import PagedKV
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape, check_target
from graft.models.drafters.feed import Feed
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import Eagle3Config
from graft.models.llm.kernels.operands import Norm
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack, allocate_cache, check_cache
from graft.models.llm.weights import Matrix, Weights
from graft.sampling.checks import expect
from graft.sampling.rows import DraftVocab

# Tensors of a checkpoint that only training uses.
_TRAINING = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


class Eagle3Head:
    """An EAGLE-3 head of a Llama target, with its own KV cache.

    All calls use the same activation buffers, so the work of one head must run in order. A call has
    at most `max_rows` rows.

    The tensors have the official names (``midlayer.*``) or the names of converted checkpoints
    (``layers.0.*``). The embedding and the LM head of the target are used if the checkpoint has
    none. If the draft vocabulary is smaller than the target's, only the rows of the LM head whose
    ids are in ``d2t`` are used.

    Attributes
    ----------
    draft_vocab
        Number of columns of the draft logits.
    d2t
        int32[draft_vocab], target id of each draft id; None if the vocabularies are equal.
    t2d
        int32[vocab], draft id of each target id or -1; None if the vocabularies are equal.

    Raises
    ------
    CheckpointError
        If tensors are missing or do not match the config.
    ConfigError
        If the head was made for another target.
    ShapeError
        If `kv` does not have the head's shape.
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
        self._gathered = device.empty((max_rows, hidden), "float32")

    @classmethod
    def from_dir(cls, device: Device, folder: str | Path, target: LlamaModel) -> Eagle3Head:
        """Load the head of a checkpoint folder, with a KV cache as large as the target's.

        A call may have as many rows as a forward pass of the target. Raises the same exceptions as
        the constructor.
        """
        positions = target.kv.positions
        config = Eagle3Config.from_dir(folder).for_length(positions, folder)
        kv = allocate_cache(device, config, slots=target.kv.slots, positions=positions)
        return cls(device, config, Checkpoint(folder), target, kv, max_rows=target.max_rows)

    def _load(self, weights: Weights) -> list[DecoderLayer]:
        """Upload all tensors of the head and return its decoder layers."""
        config = self.config
        checkpoint = weights.checkpoint
        hidden = config.hidden_size
        vocab = config.vocab_size
        prefix = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"
        self.fc = weights.matrix("fc.weight", hidden, 3 * config.target_hidden_size)
        layers = [DecoderLayer.load(weights, prefix, config, 2 * hidden, self.kernels)]
        for i in range(1, config.num_hidden_layers):
            layers.append(DecoderLayer.load(weights, f"layers.{i}", config, hidden, self.kernels))
        self.hidden_norm = weights.vector(f"{prefix}.hidden_norm.weight", hidden)
        self.final_norm = weights.vector("norm.weight", hidden)
        if "embed_tokens.weight" in checkpoint:
            self.embedding = weights.matrix("embed_tokens.weight", vocab, hidden)
        else:
            self._check_shared(checkpoint, "embed_tokens.weight")
            self.embedding = self.target.embedding
        self._load_head(weights)
        weights.finish(("d2t", *_TRAINING))
        return layers

    def _load_head(self, weights: Weights) -> None:
        """Upload the LM head and the vocabulary maps `d2t` and `t2d`."""
        config = self.config
        checkpoint = weights.checkpoint
        vocab_map = read_vocab_map(checkpoint, config.draft_vocab_size, config.vocab_size)
        self.d2t = None
        self.t2d = None
        if "lm_head.weight" in checkpoint:
            self.lm_head = weights.matrix(
                "lm_head.weight", config.draft_vocab_size, config.hidden_size
            )
        else:
            self._check_shared(checkpoint, "lm_head.weight")
            self.lm_head = self.target.lm_head
            if vocab_map is not None:
                rows = self.lm_head.to_host()[vocab_map[0]]
                self.lm_head = self.device.from_host(rows, self.lm_head.dtype)
        if vocab_map is not None:
            self.d2t = self.device.from_host(vocab_map[0])
            self.t2d = self.device.from_host(vocab_map[1])

    def _check_shared(self, checkpoint: Checkpoint, name: str) -> None:
        """Check that a head without a tensor `name` of its own can use that of the target."""
        width = self.target.config.hidden_size
        if width != self.config.hidden_size:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is missing, and the target's {name} cannot be used: it "
                f"has width {width}, expected {self.config.hidden_size}"
            )

    def entries(self, lane: Lane, rows: Rows, features: DeviceArray) -> DeviceArray:
        """Run the head on tokens whose features come from the target.

        Parameters
        ----------
        rows
            Entries of the head's KV cache to compute: ``pos`` is the position i of an entry, and
            ``token`` is the NEXT token, t_{i+1}.
        features
            float32[R, 3 * target_hidden], target features of token i: the outputs of a low, a
            middle and a high layer, concatenated.

        Returns
        -------
        DeviceArray
            float32[R, hidden], output before the final norm; a view that the next call overwrites.
        """
        count = rows.check(self.max_rows)
        expect("features", features, "float32", R=count, width=3 * self.config.target_hidden_size)
        fused = self._fused[:count]
        self.kernels.products.linear(lane, features, self.fc, fused, name="fc")
        return self._run(lane, rows, fused)

    def step(
        self, lane: Lane, rows: Rows, hidden: DeviceArray, logits: DeviceArray | None = None
    ) -> DeviceArray:
        """Run the head on drafts, for which no features of the target exist yet.

        `rows` is as in `entries`. Instead of features, the head reads `hidden`, float32[R,
        hidden_size], which contains its own outputs for the previous tokens. `hidden` may be the
        result of an earlier call. The result has the same shape; it is the output before the final
        norm, a view that the next call overwrites. If `logits`, float32[R, draft_vocab], is given,
        the logits are written to it. They equal those of `head` up to rounding.
        """
        count = rows.check(self.max_rows)
        expect("hidden", hidden, "float32", B=count, width=self.config.hidden_size)
        if logits is None:
            return self._run(lane, rows, hidden)
        final = self._final_norm(count, self.stack.layers[-1].down)
        out = self._run(lane, rows, hidden, final)
        self.kernels.products.linear(lane, final, self.lm_head, logits, name="draft head")
        return out

    def head(
        self, lane: Lane, out: DeviceArray, logits: DeviceArray, index: DeviceArray | None = None
    ) -> DeviceArray:
        """Apply the final norm and the LM head to rows of `out`, the result of `entries` or `step`.

        `index` int32[B] selects the rows; None selects all. The logits are float32[B, draft_vocab].
        Return the rows whose logits were computed.
        """
        final = self._final_norm(logits.shape[0])
        if index is None:
            self.kernels.norms.rms_norm(lane, out, final.weight, final.eps, final.out)
        else:
            out = self.gather(lane, out, index, norm=final)
        self.kernels.products.linear(lane, final, self.lm_head, logits, name="draft head")
        return out

    def _final_norm(self, count: int, producer: Matrix | None = None) -> Norm:
        """Return the `Norm` of `count` rows before the LM head.

        `producer` is as in `ActivationBuffers.norm`.
        """
        return self.stack.buffers.norm(count, self.final_norm, self.lm_head, producer)

    def gather(
        self,
        lane: Lane,
        out: DeviceArray,
        index: DeviceArray,
        *,
        again: bool = False,
        norm: Norm | None = None,
    ) -> DeviceArray:
        """Gather rows of `out`, float32[R, hidden], and compute `norm` of them unless it is None.

        `index` int32[B] selects the rows. The result, float32[B, hidden], is a view that the next
        gather overwrites. If `out` is itself the result of a `gather`, set `again`: the rows are
        then written to a second buffer, which the next call of `entries` overwrites.
        """
        buffer = self._fused if again else self._gathered
        gathered_rows = buffer[: index.shape[0]]
        self.kernels.elementwise.gather(lane, out, index, gathered_rows, norm=norm)
        return gathered_rows

    def _run(
        self, lane: Lane, rows: Rows, hidden: DeviceArray, final_norm: Norm | None = None
    ) -> DeviceArray:
        """Run the decoder layers and return the residual stream, float32[R, hidden].

        The input of a row is the embedding of its token, `rows.token`, together with its row of
        `hidden`. If `final_norm` is given, the normed residual stream is also written to
        ``final_norm.out``.
        """
        count = rows.count
        config = self.config
        residual = self.stack.buffers.residual[:count]
        x = self.stack.buffers.attention_input[:count]
        self.kernels.norms.eagle_input(
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
        self.stack.run(lane, rows, x, final_norm=final_norm)
        return residual


class Eagle3(Drafter):
    """Drafter that uses an EAGLE-3 head.

    At the first level the head reads features of the target. At later levels it reads its own
    outputs in place of features.
    """

    lookahead = 1

    def __init__(self, head: Eagle3Head, shape: TreeShape) -> None:
        self.head = head
        self.shape = shape
        self.feature_layers = head.feature_layers
        self.vocab = DraftVocab(head.draft_vocab, head.d2t, head.t2d)
        self.caches = (head.kv,)
        self._hidden: DeviceArray | None = None  # output of the head for the previous level

    @classmethod
    def from_dir(cls, folder: Path, config: Eagle3Config, context: DrafterContext) -> Eagle3:
        """Load the head of a checkpoint folder. Raises the same exceptions as `Eagle3Head`."""
        cache = context.make_cache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.dtype
        )
        head = Eagle3Head(
            context.device,
            config,
            Checkpoint(folder),
            context.target,
            cache,
            max_rows=context.max_rows,
        )
        return cls(head, TreeShape.by_level(context.max_drafts, context.tree))

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        self.head.entries(lane, next_rows, _require(features))

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        out = self.head.entries(lane, feed.committed(lane), _require(feed.features))
        if feed.width == 1:
            return None
        logits = feed.logits[: feed.batch]
        self._hidden = self.head.head(lane, out, logits, feed.last)
        return logits

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        rows = feed.drafts(lane, level)
        hidden = _require(self._hidden)
        if feed.branch > 1:
            hidden = self.head.gather(lane, hidden, feed.origin, again=True)
        logits = feed.logits[: rows.count]
        self._hidden = self.head.step(lane, rows, hidden, logits)
        return logits


def _require(array: DeviceArray | None) -> DeviceArray:
    if array is None:
        raise OptionError(
            "the EAGLE-3 head has no features: pass the target's features to prefill and start, "
            "and call start before step"
        )
    return array


def read_vocab_map(
    checkpoint: Checkpoint, draft_vocab: int, vocab: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the maps between draft ids and target ids; return None if the vocabularies are equal.

    The tensor ``d2t`` of the checkpoint stores differences, so the target id of a draft id is
    ``draft id + d2t[draft id]``.

    Returns
    -------
    d2t : np.ndarray
        int32[draft_vocab], target ids, all different.
    t2d : np.ndarray
        int32[vocab], the inverse; -1 for ids outside the draft vocabulary.

    Raises
    ------
    CheckpointError
        If the map is missing, contains an id outside the target's vocabulary, or maps two draft
        ids to the same target id.
    """
    if "d2t" not in checkpoint:
        if draft_vocab != vocab:
            raise CheckpointError(
                f"{checkpoint.path}: d2t is missing, but draft_vocab_size {draft_vocab} differs "
                f"from vocab_size {vocab}"
            )
        return None
    differences, _ = checkpoint.get("d2t", (draft_vocab,), ("int64", "int32"))
    ids = differences.astype(np.int64) + np.arange(draft_vocab)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        draft_id = int(outside[0])
        raise CheckpointError(
            f"{checkpoint.path}: d2t maps draft id {draft_id} to {int(ids[draft_id])}, outside the "
            f"target's vocabulary of {vocab}"
        )
    inverse = np.full(vocab, -1, dtype=np.int32)
    inverse[ids] = np.arange(draft_vocab, dtype=np.int32)
    repeated = np.flatnonzero(inverse[ids] != np.arange(draft_vocab))
    if repeated.size:
        draft_id = int(repeated[0])
        raise CheckpointError(
            f"{checkpoint.path}: d2t maps draft id {draft_id} and another draft id to the same "
            f"target id {int(ids[draft_id])}"
        )
    return ids.astype(np.int32), inverse
