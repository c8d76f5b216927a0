"""Configurations of target models and drafters, read from Hugging Face ``config.json`` files.

If a field requests a feature that graft does not implement, a `ConfigError` gives the name and
value of the field. No field that would change the output is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from graft.models.errors import ConfigError
from graft.models.json_fields import Fields
from graft.models.llm.rope import MAX_POSITIONS, Rope
from graft.sampling.kernels.loader import MAX_SELECTED

MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_LAYERS = 1 << 10
MAX_HEADS = 1024
MAX_HEAD_DIM = 256
MAX_CONV_SIZE = 64
MAX_BLOCK_SIZE = 1 << 10
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of target models, described by its differences from Llama."""

    model_type: str  # `model_type` in configs
    head_norm: bool = False
    qkv_bias: bool = False
    skips_rope: bool = False  # whether some layers have no RoPE
    rope_theta: float = 10000.0  # RoPE base of a config without `rope_theta`
    # Defaults of absent fields, as in transformers, that differ from the defaults of a Llama.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # fields of the config that have no effect


_LLAMA = Architecture(model_type="llama")
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3 = Architecture(
    model_type="qwen3", head_norm=True, defaults={**_QWEN_DEFAULTS, "head_dim": 128}
)
#: Architectures of target models.
TARGETS = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Architecture(
        model_type="mistral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2", qkv_bias=True, defaults=_QWEN_DEFAULTS, unused=("attention_bias",)
    ),
    "Qwen3ForCausalLM": _QWEN3,
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        skips_rope=True,
        rope_theta=2000000.0,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        unused=("pretraining_tp", "max_window_layers"),
    ),
}

