"""Model configurations: defaults, rejected fields and RoPE frequencies."""

import itertools
import json
import os

import numpy as np
import numpy_llama
import pytest
from model_util import FIXTURES
from tiny_models import llama_config, make_tiny_eagle3, make_tiny_llama

from graft.models import json_fields as fields
from graft.models.errors import ConfigError
from graft.models.llm.config import TARGETS, Eagle3Config, LlamaConfig
from graft.models.llm.rope import Linear, Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.0, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
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
        ("architectures", ["GemmaForCausalLM"]),
        ("no_rope_layers", [1, 0, 1]),
        ("no_rope_layer_interval", 4),
        ("architectures", []),
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("pretraining_tp", 2),
        ("sliding_window", 0),
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
        ("rope_scaling", {"rope_type": "proportional", "factor": 4.0}),
        ("rope_scaling", {"rope_type": ["yarn"], "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("rope_scaling", {**YARN, "beta_fast": 1.0}),
        ("rope_scaling", {**YARN, "truncate": 1}),
        ("rope_scaling", {**YARN, "attention_factor": 0}),
        ("rope_scaling", {**YARN, "llama_4_scaling_beta": 0.1}),
        ("rope_scaling", {"full_attention": YARN}),
        ("rope_scaling", {"rope_type": "default", "factor": 2.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 0.5}),
        (
            "rope_scaling",
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128},
        ),
        ("rope_scaling", {**LONG_ROPE, "long_factor": [1.0] * 3}),
        ("rope_scaling", {**LONG_ROPE, "short_factor": [1.0, 0.0, 1.0, 1.0]}),
        ("rope_scaling", {**LONG_ROPE, "short_factor": 2.0}),
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
    wanted = {"torch_dtype": "dtype", "rope_scaling": "rope_scaling"}.get(name, name)
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
def test_llama_config_rejects_unreadable_files(tmp_path, monkeypatch, make, words):
    """A config.json that is too large or not a regular file with a JSON object raises an error."""
    make(tmp_path / "config.json")
    if words.startswith("more"):
        monkeypatch.setattr(fields, "_MAX_BYTES", 10)
    with pytest.raises(ConfigError, match=words.format(folder=tmp_path)):
        LlamaConfig.from_dir(tmp_path)


def test_llama_config_of_hub_name_or_gguf_file_says_how_to_get_a_folder(tmp_path):
    (tmp_path / "model.gguf").touch()
    for path in ("owner/name", tmp_path / "model.gguf"):
        with pytest.raises(
            ConfigError, match=r"is not a folder.*hf download.*graft import"
        ) as error:
            LlamaConfig.from_dir(path)
        assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("scaling", "more"),
    [
        ({"type": "linear", "factor": 2}, {}),
        ({"type": "linear", "rope_type": "linear", "factor": 2.0}, {}),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}, {}),
        ({"rope_type": "linear", "factor": 2.0, "finetuned": True}, {}),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": None}, {}),
        (None, {}),
        ({}, {}),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_theta": None}),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_parameters": {}}),
    ],
)
def test_rope_accepts_equivalent_forms(scaling, more):
    """Two sections with equivalent contents are accepted. An empty section counts as absent."""
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    fields = {"rope_parameters": parameters, "rope_scaling": scaling, **more}
    assert read(**fields).rope == Rope(10000.0, Linear(2.0))


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": {**LINEAR, "factor": 4.0}, "rope_scaling": LINEAR}, "differ; remove"),
        ({"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": LINEAR}, "differ; remove"),
        ({"rope_scaling": {**LINEAR, "type": "dynamic"}}, "'linear' and type 'dynamic' differ"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type is missing, but factor is given"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}}, "rope_type is missing"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            r"rope_theta has different values: 10000\.0 in config, 1000000\.0 in config: rope_para",
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {**LINEAR, "rope_theta": 5.0},
                "rope_scaling": {**LINEAR, "rope_theta": 6.0},
            },
            "rope_theta has different values: 5.0 .* 6.0",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 32},
            "original_max_position_embeddings has different values: 32 .* 64",
        ),
    ],
)
def test_rope_rejects_contradicting_fields(fields, words):
    """Sections, types, bases and lengths that differ, and scaling without a type, are rejected."""
    with pytest.raises(ConfigError, match=words):
        read(**fields)


