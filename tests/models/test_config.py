"""Model configurations: defaults, rejected fields and RoPE frequencies."""

import itertools
import json
import os

import numpy as np
import numpy_llama
import pytest
from tiny_models import llama_config, make_tiny_eagle3, make_tiny_llama

from graft.models import json_fields as fields
from graft.models.errors import ConfigError
from graft.models.llm.config import Eagle3Config, LlamaConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**overrides) -> LlamaConfig:
    return LlamaConfig.from_dict(llama_config(**overrides))


def test_llama_config_defaults():
    """Fields that a config does not contain get the default values of Hugging Face transformers.

    The number of KV heads defaults to the number of heads, head_dim to hidden_size / heads (which
    must be an integer), tie_word_embeddings to false, and the RoPE base to 10000.
    """
    absent = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta")
    config = read(**dict.fromkeys(absent))
    assert (config.num_key_value_heads, config.head_dim) == (6, 8)
    assert not config.tie_word_embeddings and config.rope.theta == 10000.0
    with pytest.raises(ConfigError, match="hidden_size 50"):
        read(hidden_size=50, head_dim=None)


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(SIZES, (None, 0, -4, 1 << 40, "48", 4.5, True, [3])),
        ("architectures", ["MistralForCausalLM"]),
        ("architectures", []),
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("pretraining_tp", 2),
        ("sliding_window", 4096),
        ("quantization_config", {"bits": 4}),
        ("head_dim", 7),
        ("head_dim", 512),
        ("num_key_value_heads", 4),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0.0),
        ("max_position_embeddings", 0),
        ("torch_dtype", "float64"),
        ("tie_word_embeddings", "yes"),
        ("layer_types", ["sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
        ("rope_scaling", "linear"),
        ("rms_norm_eps", 10**400),
        ("torch_dtype", ["float32"]),
    ],
)
def test_llama_config_rejects_invalid_fields(name, value):
    """Missing or invalid sizes and unimplemented options raise an error that names the field.

    If the field is a size, the error also contains its value.
    """
    wanted = {"torch_dtype": "dtype", "rope_scaling": "rope|factor"}.get(name, name)
    with pytest.raises(ConfigError, match=wanted) as refused:
        read(**{name: value})
    if name in SIZES and value is not None:
        assert repr(value) in str(refused.value) or str(value) in str(refused.value)


NO_OBJECTS = ["{", "[1, 2]", '"config"', '{"a":' * 99999, "[1" + "0" * 5000]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((lambda file, text=text: file.write_text(text), r"config\.json") for text in NO_OBJECTS),
        (os.mkfifo, "not a regular file"),
        (lambda file: file.symlink_to("/dev/zero"), "not a regular file"),
        (lambda file: make_tiny_llama(file.parent), "more than 10"),
        (str, "{folder}"),
    ],
)
def test_llama_config_rejects_unreadable_files(
    tmp_path,
    monkeypatch,
    make,
    words,
):
    """A config.json that is too large or not a regular file with a JSON object raises an error."""
    make(tmp_path / "config.json")
    if words.startswith("more"):
        monkeypatch.setattr(fields, "_MAX_BYTES", 10)
    with pytest.raises(ConfigError, match=words.format(folder=tmp_path)):
        LlamaConfig.from_dir(tmp_path)


def test_rope_parameters_and_rope_scaling_must_agree():
    """A config whose rope_parameters and rope_scaling sections differ is rejected."""
    linear = {"rope_type": "linear", "factor": 2.0}
    assert read(rope_scaling=linear, rope_parameters=linear).rope.factor == 2.0
    with pytest.raises(ConfigError, match=r"rope_parameters .* and rope_scaling .* differ"):
        read(rope_scaling=linear, rope_parameters={**linear, "factor": 4.0})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "linear", "factor": 2.5},
        },
        {
            "rope_theta": None,
            "rope_parameters": {**LLAMA3, "rope_theta": 300000.0},
        },
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ],
)
def test_rope_frequencies_equal_reference(rope):
    """Frequencies and table equal the reference for every RoPE kind, in both config formats."""
    data = llama_config(head_dim=64, **rope)
    config = LlamaConfig.from_dict(data)
    wanted = numpy_llama.inverse_frequencies(data, 64)
    np.testing.assert_allclose(config.rope.frequencies(64), wanted, rtol=1e-6)
    table = config.rope.table(100, 64)
    assert table.dtype == np.float32 and table.shape == (100, 64)
    np.testing.assert_allclose(table[77, :32], np.cos(77 * wanted), atol=1e-5)
    np.testing.assert_allclose(table[77, 32:], np.sin(77 * wanted), atol=1e-5)