# Allowed values of config fields: `_QUANTIZATION` for `quantization_config` (by quant_method),
# `_QUANTIZATION_GROUP` for each entry of its section `config_groups`, and `_QUANTIZED_WEIGHTS` for
# the section `weights` of such an entry. None allows any value. Fields that are not listed must be
# absent.
_MODULE_LISTS = dict.fromkeys(
    ("quant_method", "ignore", "ignored_layers", "modules_to_not_convert")
)
_QUANTIZATION: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "compressed-tensors": {
        **_MODULE_LISTS,
        "config_groups": None,
        "format": ("float-quantized",),
        "quantization_status": ("compressed", "frozen"),
        "version": None,
        "global_compression_ratio": None,
        "sparsity_config": ({},),
        "transform_config": ({},),
    },
    "fp8": {**_MODULE_LISTS, "activation_scheme": ("dynamic", "static"), "fmt": ("e4m3",)},
}
_QUANTIZATION_GROUP = {
    "targets": None,
    "input_activations": None,
    "weights": None,
    "format": ("float-quantized",),
}
_QUANTIZED_WEIGHTS: dict[str, tuple[Any, ...] | None] = {
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
    """Shape of a Llama decoder, or of an architecture in `TARGETS` that differs from Llama.

    The number of query heads is a multiple of the number of KV heads, and `head_dim` is even.
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
    max_position_embeddings: int  # before YaRN or dynamic scaling extends it
    tie_word_embeddings: bool  # whether the LM head is the embedding matrix
    dtype: str = "float32"  # dtype that the config names for the weights; float32 if it names none
    head_norm: bool = False  # RMSNorm of each query head and key head (Qwen3)
    qkv_bias: bool = False  # biases of the query, key and value projections (Qwen2)
    layers_without_rope: tuple[int, ...] = ()  # ascending layer ids (SmolLM3)
    # Number of positions that a row attends to, including its own; None if no layer has a window.
    sliding_window: int | None = None
    num_nextn_predict_layers: int = 0  # multi-token prediction modules after the last layer

    @classmethod
    def from_dir(cls, path: str | Path) -> Self:
        """Read ``config.json`` of a folder.

        A field that is missing, invalid or not implemented raises ConfigError.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder: a model is a local folder in Hugging Face format. "
                "'hf download REPOSITORY --local-dir FOLDER' downloads a model of the Hugging Face "
                "Hub, and 'graft import FILE.gguf FOLDER' converts a GGUF file"
            )
        return cls.from_fields(Fields.from_file(folder / "config.json"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "config") -> Self:
        """Read a config from a decoded JSON object. Error messages begin with `where`."""
        return cls.from_fields(Fields(data, where))

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Read a config from its fields; raise the same errors as `from_dir`."""
        return cls(**_decoder(fields, _architecture(fields, TARGETS)))

    @property
    def max_length(self) -> int:
        """Maximum sequence length, including the extension by YaRN or dynamic scaling."""
        return self.rope.max_length(self.max_position_embeddings)

    def for_length(self, length: int, where: str | Path) -> Self:
        """Return the config for sequences with at most `length` tokens.

        Some kinds of RoPE scaling depend on `length`. If `length` exceeds the sliding window,
        ConfigError is raised; its message begins with `where`.
        """
        window = self.sliding_window
        if window is not None and window < length:
            raise ConfigError(
                f"{where}: sliding_window = {window} is shorter than max_length = {length}, which "
                f"is not implemented; set max_length to at most {window}"
            )
        return replace(self, rope=self.rope.for_length(length))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LlamaConfig):
    """Shape of an EAGLE-3 draft head.

    The inherited attributes describe the decoder layers of the head, except that `vocab_size` is
    the target's vocabulary size. The RoPE base comes from the head's own config, with the default
    10000; the target's RoPE base is not used.

    Attributes
    ----------
    draft_vocab_size
        Number of columns of the draft logits.
    target_hidden_size
        Hidden size of the target, which is the width of one feature. The default is the hidden
        size of the head.
    norm_before_residual
        Whether the residual stream starts with the normed feature instead of the feature. Some
        converted checkpoints require the normed feature.
    feature_layers
        Ids of the three target layers, ascending, whose outputs are the features. None if the
        config does not name them; `resolve_feature_layers` then uses the default layers.
    """

    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool
    feature_layers: tuple[int, int, int] | None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        is_speculators = fields.get("speculators_model_type") is not None
        if is_speculators:
            decoder = _speculators_decoder(fields)
        else:
            _architecture(
                fields, dict.fromkeys(("LlamaForCausalLMEagle3", "LlamaForCausalLM"), _LLAMA)
            )
            decoder = fields
        for source in (fields, decoder):
            for switch in ("norm_output", "fc_norm", "norm_before_fc", "bias"):
                source.require(switch, False)
            source.require("num_aux_hidden_states", 3)
        architectures = fields.get("architectures") or ()
        is_named = is_speculators or "LlamaForCausalLMEagle3" in architectures
        layers = decoder.get("num_hidden_layers", 1)
        if layers != 1 and not is_named:
            raise ConfigError(
                f"{decoder.where}: num_hidden_layers = {layers!r}, but architectures does not name "
                "a draft head: this looks like a target model, not like a drafter"
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
        """Return the ids of the target layers, ascending, whose outputs are the features.

        The default features are the inputs of layers 2, n//2 and n-3, that is, the outputs of
        layers 1, n//2 - 1 and n - 4, where n is the number of layers of the target. In a target
        with fewer than seven layers, these layers are not three different layers, so the config has
        to name the layers. ConfigError is raised if it does not, or the target has too few layers.
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
                f"eagle_aux_hidden_state_layer_ids names the output of layer {ids[2]}, but the "
                f"target has {target_layers} layers"
            )
        return ids


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LlamaConfig):
    """Shape of a block drafter: DFlash, DFlash2 or DSpark.

    The inherited attributes describe the layers of the drafter. A row attends to its own position
    and to ``sliding_window - 1`` positions on either side.
    """

    num_target_layers: int  # number of layers of the target that the drafter was trained for
    # Ids of the target layers, ascending, whose outputs are the features. The target's last layer
    # is not allowed.
    target_layer_ids: tuple[int, ...]
    block_size: int  # maximum number of rows of a block: the last token, then mask tokens
    mask_token_id: int  # id that represents mask tokens in the target's vocabulary
    first_row: int  # first row of a block that predicts a draft: 0 for DSpark, else 1
    markov_rank: int  # rank of the Markov head (DSpark); 0 for none
    input_embedding_scale: float = 1.0  # factor of the input embeddings
    output_multiplier: float = 1.0  # factor of the logits
    # Cap c: a logit is replaced with c * tanh(logit / c). 0 means no cap.
    final_logit_softcapping: float = 0.0
    conv_kernel_size: int = 0  # number of rows that a convolution spans (DFlash2); 0 for none
    conv_group_size: int = 0  # number of adjacent columns that share a dynamic kernel
    selector_rank: int = 0  # rank of the candidate selector (DFlash2); 0 for none
    selector_top_k: int = 0  # number of candidates per row

    @property
    def kind(self) -> str:
        """Kind of block drafter. A DSpark drafter without a Markov head is a DFlash drafter."""
        if self.selector_rank:
            return "DFlash2"
        return "DSpark" if self.markov_rank else "DFlash"

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        dspark = "Qwen3DSparkModel"
        dflash2 = "DFlash2DraftModel"
        _architecture(fields, dict.fromkeys(("DFlashDraftModel", dflash2, dspark), _QWEN3))
        architecture = (fields.get("architectures") or [None])[0]
        sizes = _DFLASH2_SIZES if architecture == dflash2 else {}
        if architecture == dspark:
            fields.require("markov_head_type", "vanilla")
            for name in _DFLASH_NUMBERS:
                fields.require(name, False)
            fields.require("use_sliding_window", False)
            block = fields
            numbers: dict[str, float] = {}
        else:
            block = _dflash_section(fields, sizes)
            numbers = _DFLASH_NUMBERS
        if fields.boolean("use_sliding_window", default=False):
            # If is_causal is absent, layers with sliding windows are causal. Such layers are not
            # implemented, so the field must be present; its value is checked below.
            fields.boolean("is_causal")
            fields.integer("sliding_window", low=1, high=MAX_POSITIONS)
        fields.require("is_causal", False)
        decoder = _decoder(fields, _QWEN3)
        target_layers = fields.integer("num_target_layers", low=2, high=MAX_LAYERS)
        layer_ids = _target_layer_ids(block, target_layers)
        for name, high in sizes.items():
            decoder[name] = block.integer(name, low=1, high=high)
        if sizes and decoder["hidden_size"] % decoder["conv_group_size"]:
            raise ConfigError(
                f"{block.where}: hidden_size {decoder['hidden_size']} is not a multiple of "
                f"conv_group_size {decoder['conv_group_size']}"
            )
        for name, default in numbers.items():
            decoder[name] = block.number(name, default=default)
        last_token = decoder["vocab_size"] - 1
        return cls(
            **decoder,
            num_target_layers=target_layers,
            target_layer_ids=layer_ids,
            block_size=block.integer("block_size", low=2, high=MAX_BLOCK_SIZE),
            mask_token_id=block.integer("mask_token_id", low=0, high=last_token),
            first_row=int(architecture != dspark),
            markov_rank=fields.integer("markov_rank", low=0, high=MAX_WIDTH, default=0),
        )


