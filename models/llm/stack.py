"""Decoder layers: weights, activation buffers, and the stack that runs them.

The target model, the drafters with decoder layers, and the worker ranks of tensor parallelism all
run their layers with the class `DecoderStack`. A lane, to which a stack adds its kernels, is an
in-order sequence of work that becomes a part of a CUDA graph or runs on a stream.

A layer launches nine kernels. If its products run on tensor cores, the norms, RoPE and the gate are
fused into the products, and the layer launches five kernels. With head norms (Qwen3) the numbers
are ten and seven. Attention on tensor cores launches one more kernel before the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import ShapeError
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import PagedKV
from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernels.attention import AttentionPlan
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.operands import NORM_GROUP, HeadNorms, KVWrite, Norm
from graft.models.llm.rope import identity_table
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Matrix, Weights


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one decoder layer. Matrices that multiply the same input are stacked into one.

    If one kernel multiplies by `qkv` and applies RoPE, the two halves of the rows of each head are
    interleaved. If one kernel multiplies by `gate_up` and applies the gate, gate rows and up rows
    are interleaved. Norm weights are float32[hidden].
    """

    input_norm: DeviceArray
    qkv: Matrix
    out: Matrix
    post_norm: DeviceArray
    gate_up: Matrix
    down: Matrix
    head_norms: HeadNorms | None = None

    @staticmethod
    def load(
        weights: Weights, prefix: str, config: LlamaConfig, input_width: int, kernels: ModelKernels
    ) -> DecoderLayer:
        """Upload one layer in the layout that the kernels read.

        The names of its tensors begin with `prefix`. `config` is the shape of the whole layer. With
        tensor parallelism, `weights` uploads only the part of each matrix that belongs to this
        rank. `input_width` is the input width of the QKV projection.
        """
        hidden = config.hidden_size
        inner = config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        attention = f"{prefix}.self_attn"
        mlp = f"{prefix}.mlp"

        input_norm = weights.vector(f"{prefix}.input_layernorm.weight", hidden)
        qkv = weights.stacked(
            {
                f"{attention}.q_proj.weight": queries,
                f"{attention}.k_proj.weight": keys,
                f"{attention}.v_proj.weight": keys,
            },
            input_width,
            kernels.attention.qkv_interleave(config.head_dim, config.head_norm),
            bias=config.qkv_bias,
        )
        out = weights.stacked({f"{attention}.o_proj.weight": hidden}, queries)
        post_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        gate_up = weights.stacked(
            {f"{mlp}.gate_proj.weight": inner, f"{mlp}.up_proj.weight": inner},
            hidden,
            kernels.products.gate_interleave,
        )
        down = weights.stacked({f"{mlp}.down_proj.weight": hidden}, inner)
        head_norms = None
        if config.head_norm:
            head_norms = HeadNorms(
                query=weights.vector(f"{attention}.q_norm.weight", config.head_dim),
                key=weights.vector(f"{attention}.k_norm.weight", config.head_dim),
                eps=config.rms_norm_eps,
            )
        return DecoderLayer(input_norm, qkv, out, post_norm, gate_up, down, head_norms)