def test_yarn_fields_default_as_in_transformers():
    """If the original length or the factor is absent, it follows from the other fields."""
    whole = {**YARN, "original_max_position_embeddings": None}
    assert read(rope_scaling=whole).rope.scaling.original == 256
    assert read(rope_scaling=whole, original_max_position_embeddings=32).rope.scaling.original == 32
    assert read(rope_scaling={**YARN, "factor": None}) == read(rope_scaling=YARN)
    assert read(rope_scaling=YARN).rope.scaling.attention_factor == 0.1 * np.log(4.0) + 1.0
    assert read(rope_scaling={**YARN, "mscale": 1.0}).rope == read(rope_scaling=YARN).rope
    both = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert read(rope_scaling=both).rope.scaling.attention_factor == 1.0


FREQUENCIES = json.loads((FIXTURES / "rope_scaling" / "frequencies.json").read_text())


@pytest.mark.parametrize("case", FREQUENCIES)
def test_rope_frequencies_equal_transformers_at_real_sizes(case):
    """Frequencies and attention factors equal those of transformers, in both forms of the config.

    The RoPE table contains the cosines and sines, multiplied by the attention factor.
    """
    wanted = FREQUENCIES[case]
    fields = {**wanted["config"], "num_key_value_heads": None, "head_dim": None}
    parameters = fields.pop("rope_parameters")
    theta = parameters["rope_theta"]
    older = {name: value for name, value in parameters.items() if name != "rope_theta"}
    older["type"] = older.pop("rope_type")
    for form in (
        {"rope_parameters": parameters, "rope_theta": None},
        {"rope_scaling": older, "rope_theta": theta},
    ):
        rope = read(**fields, **form).rope
        np.testing.assert_allclose(rope.frequencies(128), wanted["frequencies"], rtol=5e-7)
        assert rope.scaling.attention_factor == wanted["attention_factor"]
        table = rope.table(5000, 128)
        angle = np.float32(4999) * rope.frequencies(128)
        expected = np.concatenate([np.cos(angle), np.sin(angle)]) * wanted["attention_factor"]
        np.testing.assert_allclose(table[-1], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        ({"type": "linear", "factor": 2.0}, 256),
        ({**YARN, "factor": 8.0}, 512),
        ({**YARN, "factor": 2.0}, 256),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"type": "dynamic", "factor": 1e9}, 1 << 24),
        (LONG_ROPE, 256),
    ],
)
def test_llama_config_max_length_includes_rope_scaling(scaling, length):
    assert read(rope_scaling=scaling).max_length == length


def test_rope_scaling_by_length_depends_on_maximum_length_only():
    """With LongRoPE and dynamic scaling, all sequences use the table of the maximum length."""
    config = read(rope_scaling=LONG_ROPE)
    tables = {n: config.for_length(n, "model").rope.table(8, 8) for n in (64, 65, 256)}
    assert not np.array_equal(tables[64], tables[65])
    np.testing.assert_array_equal(tables[65], tables[256])
    config = read(rope_scaling={"type": "dynamic", "factor": 3.0})
    assert config.for_length(256, "model").rope == Rope(10000.0)
    assert config.for_length(257, "model").rope == config.for_length(768, "model").rope
    # The base is that of transformers for sequences of 3 * 256 tokens.
    base = 10000.0 * (3.0 * 768 / 256 - 2.0) ** (8 / 6)
    wanted = Rope(base).frequencies(8)
    np.testing.assert_array_equal(config.rope.frequencies(8), wanted)