#: Optional number fields of `dflash_config` with their defaults; DSpark configs have none of them.
_DFLASH_NUMBERS = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
#: Integer fields of a DFlash2 config, with their maximum values.
_DFLASH2_SIZES = {
    "conv_kernel_size": MAX_CONV_SIZE,
    "conv_group_size": MAX_WIDTH,
    "selector_rank": MAX_WIDTH,
    "selector_top_k": MAX_SELECTED,
}


def _speculators_decoder(fields: Fields) -> Fields:
    """Return the decoder section of an EAGLE-3 config in the speculators format."""
    fields.require("speculators_model_type", "eagle3")
    decoder = fields.section("transformer_layer_config")
    if decoder is None:
        raise ConfigError(f"{fields.where}: transformer_layer_config is missing")
    if "norm_before_residual" not in fields.data:
        raise ConfigError(f"{fields.where}: norm_before_residual is missing")
    return decoder


def _dflash_section(fields: Fields, sizes: Mapping[str, int]) -> Fields:
    """Return the top-level fields, overridden by the fields of the section `dflash_config`.

    The keys of `sizes` are the fields that only the sections of some architectures may contain.
    """
    section = fields.section("dflash_config")
    if section is None:
        raise ConfigError(f"{fields.where}: dflash_config is missing")
    known = {"block_size", "mask_token_id", "target_layer_ids", *_DFLASH_NUMBERS, *sizes}
    for name in section.data.keys() - known:
        section.require(name)
    return Fields({**fields.data, **section.data}, section.where)