class ActivationBuffers:
    """Activation buffers of one decoder stack, each with `max_rows` rows.

    The buffers that `input_of` returns, which are inputs of products with weight matrices, have the
    dtype that the product reads fastest. All other buffers are float32 by default.

    Attributes
    ----------
    residual
        float32[max_rows, hidden], the residual stream.
    normed
        float32[max_rows, hidden], the residual stream after a norm.
    attention_input
        float32[max_rows, attention_width], the input of the first QKV projection. It is the same
        buffer as `normed` if the widths are equal.
    qkv
        float32[max_rows, (heads + 2 kv_heads) * head_dim], queries, keys and values.
    """

    def __init__(
        self, kernels: ModelKernels, config: LlamaConfig, max_rows: int, attention_width: int
    ) -> None:
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self._kernels = kernels
        self._max_rows = max_rows
        self._eps = config.rms_norm_eps
        self._arrays: dict[tuple[str, int, str], DeviceArray] = {}
        self.residual = self.array("residual", config.hidden_size)
        self.normed = self.array("normed", config.hidden_size)
        self.attention_input = self.array("normed", attention_width)
        self.qkv = self.array("qkv", queries + 2 * keys)

    def array(self, name: str, columns: int, dtype: str = "float32") -> DeviceArray:
        """Return the buffer [max_rows, columns] with this name; allocate it on first use."""
        key = (name, columns, dtype)
        if key not in self._arrays:
            self._arrays[key] = self._kernels.device.empty((self._max_rows, columns), dtype)
        return self._arrays[key]

    def input_of(self, weight: Matrix, name: str) -> DeviceArray:
        """Return the buffer `name`, in the dtype that a product with `weight` reads fastest."""
        return self.array(name, weight.shape[1], self._kernels.products.input_dtype(weight))

    def gated_scratch(self, count: int, weight: Matrix) -> DeviceArray | None:
        """Return the array `scratch` that `Products.gated_linear` needs for `count` rows.

        Return None if it needs none for this weight.
        """
        if self._kernels.products.gate_interleave(weight.dtype, *weight.shape):
            return None
        return self.array("gate_up", weight.shape[0])[:count]

    def norm(
        self, count: int, weight: DeviceArray, consumer: Matrix, producer: Matrix | None = None
    ) -> Norm:
        """Return the `Norm` whose `count` normed rows are multiplied by the matrix `consumer`.

        `weight` is the weight of the norm. If the rows to be normalized are the result of a product
        with the matrix `producer`, and the kernels support it, the norm is folded into the products
        with `producer` and `consumer`. Otherwise, and if `producer` is None, the norm is a separate
        kernel. All norms whose outputs have the same width and dtype share one output buffer.
        """
        out = self.input_of(consumer, "normed")[:count]
        square_sums = None
        if producer is not None and self._kernels.products.can_fold_norm(producer, consumer):
            square_sums = self.array("square_sums", producer.shape[0] // NORM_GROUP)[:count]
        return Norm(weight, self._eps, out, square_sums)


class DecoderStack:
    """Decoder layers with the KV cache, the RoPE table and the buffers that they need to run.

    All calls use the same activation buffers, so the work of one stack must run in order.

    Parameters
    ----------
    config
        Shape of the layers on this rank.
    layers
        Weights, one per layer of `kv`.
    max_rows
        Maximum number of rows of a call.
    attention_width
        Input width of the first QKV projection; None for the hidden size.

    Attributes
    ----------
    rope_table
        float32[positions, head_dim], cosines and sines of all positions (`Rope.table`).
    """

    def __init__(
        self,
        kernels: ModelKernels,
        config: LlamaConfig,
        layers: Sequence[DecoderLayer],
        kv: PagedKV,
        *,
        max_rows: int,
        attention_width: int | None = None,
    ) -> None:
        self.kernels = kernels
        self.config = config
        self.layers = layers
        self.kv = kv
        shape = (kv.positions, config.head_dim)
        self.rope_table = kernels.device.from_host(config.rope.table(*shape))
        self._rope_tables = [self.rope_table] * len(layers)
        if config.layers_without_rope:
            # In layers without RoPE, the kernels rotate by an angle of zero, which changes no bits.
            identity = kernels.device.from_host(identity_table(*shape))
            for layer in config.layers_without_rope:
                self._rope_tables[layer] = identity
        width = config.hidden_size if attention_width is None else attention_width
        self.buffers = ActivationBuffers(kernels, config, max_rows, width)

    def reserve_attention(self, max_rows: int) -> None:
        """Reserve the attention workspace for `max_rows` rows before graphs are built."""
        self.kernels.attention.reserve(max_rows, self.config.num_attention_heads, self.kv)

    def plan_attention(self, lane: Lane, rows: Rows) -> AttentionPlan:
        """Return the attention plan of a pass, in which row r attends up to position rows.pos[r].

        The plan is valid until the next call.
        """
        heads = self.config.num_attention_heads
        return self.kernels.attention.plan(lane, rows, self.kv, heads)

    def input_norm(self, count: int, layer: int = 0, producer: Matrix | None = None) -> Norm:
        """Return the `Norm` that computes the input of a layer's attention for `count` rows.

        If a matrix product writes the rows to be normalized, `producer` is its weight matrix. The
        norm may then be folded into this product and the QKV projection, which reads the result;
        see `ActivationBuffers.norm`.
        """
        weights = self.layers[layer]
        return self.buffers.norm(count, weights.input_norm, weights.qkv, producer)

    def run(
        self,
        lane: Lane,
        rows: Rows,
        x: DeviceArray | Norm,
        *,
        layers: range | None = None,
        copies: Mapping[int, tuple[DeviceArray, int]] | None = None,
        attend_rows: Rows | None = None,
        final_norm: Norm | None = None,
    ) -> None:
        """Run layers over rows: update ``buffers.residual`` and write keys and values.

        Parameters
        ----------
        x
            Normed input of the first layer's attention, or the norm that computes this input.
        layers
            Consecutive layers to run; None for all.
        copies
            Maps a layer to an array and a column. The residual stream after this layer is copied to
            the array, beginning at this column.
        attend_rows
            Rows for attention. The position of each row is the last position that the row attends
            to. None to use `rows`.
        final_norm
            Norm to compute from the residual stream after the last layer; None to compute no norm.
        """
        count = rows.count
        residual = self.buffers.residual[:count]
        plan = self.plan_attention(lane, attend_rows or rows)
        if layers is None:
            layers = range(len(self.layers))
        for layer in layers:
            weights = self.layers[layer]
            mlp_norm = self.buffers.norm(count, weights.post_norm, weights.gate_up, weights.out)
            if layer + 1 in layers:
                next_norm: Norm | None = self.input_norm(count, layer + 1, weights.down)
            else:
                next_norm = final_norm
            self.attention(lane, layer, rows, x, residual, plan, residual=residual, norm=mlp_norm)
            self.mlp(
                lane,
                layer,
                mlp_norm,
                residual,
                residual=residual,
                copy_to=copies.get(layer) if copies else None,
                norm=next_norm,
            )
            if next_norm is not None:
                x = next_norm

    def attention(
        self,
        lane: Lane,
        layer: int,
        rows: Rows,
        x: DeviceArray | Norm,
        out: DeviceArray,
        plan: AttentionPlan,
        *,
        residual: DeviceArray | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Run the attention of one layer: out = attention(x) + residual.

        If `norm` is given, the norm of `out` is computed as well. `x` is as in `run`, and `plan` is
        the result of `plan_attention`.
        """
        weights = self.layers[layer]
        qkv = self.buffers.qkv[: rows.count]
        output = self.buffers.input_of(weights.out, "attention_output")[: rows.count]
        write = KVWrite(self._rope_tables[layer], rows, self.kv, layer, plan.heads)
        self.kernels.attention.project_qkv(lane, x, weights.qkv, qkv, write, weights.head_norms)
        self.kernels.attention.attend(lane, qkv, plan, self.kv, layer, output)
        self.kernels.products.linear(
            lane, output, weights.out, out, residual=residual, norm=norm, name="attention out"
        )

    def mlp(
        self,
        lane: Lane,
        layer: int,
        x: DeviceArray | Norm,
        out: DeviceArray,
        *,
        residual: DeviceArray | None = None,
        copy_to: tuple[DeviceArray, int] | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Run the MLP of one layer: out = mlp(x) + residual.

        If `copy_to` is given, `out` is also copied to that array, starting at the given column. If
        `norm` is given, the norm of `out` is computed as well.
        """
        weights = self.layers[layer]
        count = out.shape[0]
        gate_up = weights.gate_up
        gated = self.buffers.input_of(weights.down, "gated")[:count]
        scratch = self.buffers.gated_scratch(count, gate_up)
        self.kernels.products.gated_linear(lane, x, gate_up, gated, scratch, name="gate, up")
        self.kernels.products.linear(
            lane,
            gated,
            weights.down,
            out,
            residual=residual,
            copy_to=copy_to,
            norm=norm,
            name="down",
        )


def allocate_cache(device: Device, config: LlamaConfig, *, slots: int, positions: int) -> PagedKV:
    """Allocate the KV cache of a model, with pages for `positions` positions of each slot."""
    page_size = 16
    pages_per_slot = -(-positions // page_size)
    return PagedKV(
        device,
        layers=config.num_hidden_layers,
        pages=slots * pages_per_slot,
        page_size=page_size,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        slots=slots,
        max_pages_per_slot=pages_per_slot,
    )


def check_cache(config: LlamaConfig, kv: PagedKV, layers: int) -> None:
    """Raise ShapeError unless layers, KV heads and head size of a KV cache match the model's."""
    expected = (layers, config.num_key_value_heads, config.head_dim)
    actual = (kv.layers, kv.kv_heads, kv.head_dim)
    if expected != actual:
        raise ShapeError(f"kv: (layers, kv_heads, head_dim) is {actual}, expected {expected}")