def eagle(
    tmp_path,
    *,
    layers=8,
    names="official",
    **overrides,
) -> Eagle3Config:
    target = llama_config(num_hidden_layers=layers)
    make_tiny_eagle3(
        tmp_path,
        target,
        draft_vocab=64,
        names=names,
        **overrides,
    )
    return Eagle3Config.from_dir(tmp_path)


def test_eagle3_config_reads_flat_and_speculators_formats(tmp_path):
    """The official and the speculators format of an EAGLE-3 head are read as equal configs.

    The configs have equal feature layers. The default RoPE base is 10000.
    """
    assert eagle(tmp_path).rope.theta == 10000.0
    assert eagle(tmp_path, rope_theta=25000.0).rope.theta == 25000.0
    flat = eagle(tmp_path / "a", layers=4)
    nested = eagle(tmp_path / "b", layers=4, names="speculators")
    assert flat == nested
    assert flat.feature_layers == (0, 2, 3) and flat.draft_vocab_size == 64
    data = json.loads((tmp_path / "a" / "config.json").read_text())
    data["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]  # on the top level, ids count layer inputs
    del data["eagle_config"]
    assert Eagle3Config.from_dict(data) == flat


def test_eagle3_config_rejects_target_checkpoint(tmp_path):
    make_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"num_hidden_layers = 3, .* looks like a target"):
        Eagle3Config.from_dir(tmp_path)


@pytest.mark.parametrize(("layers", "ids"), [(7, (1, 2, 3)), (8, (1, 3, 4)), (32, (1, 15, 28))])
def test_eagle3_config_default_feature_layers(tmp_path, layers, ids):
    """For a target with n layers, the default feature layers are 1, n//2 - 1 and n - 4.

    For a target with fewer than seven layers there is no default.
    """
    config = eagle(tmp_path, layers=layers)
    assert config.feature_layers is None
    assert config.resolve_feature_layers(layers) == ids
    for small in (1, 2, 4, 6):
        with pytest.raises(ConfigError, match=f"{small} layers"):
            config.resolve_feature_layers(small)


LAYERS = "eagle_aux_hidden_state_layer_ids"


def test_eagle3_config_rejects_feature_layers_beyond_target(tmp_path):
    """The output of the last layer is allowed as a feature; a later layer is an error."""
    config = eagle(tmp_path, eagle_config={LAYERS: [1, 3, 7]})
    assert config.resolve_feature_layers(8) == (1, 3, 7)
    with pytest.raises(ConfigError, match="layer 7"):
        config.resolve_feature_layers(7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_output", True),
        ("norm_before_fc", True),
        ("fc_norm", True),
        ("bias", True),
        ("num_hidden_layers", 0),
        ("num_aux_hidden_states", 5),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", 100000),
        ("architectures", ["EagleLlamaForCausalLM"]),
        ("target_hidden_size", -1),
        ("norm_before_residual", "true"),
        *(
            ("eagle_config", {LAYERS: ids})
            for ids in ([0, 1], [0, 1, 1], [2, 1, 0], [-1, 0, 1], [0, 1, 2, 3], ["a"])
        ),
    ],
)
def test_eagle3_config_rejects_unimplemented_heads(tmp_path, name, value):
    """An unimplemented option, an invalid size or an invalid layer id raises an error.

    The error names the field. Feature layers must be three ascending layer ids.
    """
    eagle(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=LAYERS if name == "eagle_config" else name):
        Eagle3Config.from_dict({**data, name: value})


def test_speculators_config_requires_norm_before_residual(tmp_path):
    """The speculators format requires `norm_before_residual` and `transformer_layer_config`."""
    eagle(tmp_path, names="speculators")
    data = json.loads((tmp_path / "config.json").read_text())
    del data["norm_before_residual"]
    with pytest.raises(ConfigError, match="norm_before_residual"):
        Eagle3Config.from_dict(data)
    data = {**data, "norm_before_residual": True}
    del data["transformer_layer_config"]
    with pytest.raises(ConfigError, match="transformer_layer_config"):
        Eagle3Config.from_dict(data)