def _target_layer_ids(fields: Fields, target_layers: int) -> tuple[int, ...]:
    """Return the ids of the target layers whose outputs a block drafter reads."""
    ids = fields.integers("target_layer_ids") or ()
    is_ascending = list(ids) == sorted(set(ids))
    last_layer = target_layers - 1
    is_valid = bool(ids) and is_ascending and ids[0] >= 0 and ids[-1] < last_layer
    if not is_valid:
        raise ConfigError(
            f"{fields.where}: target_layer_ids {list(ids)}: expected ascending ids below the last "
            f"of {target_layers} layers"
        )
    return ids


def _check_quantization(fields: Fields) -> None:
    """Raise an error unless quantized weights are E4M3 with one scale per row or per matrix.

    Which matrices are quantized follows from their dtypes in the checkpoint, not from the config.
    Settings for quantized inputs are ignored: graft never quantizes inputs, and the weights do not
    depend on these settings.
    """
    section = fields.section("quantization_config")
    if section is None:
        return
    if section.get("quant_method") is None:
        raise ConfigError(f"{section.where}: quant_method is missing")
    section.require("quant_method", *_QUANTIZATION)
    section.require_known(_QUANTIZATION[section.data["quant_method"]])
    groups = section.section("config_groups")
    if groups is None:
        return
    for name in groups.data:
        group = groups.section(name)
        if group is None:
            continue
        group.require_known(_QUANTIZATION_GROUP)
        weights = group.section("weights")
        if weights is not None:
            weights.require_known(_QUANTIZED_WEIGHTS)


def _architecture(fields: Fields, known: Mapping[str, Architecture]) -> Architecture:
    """Return the architecture that the config's field `architectures` or `model_type` names.

    If it is not one of the `known` ones, raise ConfigError.
    """
    names = fields.get("architectures")
    model_type = fields.get("model_type")
    by_type = {architecture.model_type: architecture for architecture in known.values()}
    if names is None and model_type is None:
        raise ConfigError(f"{fields.where}: neither architectures nor model_type is given")
    if names is None:
        fields.require("model_type", *by_type)
        return by_type[model_type]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ConfigError(
            f"{fields.where}: architectures = {names!r} is not implemented ({' or '.join(known)})"
        )
    return known[names[0]]


def _decoder(fields: Fields, architecture: Architecture = _LLAMA) -> dict[str, Any]:
    """Read the fields that all decoders have and return them as arguments of `LlamaConfig`."""
    # As in transformers, only absent fields get the default of the architecture. A null does not.
    fields = Fields({**architecture.defaults, **fields.data}, fields.where)
    _refuse_unimplemented(fields, architecture)
    hidden = fields.integer("hidden_size", low=1, high=MAX_WIDTH)
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if dtype not in FLOATS:
        raise ConfigError(f"{fields.where}: dtype = {dtype!r} is not implemented {FLOATS}")
    heads = _head_shape(fields, hidden)
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    max_positions = fields.integer(
        "max_position_embeddings", low=1, high=MAX_POSITIONS, default=2048
    )
    return {
        "vocab_size": fields.integer("vocab_size", low=1, high=MAX_VOCAB),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", low=1, high=MAX_WIDTH),
        "num_hidden_layers": layers,
        **heads,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6, low=1e-12, high=1.0),
        "rope": Rope.from_fields(
            fields,
            head_dim=heads["head_dim"],
            max_positions=max_positions,
            default_theta=architecture.rope_theta,
        ),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "dtype": dtype,
        "head_norm": architecture.head_norm,
        "qkv_bias": architecture.qkv_bias,
        "layers_without_rope": _layers_without_rope(fields, architecture, layers),
        "sliding_window": _sliding_window(fields, architecture, layers),
        "num_nextn_predict_layers": fields.integer(
            "num_nextn_predict_layers",
            low=0,
            high=0 if architecture.skips_rope else MAX_LAYERS,
            default=0,
        ),
    }


