"""Configurations of the models graft runs, read from Hugging Face ``config.json`` files.

What a config asks for and graft does not implement is refused by field name and value; nothing
that would change the output is skipped over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from graft.cudagraph.cstruct import read_numbers
from graft.models.errors import ConfigError
from graft.models.json_fields import Fields
from graft.models.llm.rope import Rope
from graft.sampling.loading import KERNELS

MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_LAYERS = 1 << 10
MAX_POSITIONS = 1 << 24
MAX_HEADS = 1024
MAX_HEAD_DIM = 256
MAX_SELECTED = read_numbers(KERNELS / "selector.cu")["MAX_SELECTED"]
FLOATS = ("float32", "float16", "bfloat16")
#: Target architectures with their model_type.
TARGETS = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
#: Values that fields of `quantization_config` may have, by method, those of a group of matrices and
#: those of its weights; None: any. Other fields must be absent.
_ASIDE = dict.fromkeys(("quant_method", "ignore", "ignored_layers", "modules_to_not_convert"))
_QUANTIZATION: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "compressed-tensors": {
        **_ASIDE,
        "config_groups": None,
        "format": ("float-quantized",),
        "quantization_status": ("compressed", "frozen"),
        "version": None,
        "global_compression_ratio": None,
        "sparsity_config": ({},),
        "transform_config": ({},),
    },
    "fp8": {**_ASIDE, "activation_scheme": ("dynamic", "static"), "fmt": ("e4m3",)},
}
_GROUP = {
    "targets": None,
    "input_activations": None,
    "weights": None,
    "format": ("float-quantized",),
}
_WEIGHTS: dict[str, tuple[Any, ...] | None] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("channel", "tensor"),
    "symmetric": (True,),
    "dynamic": (False,),
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": ("torch.float32", "torch.bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama decoder.

    Attributes
    ----------
    vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, \
    num_key_value_heads, head_dim : sizes; query heads are a multiple of key heads, `head_dim` is
        even.
    rms_norm_eps : added to the mean square in RMSNorm.
    rope : rotary embedding.
    max_position_embeddings : longest sequence the model was made for.
    tie_word_embeddings : the output head is the embedding matrix.
    dtype : dtype the config names; float32 where it names none.
    head_norm : queries and keys are normed head by head.
    num_nextn_predict_layers : modules behind the last layer, that predict tokens further on.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str = "float32"
    head_norm: bool = False
    num_nextn_predict_layers: int = 0

    @classmethod
    def from_dir(cls, path: str | Path) -> Self:
        """Read ``config.json`` of a folder. Raises ConfigError."""
        return cls.from_fields(Fields.from_file(Path(path) / "config.json"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "config") -> Self:
        """As `from_dir`, from a decoded object. Raises ConfigError."""
        return cls.from_fields(Fields(data, where))

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        kind = _architecture(fields, TARGETS)
        return cls(**_decoder(fields, kind), head_norm=kind == "qwen3")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LlamaConfig):
    """Shape of an EAGLE-3 draft head.

    Attributes
    ----------
    (those of LlamaConfig)
        Sizes and rotary embedding of the head's one decoder layer. `vocab_size` is the
        target's. The rotary base is the head's own (10000 where its config is silent), never
        the target's.
    draft_vocab_size : columns of the head's logits.
    target_hidden_size : width of the target's features; the head's own hidden size where not given.
    norm_before_residual : the residual is the normalised feature (some converted checkpoints).
    feature_layers : OUTPUT ids of the three target layers whose residual stream is fed, low to
        high. None where the config names none: see `resolve_feature_layers`.
    """

    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool
    feature_layers: tuple[int, int, int] | None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        speculators = fields.get("speculators_model_type") is not None
        if speculators:
            fields.refuse("speculators_model_type", "eagle3")
            nested = fields.section("transformer_layer_config")
            if nested is None:
                raise ConfigError(f"{fields.where}: transformer_layer_config is missing")
            decoder = nested
            if "norm_before_residual" not in fields.data:
                raise ConfigError(f"{fields.where}: norm_before_residual is missing")
        else:
            _architecture(
                fields, dict.fromkeys(("LlamaForCausalLMEagle3", "LlamaForCausalLM"), "llama")
            )
            decoder = fields
        for source in (fields, decoder):
            for extra in ("norm_output", "fc_norm", "norm_before_fc", "bias"):
                source.refuse(extra, False)
            source.refuse("num_aux_hidden_states", 3)
        named = speculators or "LlamaForCausalLMEagle3" in (fields.get("architectures") or ())
        if (layers := decoder.get("num_hidden_layers", 1)) != 1 and not named:
            raise ConfigError(
                f"{decoder.where}: num_hidden_layers = {layers!r}, and no architecture of a head: "
                "this looks like a target model, not like a drafter"
            )
        layer = _decoder(decoder)
        vocab = layer["vocab_size"]
        hidden = layer["hidden_size"]
        return cls(
            **layer,
            draft_vocab_size=fields.integer("draft_vocab_size", low=1, high=vocab, default=vocab),
            target_hidden_size=fields.integer(
                "target_hidden_size", low=1, high=MAX_WIDTH, default=hidden
            ),
            norm_before_residual=fields.boolean("norm_before_residual", default=False),
            feature_layers=_feature_layers(fields),
        )

    def resolve_feature_layers(self, target_layers: int) -> tuple[int, int, int]:
        """OUTPUT ids of the target layers that feed this head, low to high.

        The default takes the inputs of layers {2, n//2, n-3}. Under seven layers these
        coincide or fall outside the model, so such a head must name its layers.

        Parameters
        ----------
        target_layers : number n of decoder layers of the target.
        """
        ids = self.feature_layers
        if ids is None:
            if target_layers < 7:
                raise ConfigError(
                    f"a target of {target_layers} layers has no default feature layers (7 or "
                    "more needed); name them in eagle_config.eagle_aux_hidden_state_layer_ids"
                )
            ids = (1, target_layers // 2 - 1, target_layers - 4)
        if ids[2] >= target_layers:
            raise ConfigError(
                f"eagle_aux_hidden_state_layer_ids: output of layer {ids[2]} asked for, but "
                f"the target has {target_layers} layers"
            )
        return ids


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LlamaConfig):
    """Shape of a block drafter: DFlash, DFlash2 or DSpark; sizes and rotary embedding are its own
    layers'.

    Attributes
    ----------
    num_target_layers : of the target it was made for.
    target_layer_ids : OUTPUT ids of the target layers it reads, ascending, the last layer not
        among them.
    block_size : most rows of its pass: the last token, and masks.
    mask_token_id : of the target's vocabulary, the embedding of a mask.
    first_row : that predicts a draft: 1, or 0 for DSpark.
    markov_rank : of what DSpark adds to logits by the draft before; 0: nothing.
    sliding_window : positions that a row sees, its own and those on either side; None: all.
    input_embedding_scale, output_multiplier : of the block's embeddings, and of logits.
    final_logit_softcapping : c of logits c * tanh(l / c); 0: none.
    conv_kernel_size, conv_group_size : of DFlash2's convolutions, rows and columns; 0: none.
    selector_rank, selector_top_k : of DFlash2's selector, and the ids it selects from; 0: none.
    """

    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    first_row: int
    markov_rank: int
    sliding_window: int | None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        spark = "Qwen3DSparkModel"
        second = "DFlash2DraftModel"
        _architecture(fields, dict.fromkeys(("DFlashDraftModel", second, spark), "qwen3"))
        made = (fields.get("architectures") or [None])[0]
        numbers = {
            "input_embedding_scale": 1.0,
            "output_multiplier": 1.0,
            "final_logit_softcapping": 0.0,
        }
        known = {"block_size", "mask_token_id", "target_layer_ids", *numbers}
        sizes = (
            {
                "conv_kernel_size": 64,
                "conv_group_size": MAX_WIDTH,
                "selector_rank": MAX_WIDTH,
                "selector_top_k": MAX_SELECTED,
            }
            if made == second
            else {}
        )
        own = fields
        windows = False
        if made == spark:
            fields.refuse("markov_head_type", "vanilla")
            while numbers:
                fields.refuse(numbers.popitem()[0], False)
        else:
            section = fields.section("dflash_config")
            if section is None:
                raise ConfigError(f"{fields.where}: dflash_config is missing")
            for name in section.data.keys() - known - sizes.keys():
                section.refuse(name)
            own = Fields({**fields.data, **section.data}, section.where)
            windows = fields.boolean("use_sliding_window", default=False)
        if windows:
            fields.boolean("is_causal")  # where it is silent layers with windows are causal
        fields.refuse("is_causal", False)
        decoder = _decoder(fields, "qwen3", windows)
        layers = fields.integer("num_target_layers", low=2, high=MAX_LAYERS)
        ids = own.integers("target_layer_ids") or ()
        if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < layers - 1:
            raise ConfigError(
                f"{own.where}: target_layer_ids {list(ids)}: ascending ids below the last of "
                f"{layers} layers are needed"
            )
        decoder |= {name: own.integer(name, low=1, high=high) for name, high in sizes.items()}
        if sizes and decoder["hidden_size"] % decoder["conv_group_size"]:
            raise ConfigError(
                f"{own.where}: hidden_size {decoder['hidden_size']} is not a multiple of "
                f"conv_group_size {decoder['conv_group_size']}"
            )
        decoder |= {name: own.number(name, default=usual) for name, usual in numbers.items()}
        return cls(
            **decoder,
            head_norm=True,
            num_target_layers=layers,
            target_layer_ids=ids,
            block_size=own.integer("block_size", low=2, high=1 << 10),
            mask_token_id=own.integer("mask_token_id", low=0, high=decoder["vocab_size"] - 1),
            first_row=int(made != spark),
            markov_rank=fields.integer("markov_rank", low=0, high=MAX_WIDTH, default=0),
            sliding_window=fields.integer("sliding_window", low=1, high=MAX_POSITIONS)
            if windows
            else None,
        )


def _quantization(fields: Fields) -> None:
    """Refuse quantised weights but those of E4M3 with scales of rows or matrices.

    Which matrices are quantised is told by their own dtypes. Inputs are not quantised, whatever the
    config says of them: that spares a server work, and no weight depends on it.
    """
    own = fields.section("quantization_config")
    if own is None:
        return
    if own.get("quant_method") is None:
        raise ConfigError(f"{own.where}: quant_method is missing")
    own.refuse("quant_method", *_QUANTIZATION)
    own.only(_QUANTIZATION[own.data["quant_method"]])
    groups = own.section("config_groups")
    for group in filter(None, map(groups.section, groups.data) if groups else ()):
        group.only(_GROUP)
        if (weights := group.section("weights")) is not None:
            weights.only(_WEIGHTS)


def _architecture(fields: Fields, known: Mapping[str, str]) -> str:
    """The model_type, by the architecture's name where that is given."""
    names = fields.get("architectures")
    kind = fields.get("model_type")
    if names is None and kind is None:
        raise ConfigError(f"{fields.where}: neither architectures nor model_type is given")
    if names is None:
        fields.refuse("model_type", *known.values())
        return str(kind)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ConfigError(
            f"{fields.where}: architectures = {names!r} is not implemented ({' or '.join(known)})"
        )
    fields.refuse("model_type", known[names[0]])
    return known[names[0]]


def _decoder(fields: Fields, kind: str = "llama", windows: bool = False) -> dict[str, Any]:
    """The fields every Llama-shaped decoder shares: the arguments of `LlamaConfig`; with `windows`
    its caller has read what slides."""
    fields.refuse("model_type", kind)
    fields.refuse("hidden_act", "silu")
    for switch in ("attention_bias", "mlp_bias", "use_qk_norm"):
        fields.refuse(switch, False)
    fields.refuse("pretraining_tp", 1)
    _quantization(fields)
    fields.refuse("partial_rotary_factor", 1, 1.0)
    known = ["full_attention"]
    if windows:
        known.append("sliding_attention")
    else:
        fields.refuse("use_sliding_window", False)
        fields.refuse("sliding_window")
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(k not in known for k in kinds):
        raise ConfigError(f"{fields.where}: layer_types = {kinds!r} is not implemented")
    hidden = fields.integer("hidden_size", low=1, high=MAX_WIDTH)
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", low=1, high=heads, default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if fields.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{fields.where}: hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}, and head_dim is not given"
        )
    head_dim = fields.integer("head_dim", low=2, high=MAX_HEAD_DIM, default=hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{fields.where}: head_dim {head_dim} is odd; rotary needs pairs")
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if dtype not in FLOATS:
        raise ConfigError(f"{fields.where}: dtype = {dtype!r} is not implemented {FLOATS}")
    return {
        "vocab_size": fields.integer("vocab_size", low=1, high=MAX_VOCAB),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", low=1, high=MAX_WIDTH),
        "num_hidden_layers": fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6, low=1e-12, high=1.0),
        "rope": Rope.from_fields(fields),
        "max_position_embeddings": fields.integer(
            "max_position_embeddings", low=1, high=MAX_POSITIONS, default=2048
        ),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "dtype": dtype,
        "num_nextn_predict_layers": fields.integer(
            "num_nextn_predict_layers", low=0, high=MAX_LAYERS, default=0
        ),
    }


def _feature_layers(fields: Fields) -> tuple[int, int, int] | None:
    """Explicit feature layers as OUTPUT ids.

    Two conventions are in use. Under ``eagle_config`` an id means the layer's output; on the top
    level, in the speculators format and outside of it, boundaries are counted: id j is the input
    of layer j, and j = n the output of the last layer.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = fields.section("eagle_config")
    if nested is not None:
        nested.refuse("use_aux_hidden_state", True)
    ids = nested.integers(name) if nested is not None else None
    if ids is None:
        ids = fields.integers(name)
        if ids is not None:
            ids = tuple(i - 1 for i in ids)
    if ids is None:
        return None
    if len(ids) != 3 or not 0 <= ids[0] < ids[1] < ids[2]:
        raise ConfigError(
            f"{fields.where}: {name} gives layer outputs {list(ids)}; three ascending ids of "
            "decoder layers are needed"
        )
    return ids[0], ids[1], ids[2]