#: Relevant fields of published configs, by model.
PUBLISHED = {
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3-8B with YaRN": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "Mistral-Nemo": {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 128000,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    """Configs of popular models are accepted, with the right length and without a window."""
    config = LlamaConfig.from_dict(PUBLISHED[name])
    assert config.sliding_window is None and config.head_dim == 128
    lengths = {"Qwen3-8B with YaRN": 131072}
    assert config.max_length == lengths.get(name, PUBLISHED[name]["max_position_embeddings"])
    assert config.qkv_bias == name.startswith("Qwen2")
    skipped = tuple(range(3, 36, 4)) if name == "SmolLM3-3B" else ()
    assert config.layers_without_rope == skipped


def read_architecture(name, **overrides) -> LlamaConfig:
    """Read a config of another architecture; an override of None is a null in the config."""
    fields = llama_config(architectures=[name], model_type=TARGETS[name].model_type)
    return LlamaConfig.from_dict({**fields, **overrides})


@pytest.mark.parametrize("name", TARGETS)
def test_architecture_defaults_equal_transformers(name):
    """Absent fields get the defaults that transformers has for the architecture."""
    defaults = {  # KV heads, head_dim, positions, base, tied embeddings, window
        "LlamaForCausalLM": (32, 8, 2048, 1e4, False, None),
        "MistralForCausalLM": (8, 8, 131072, 1e4, False, 4096),
        "Qwen2ForCausalLM": (32, 8, 32768, 1e4, False, None),
        "Qwen3ForCausalLM": (32, 128, 32768, 1e4, False, None),
        "SmolLM3ForCausalLM": (4, 8, 32768, 2e6, True, None),
    }
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    fields = {size: llama_config()[size] for size in sizes}
    fields |= {"architectures": [name], "num_attention_heads": 32, "hidden_size": 256}
    config = LlamaConfig.from_dict(fields)
    assert (
        config.num_key_value_heads,
        config.head_dim,
        config.max_position_embeddings,
        config.rope.theta,
        config.tie_word_embeddings,
        config.sliding_window,
    ) == defaults[name]
    del fields["architectures"]
    assert LlamaConfig.from_dict({**fields, "model_type": TARGETS[name].model_type}) == config
    assert (
        LlamaConfig.from_dict(
            {**fields, "model_type": TARGETS[name].model_type, "num_key_value_heads": None}
        ).num_key_value_heads
        == 32
    )


SLIDING = ["full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("name", "fields", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("LlamaForCausalLM", {"sliding_window": 64}, 64),
        ("LlamaForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 64}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, None),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, 4096),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": SLIDING}, 4096),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": SLIDING[:2]}, None),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9}, 9),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 28}, None),
    ],
)
def test_sliding_window_is_read_only_where_it_is_in_use(name, fields, window):
    config = read_architecture(name, **fields)
    assert config.sliding_window == window
    if window is not None:
        assert config.for_length(window, "model") == config
        with pytest.raises(ConfigError, match=rf"model: sliding_window = {window} is shorter"):
            config.for_length(window + 1, "model")


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 64}])
def test_sliding_layers_without_window_are_rejected(fields):
    with pytest.raises(ConfigError, match="layer_types has sliding_attention"):
        read_architecture("Qwen3ForCausalLM", layer_types=SLIDING, **fields)


def test_smollm3_config_lists_layers_without_rope():
    """A 0 in no_rope_layers means a layer without RoPE. The default is every fourth layer."""
    name = "SmolLM3ForCausalLM"
    layers = {"num_hidden_layers": 9}
    assert read_architecture(name, **layers).layers_without_rope == (3, 7)
    config = read_architecture(name, **layers, no_rope_layer_interval=3, pretraining_tp=2)
    assert config.layers_without_rope == (2, 5, 8)
    config = read_architecture(name, no_rope_layers=[0, 1, 0, 0], no_rope_layer_interval=2)
    assert config.layers_without_rope == (0, 2)
    for wrong in ([1, 0], [1, 0, 2], [], "all"):
        with pytest.raises(ConfigError, match="no_rope_layers"):
            read_architecture(name, no_rope_layers=wrong)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        read_architecture(name, num_nextn_predict_layers=1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 300000.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
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


def eagle(tmp_path, *, layers=8, names="official", **overrides) -> Eagle3Config:
    target = llama_config(num_hidden_layers=layers)
    make_tiny_eagle3(tmp_path, target, draft_vocab=64, names=names, **overrides)
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


def test_eagle3_config_reads_rope_scaling_and_unused_window(tmp_path):
    """A head reads the RoPE scaling of its config, and ignores a window that is not in use."""
    window = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 36}
    config = eagle(tmp_path, rope_scaling=YARN, **window)
    assert config.rope == read(rope_scaling=YARN).rope and config.sliding_window is None
    nested = eagle(tmp_path / "b", names="speculators", rope_scaling=YARN)
    assert nested.rope == config.rope


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