def _head_shape(fields: Fields, hidden: int) -> dict[str, int]:
    """Read the numbers of query and KV heads and the size of a head."""
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
        raise ConfigError(f"{fields.where}: head_dim {head_dim} is odd, but RoPE rotates pairs")
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


#: Supported values of config fields whose other values request features that graft does not
#: implement.
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
}


def _refuse_unimplemented(fields: Fields, architecture: Architecture) -> None:
    fields.require("model_type", architecture.model_type)
    for name, allowed in _IMPLEMENTED.items():
        if name not in architecture.unused:
            fields.require(name, *allowed)
    _check_quantization(fields)


def _layers_without_rope(
    fields: Fields, architecture: Architecture, layers: int
) -> tuple[int, ...]:
    if not architecture.skips_rope:
        fields.require("no_rope_layers")
        fields.require("no_rope_layer_interval")
        return ()
    # Despite its name, the list contains a 1 for each layer with RoPE and a 0 for one without.
    has_rope = fields.integers("no_rope_layers")
    if has_rope is None:
        interval = fields.integer("no_rope_layer_interval", low=1, high=MAX_LAYERS)
        return tuple(range(interval - 1, layers, interval))
    if len(has_rope) < layers or not set(has_rope) <= {0, 1}:
        raise ConfigError(
            f"{fields.where}: no_rope_layers = {list(has_rope)}: expected a 0 or 1 for each of "
            f"{layers} layers"
        )
    return tuple(i for i in range(layers) if not has_rope[i])


def _sliding_window(fields: Fields, architecture: Architecture, layers: int) -> int | None:
    """Return the size of the attention window in tokens, or None if no layer has a sliding window.

    If `use_sliding_window` is absent, all layers have the window (Mistral). If it is true,
    `layer_types` tells which layers have the window. If `layer_types` is absent, these are the
    layers from `max_window_layers` on (Qwen).
    """
    kinds = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None and not (isinstance(kinds, list) and all(k in known for k in kinds)):
        raise ConfigError(f"{fields.where}: layer_types = {kinds!r} is not implemented {known}")
    slides = kinds is not None and "sliding_attention" in kinds
    switch = fields.get("use_sliding_window")
    has_window = fields.boolean("use_sliding_window", default=True)
    has_window = has_window and fields.get("sliding_window") is not None
    if slides and not has_window:
        raise ConfigError(
            f"{fields.where}: layer_types has sliding_attention, but sliding_window is "
            f"{fields.get('sliding_window')!r} and use_sliding_window is {switch!r}"
        )
    if switch is True and kinds is not None:
        has_window = slides
    elif switch is True and "max_window_layers" not in architecture.unused:
        first = fields.integer("max_window_layers", low=0, high=MAX_POSITIONS, default=0)
        has_window = has_window and first < layers
    if not has_window:
        return None
    return fields.integer("sliding_window", low=1, high=MAX_POSITIONS)


def _feature_layers(fields: Fields) -> tuple[int, int, int] | None:
    """Return the layers whose outputs are the features of an EAGLE-3 head; None if not configured.

    There are two numberings of feature layers. In the section ``eagle_config``, id j means the
    output of layer j. In a top-level field, which the speculators format and others use, id j means
    the input of layer j, which is the output of layer j - 1. There, the number of layers is a valid
    id, which means the output of the last layer.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = fields.section("eagle_config")
    ids = None
    if nested is not None:
        nested.require("use_aux_hidden_state", True)
        ids = nested.integers(name)
    if ids is None:
        boundaries = fields.integers(name)
        if boundaries is not None:
            ids = tuple(i - 1 for i in boundaries)
    if ids is None:
        return None
    is_valid = len(ids) == 3 and 0 <= ids[0] < ids[1] < ids[2]
    if not is_valid:
        raise ConfigError(
            f"{fields.where}: {name} gives layer outputs {list(ids)}; expected three ascending ids "
            "of decoder layers"
        )
    return ids[0], ids[1], ids[2]
