"""Target model on a paged KV cache: a Llama, or a similar architecture of `config.TARGETS`."""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import PagedKV
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.rows import Rows
from graft.models.llm.sharding import ShardedWeights, TensorParallelLeader
from graft.models.llm.stack import DecoderLayer, DecoderStack, allocate_cache, check_cache
from graft.models.llm.weights import Weights
from graft.sampling.checks import expect


class LlamaModel:
    """A Llama, or a model of another architecture in `config.TARGETS`.

    All calls use the same activation buffers, so the work of one model must run in order: on one
    lane, or on several lanes with dependencies between them. The forward pass is row invariant: the
    bits of a row's output depend only on the row and on the earlier positions of its slot, not on
    the other rows of the batch.

    Parameters
    ----------
    config
        Shape of the whole model. With tensor parallelism, this is not the shape of rank 0's shard.
    checkpoint
        Tensors of the model. Names, shapes and dtypes are checked. A tensor that the model does not
        use raises CheckpointError.
    kv
        KV cache with the model's layers and heads. With tensor parallelism, the cache has only the
        heads of rank 0's shard.
    max_rows
        Maximum number of rows of a forward pass.
    form, activations
        Kernel form and precision of the activations, as in `ModelKernels`.
    weights
        Storage of the decoder layers' matrices, "checkpoint" or "fp8", as in `Weights`.
    leader
        Shards the model and sends the work of each forward pass to the worker ranks (tensor
        parallelism); None for a model on one device.

    Attributes
    ----------
    kernels
        Kernel library, shared with the drafters.
    embedding, lm_head
        [vocab, hidden] in the stored dtype; the same array if the embeddings are tied.
    final_norm
        float32[hidden], weight of the norm before the LM head.

    Raises
    ------
    CheckpointError
        If a tensor is missing, unused, or of the wrong shape or dtype.
    ShapeError
        If `kv` does not have the model's shape.
    """

    def __init__(
        self,
        device: Device,
        config: LlamaConfig,
        checkpoint: Checkpoint,
        kv: PagedKV,
        *,
        max_rows: int,
        form: str | None = None,
        activations: str = "rounded",
        weights: str = "checkpoint",
        leader: TensorParallelLeader | None = None,
    ) -> None:
        local_config = config if leader is None else leader.shard.local_config
        check_cache(local_config, kv, config.num_hidden_layers)
        if max_rows < 1:
            raise OptionError(f"max_rows is {max_rows}, expected at least 1")
        self.device = device
        self.config = config
        self.kv = kv
        self.max_rows = max_rows
        self.kernels = ModelKernels(device, form, activations)
        self._leader = leader
        self._feature_columns: dict[int, int] = {}  # first column of each layer's features
        if leader is None:
            tensors = Weights(device, checkpoint, weights)
        else:
            tensors = ShardedWeights(device, checkpoint, weights, leader.shard, leader.all_gather)
        layers = self._load(tensors)
        self.stack = DecoderStack(self.kernels, local_config, layers, kv, max_rows=max_rows)
        self.stack.reserve_attention(max_rows)

    @classmethod
    def from_dir(
        cls, device: Device, folder: str | Path, *, slots: int, positions: int
    ) -> LlamaModel:
        """Load the checkpoint of a folder, with a KV cache for `slots` requests.

        `positions` is the maximum number of positions of a request, and of rows of a forward pass.
        The cache has pages for all positions of all slots.

        Raises
        ------
        CheckpointError, ConfigError
            If a file, tensor or config field is invalid. The message contains its name.
        """
        config = LlamaConfig.from_dir(folder).for_length(positions, folder)
        kv = allocate_cache(device, config, slots=slots, positions=positions)
        return cls(device, config, Checkpoint(folder), kv, max_rows=positions)

    def _load(self, tensors: Weights) -> list[DecoderLayer]:
        """Upload all tensors and return the decoder layers."""
        config = self.config
        hidden = config.hidden_size
        vocab = config.vocab_size
        self.embedding = tensors.matrix("model.embed_tokens.weight", vocab, hidden)
        layers = [
            DecoderLayer.load(tensors, f"model.layers.{i}", config, hidden, self.kernels)
            for i in range(config.num_hidden_layers)
        ]
        self.final_norm = tensors.vector("model.norm.weight", hidden)
        ignored = ["rotary_emb.inv_freq"]
        if config.tie_word_embeddings:
            self.lm_head = self.embedding
            ignored.append("lm_head.weight")
        else:
            self.lm_head = tensors.matrix("lm_head.weight", vocab, hidden)
        # Multi-token prediction modules are stored as layers after the last decoder layer. Only an
        # MTP drafter reads them.
        for i in range(config.num_nextn_predict_layers):
            ignored.append(f"model.layers.{config.num_hidden_layers + i}.")
        tensors.finish(tuple(ignored))
        return layers

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return self.config.vocab_size

    def set_feature_layers(self, ids: tuple[int, ...]) -> None:
        """Select the layers whose outputs `forward` copies to its `features` argument.

        The ids must be ascending. The output of a layer is the residual stream after it. The output
        of the last layer is the residual stream before the final norm.
        """
        n = self.config.num_hidden_layers
        is_ascending = list(ids) == sorted(set(ids))
        if not is_ascending or not all(0 <= i < n for i in ids):
            raise OptionError(f"feature layers {ids}: expected ascending ids below {n}")
        hidden = self.config.hidden_size
        self._feature_columns = {}
        for part, layer in enumerate(ids):
            self._feature_columns[layer] = part * hidden

    def forward(
        self,
        lane: Lane,
        rows: Rows,
        features: DeviceArray | None = None,
        logits: DeviceArray | None = None,
    ) -> DeviceArray:
        """Run all layers over `rows` and write the keys and values of the rows to the KV cache.

        Parameters
        ----------
        features
            float32[R, layers * hidden], receives the outputs of the layers that
            `set_feature_layers` selected. If None, no features are copied.
        logits
            float32[R, vocab], receives the logits of all rows, which equal the result of `head` up
            to rounding. If None, no logits are computed.

        Returns
        -------
        DeviceArray
            float32[R, hidden], the residual stream before the final norm; a view of a buffer
            that the next forward pass overwrites.
        """
        count = rows.check(self.max_rows)
        copies = {}
        if features is not None:
            if not self._feature_columns:
                raise OptionError("no feature layers: call set_feature_layers before forward")
            width = len(self._feature_columns) * self.config.hidden_size
            expect("features", features, "float32", R=count, width=width)
            for layer, column in self._feature_columns.items():
                copies[layer] = (features, column)
        stack = self.stack
        residual = stack.buffers.residual[:count]
        x = stack.input_norm(count)
        self.kernels.elementwise.gather(
            lane, self.embedding, rows.token, residual, name="embed", norm=x
        )
        if self._leader is not None:
            self._leader.forward(lane, rows, residual, self.kv)
        final = None
        if logits is not None:
            producer = stack.layers[-1].down
            final = stack.buffers.norm(count, self.final_norm, self.lm_head, producer)
        stack.run(lane, rows, x, copies=copies, final_norm=final)
        if final is not None and logits is not None:
            self.kernels.products.linear(lane, final, self.lm_head, logits, name="lm head")
        return residual

    def compact(
        self,
        lane: Lane,
        row_slot: DeviceArray,
        result: DeviceArray,
        features: DeviceArray | None,
        first: DeviceArray,
    ) -> None:
        """Move the KV entries of accepted tree drafts to their sequence positions on all ranks.

        The parameters are those of `Attention.compact`.
        """
        self.kernels.attention.compact(lane, self.kv, row_slot, result, features, first)
        if self._leader is not None:
            self._leader.compact(lane, row_slot, result)

    def release_workers(self) -> None:
        """Make the worker ranks release their shards. No forward pass may follow."""
        if self._leader is not None:
            self._leader.release_workers()

    def head(
        self, lane: Lane, hidden: DeviceArray, logits: DeviceArray, index: DeviceArray
    ) -> None:
        """Apply the final norm and the LM head to the rows `index` of a residual stream.

        `hidden` is float32[R, hidden], `index` int32[B] and `logits` float32[B, vocab].
        """
        buffers = self.stack.buffers
        norm = buffers.norm(logits.shape[0], self.final_norm, self.lm_head)
        gathered = buffers.array("gathered_rows", hidden.shape[1])[: index.shape[0]]
        self.kernels.elementwise.gather(lane, hidden, index, gathered, norm=norm)
        self.kernels.products.linear(lane, norm, self.lm_head, logits, name="lm head")
