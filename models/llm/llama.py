"""Llama, and Qwen3, which adds norms of heads, on paged keys and values.

Nine kernels a layer, ten with norms of heads; on tensor cores five, seven with norms of heads, and
one before the first. Any lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.cache.kv import PagedKV
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.layers import GROUP, Layers, Norm
from graft.models.llm.rows import Rows
from graft.models.llm.sharding import ShardedWeights, TensorParallelLeader
from graft.models.llm.weights import Matrix, Weights
from graft.sampling.checks import expect


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one decoder layer; matrices that read the same input are stacked."""

    input_norm: DeviceArray
    qkv: Matrix
    out: Matrix
    post_norm: DeviceArray
    gate_up: Matrix
    down: Matrix
    head_norms: tuple[DeviceArray, DeviceArray] | None = None  # of queries, of keys

    @staticmethod
    def load(
        weights: Weights, prefix: str, config: LlamaConfig, width: int, layers: Layers
    ) -> DecoderLayer:
        """Read one layer's tensors for `layers`; `width` is the input size of its attention."""
        hidden = config.hidden_size
        inner = config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        attention = f"{prefix}.self_attn"
        mlp = f"{prefix}.mlp"
        heads = 0 if config.head_norm else config.head_dim
        return DecoderLayer(
            input_norm=weights.vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=weights.stacked(
                {
                    f"{attention}.q_proj.weight": queries,
                    f"{attention}.k_proj.weight": keys,
                    f"{attention}.v_proj.weight": keys,
                },
                width,
                lambda *size: heads and heads * layers.turns(heads, *size),
            ),
            out=weights.stacked({f"{attention}.o_proj.weight": hidden}, queries),
            post_norm=weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=weights.stacked(
                {f"{mlp}.gate_proj.weight": inner, f"{mlp}.up_proj.weight": inner},
                hidden,
                lambda *size: size[1] * layers.gates(*size),
            ),
            down=weights.stacked({f"{mlp}.down_proj.weight": hidden}, inner),
            head_norms=(
                weights.vector(f"{attention}.q_norm.weight", config.head_dim),
                weights.vector(f"{attention}.k_norm.weight", config.head_dim),
            )
            if config.head_norm
            else None,
        )


class Scratch:
    """Intermediate activations of one model, float32, sized for `rows` rows; and of those that
    matrices alone read such of the dtype that these read fastest."""

    def __init__(self, layers: Layers, config: LlamaConfig, rows: int, width: int) -> None:
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self._layers = layers
        self._rows = rows
        self._eps = config.rms_norm_eps
        self._arrays = dict[tuple[str, int, str], DeviceArray]()
        self.stream = self.array("stream", config.hidden_size)
        self.normed = self.array("normed", config.hidden_size)
        self.wide = self.array("normed", width)
        self.qkv = self.array("qkv", queries + 2 * keys)
        self.mixed = self.array("mixed", queries)

    def array(self, name: str, columns: int, dtype: str = "float32") -> DeviceArray:
        """[rows, columns], made when it is first asked for."""
        key = name, columns, dtype
        if key not in self._arrays:
            self._arrays[key] = self._layers.device.empty((self._rows, columns), dtype)
        return self._arrays[key]

    def read_by(self, weight: Matrix, name: str) -> DeviceArray:
        """The input of a product."""
        return self.array(name, weight.shape[1], self._layers.input_dtype(weight))

    def norm(
        self, rows: int, weight: DeviceArray, reader: Matrix, writer: Matrix | None = None
    ) -> Norm:
        """A norm of so many rows for the product with `reader`, folded if `writer` is what makes
        them and may do so; the next one takes its place."""
        out = self.read_by(reader, "normed")[:rows]
        squares = None
        if writer is not None and self._layers.folds(writer, reader):
            squares = self.array("squares", writer.shape[0] // GROUP)[:rows]
        return Norm(weight, self._eps, out, squares)


def run_layers(
    lane: Lane,
    layers: Layers,
    config: LlamaConfig,
    decoder: Sequence[DecoderLayer],
    scratch: Scratch,
    kv: PagedKV,
    turn: DeviceArray,
    rows: Rows,
    x: DeviceArray | Norm,
    *,
    first: int = 0,
    taps: Mapping[int, tuple[DeviceArray, int]] | None = None,
    attending: Rows | None = None,
    ending: Norm | None = None,
) -> None:
    """Add attention and MLP of each layer to ``scratch.stream``; keys and values are written.

    Parameters
    ----------
    x : what attention of the first layer reads.
    first : the first one's layer in `kv`.
    taps : of some of `decoder`, by index: a place for the stream behind it, see `Layers.linear`.
    attending : rows attend to positions up to those of these, by default up to their own.
    ending : a norm of the stream behind the last.
    """
    n = rows.count
    stream = scratch.stream[: rows.count]
    for i, (own, after) in enumerate(zip_longest(decoder, decoder[1:])):
        post = scratch.norm(n, own.post_norm, own.gate_up, own.out)
        behind = scratch.norm(n, after.input_norm, after.qkv, own.down) if after else ending
        attend(
            lane,
            layers,
            config,
            own,
            scratch,
            kv,
            first + i,
            turn,
            rows,
            x,
            stream,
            stream,
            attending,
            post,
        )
        feed_forward(lane, layers, own, scratch, post, stream, stream, (taps or {}).get(i), behind)
        x = behind or x


def attend(
    lane: Lane,
    layers: Layers,
    config: LlamaConfig,
    weights: DecoderLayer,
    scratch: Scratch,
    kv: PagedKV,
    index: int,
    turn: DeviceArray,
    rows: Rows,
    x: DeviceArray | Norm,
    out: DeviceArray,
    residual: DeviceArray | None = None,
    attending: Rows | None = None,
    norm: Norm | None = None,
) -> None:
    """The attention of one layer: `out` is what it makes of `x`, and `residual`; and its norm."""
    n = rows.count
    heads = config.num_attention_heads
    qkv = scratch.qkv[:n]
    mixed = scratch.mixed[:n]
    layers.heads(
        lane,
        x,
        weights.qkv,
        qkv,
        turn,
        rows,
        kv,
        index,
        heads,
        weights.head_norms,
        config.rms_norm_eps,
    )
    layers.attention(lane, qkv, attending or rows, kv, index, heads, mixed)
    layers.linear(lane, mixed, weights.out, out, residual=residual, norm=norm, name="attention out")


def feed_forward(
    lane: Lane,
    layers: Layers,
    weights: DecoderLayer,
    scratch: Scratch,
    x: DeviceArray | Norm,
    out: DeviceArray,
    residual: DeviceArray | None = None,
    tap: tuple[DeviceArray, int] | None = None,
    norm: Norm | None = None,
) -> None:
    """The MLP of one layer: `out` is what it makes of `x`, and `residual`; and its norm."""
    n = out.shape[0]
    up = weights.gate_up
    down = weights.down
    gated = scratch.read_by(down, "gated")[:n]
    if layers.gates(up.dtype, *up.shape):
        layers.linear(lane, x, up, gated, gated=True, name="gate, up")
    else:
        gate_up = scratch.array("gate_up", up.shape[0])[:n]
        layers.linear(lane, x, up, gate_up, name="gate, up")
        layers.silu_mul(lane, gate_up, gated)
    layers.linear(lane, gated, down, out, residual=residual, tap=tap, norm=norm, name="down")


def check_cache(config: LlamaConfig, kv: PagedKV, layers: int) -> None:
    """Raise ShapeError unless the cache has the model's shape."""
    wanted = (layers, config.num_key_value_heads, config.head_dim)
    given = (kv.layers, kv.kv_heads, kv.head_dim)
    if wanted != given:
        raise ShapeError(f"kv: (layers, kv_heads, head_dim) is {given}, expected {wanted}")


class LlamaModel:
    """A Llama target.

    Calls share intermediate buffers: all work of one model must be ordered, on one lane or by
    marks. The bits of a row's output depend on that row and its slot's earlier positions only.

    Parameters
    ----------
    checkpoint : its tensors are checked by name, shape and dtype; leftovers are refused.
    kv : cache of the model's shape.
    max_rows : most rows of one forward.
    form, activations : of the kernels, see `Layers`.
    weights : "checkpoint" or "fp8", see `Weights`.
    lead : of the ranks that hold the other shares of its layers, in which `kv` is its own.

    Raises
    ------
    CheckpointError, ShapeError
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
        lead: TensorParallelLeader | None = None,
    ) -> None:
        self._lead = lead
        self._own = lead.share.own if lead else config
        check_cache(self._own, kv, config.num_hidden_layers)
        if max_rows < 1:
            raise OptionError(f"max_rows is {max_rows}, expected at least 1")
        self.device = device
        self.config = config
        self.kv = kv
        self.max_rows = max_rows
        self.layers = Layers(device, form, activations)
        hidden = config.hidden_size
        vocab = config.vocab_size
        tensors = (
            ShardedWeights(device, checkpoint, weights, lead.share, lead.sums)
            if lead
            else Weights(device, checkpoint, weights)
        )
        self.embedding = tensors.matrix("model.embed_tokens.weight", vocab, hidden)
        self.decoder = [
            DecoderLayer.load(tensors, f"model.layers.{i}", config, hidden, self.layers)
            for i in range(config.num_hidden_layers)
        ]
        self.final_norm = tensors.vector("model.norm.weight", hidden)
        tied = config.tie_word_embeddings
        self.lm_head = self.embedding if tied else tensors.matrix("lm_head.weight", vocab, hidden)
        modules = range(config.num_nextn_predict_layers)  # for a drafter
        behind = (f"model.layers.{config.num_hidden_layers + i}." for i in modules)
        tensors.finish(("rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()), *behind))
        self.turn = device.from_host(config.rope.table(kv.positions, config.head_dim))
        self.scratch = Scratch(self.layers, self._own, max_rows, hidden)
        self.layers.attention_parts(max_rows, self._own.num_attention_heads, kv)
        self._taps: dict[int, int] = {}

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    def set_feature_layers(self, ids: tuple[int, ...]) -> None:
        """Choose the layers whose OUTPUT residual stream becomes features, low to high.

        Id ``n - 1`` is the stream after the last layer, before the final norm.
        """
        n = self.config.num_hidden_layers
        if list(ids) != sorted(set(ids)) or not all(0 <= i < n for i in ids):
            raise OptionError(f"feature layers {ids}: expected ascending ids below {n}")
        self._taps = {layer: part * self.config.hidden_size for part, layer in enumerate(ids)}

    def forward(
        self,
        lane: Lane,
        rows: Rows,
        features: DeviceArray | None = None,
        logits: DeviceArray | None = None,
    ) -> DeviceArray:
        """Run all layers over `rows`, writing their keys and values.

        Parameters
        ----------
        features : float32[R, layers * hidden], filled with the chosen layers' outputs, low to high.
        logits : float32[R, vocab], of all rows: up to rounding what `head` makes.

        Returns
        -------
        DeviceArray
            float32[R, hidden], the residual stream before the final norm; a view of a buffer
            that the next forward overwrites.
        """
        n = rows.check(self.max_rows)
        hidden = self.config.hidden_size
        if features is not None:
            if not self._taps:
                raise OptionError("features asked for, but set_feature_layers was not called")
            expect("features", features, "float32", R=n, width=len(self._taps) * hidden)
        scratch = self.scratch
        stream = scratch.stream[:n]
        x = scratch.norm(n, self.decoder[0].input_norm, self.decoder[0].qkv)
        self.layers.gather(lane, self.embedding, rows.token, stream, name="embed", norm=x)
        if self._lead is not None:
            self._lead.forward(lane, rows, stream, self.kv)
        taps = {} if features is None else {i: (features, at) for i, at in self._taps.items()}
        final = scratch.norm(n, self.final_norm, self.lm_head, self.decoder[-1].down)
        run_layers(
            lane,
            self.layers,
            self._own,
            self.decoder,
            scratch,
            self.kv,
            self.turn,
            rows,
            x,
            taps=taps,
            ending=None if logits is None else final,
        )
        if logits is not None:
            self.layers.linear(lane, final, self.lm_head, logits, name="lm head")
        return stream

    def compact(
        self,
        lane: Lane,
        row_slot: DeviceArray,
        result: DeviceArray,
        features: DeviceArray | None,
        first: DeviceArray,
    ) -> None:
        """`Layers.compact` of its cache."""
        self.layers.compact(lane, self.kv, row_slot, result, features, first)
        if self._lead is not None:
            self._lead.compact(lane, row_slot, result)

    def end(self) -> None:
        """No forward will come any more: other ranks may drop their shares."""
        if self._lead is not None:
            self._lead.end()

    def head(
        self, lane: Lane, hidden: DeviceArray, logits: DeviceArray, index: DeviceArray
    ) -> None:
        """Final norm and output head: rows int32[B] of hidden float32[R, hidden] to logits
        float32[B, vocab]."""
        norm = self.scratch.norm(logits.shape[0], self.final_norm, self.lm_head)
        picked = self.scratch.array("picked", hidden.shape[1])[: index.shape[0]]
        self.layers.gather(lane, hidden, index, picked, norm=norm)
        self.layers.linear(lane, norm, self.lm_head, logits, name="lm head")
