"""Tests of ``graft import``: converted weights, config and tokenizer, and unsupported files."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_models import QWEN2, SMOLLM3, llama_config, llama_tensors, make_tiny_tokenizer

from graft.cudagraph.driver.dtypes import from_float32
from graft.models.errors import ConfigError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.tokenizer import Tokenizer
from graft.tools import cli
from graft.tools.gguf import convert as gguf_import
from graft.tools.gguf.convert import GgufError, convert
from graft.tools.gguf.tokenizer import GgufTokenizerError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
Q = gguf.GGMLQuantizationType
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "eos_token_id": [0],
}
GGUF_LAYER_TENSORS = {
    hf: name
    for tensors in (
        gguf_import.LAYER_TENSORS,
        gguf_import.BIAS_TENSORS,
        gguf_import.HEAD_NORM_TENSORS,
    )
    for name, hf in tensors.items()
}
GGUF_MODEL_TENSORS = {hf: name for name, hf in gguf_import.MODEL_TENSORS.items()}


def interleave_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection as llama.cpp does for GGUF files.

    In the result, rows of the first half of a head alternate with rows of the second half.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(0, 2, 1, 3).reshape(weight.shape)


def write_gguf(
    file: Path,
    folder: Path,
    config: dict,
    weights: dict,
    kind=Q.F32,
    *,
    architecture="llama",
    kinds=None,
    **changed,
) -> None:
    """Write a GGUF file of a tiny model and its tokenizer.

    Matrices have the quantization `kind`, except those in `kinds`. The keyword arguments `changed`
    replace metadata values by key; the value None removes the key. Keys that begin with ``llama.``
    get the name of the architecture in its place.
    """
    writer = gguf.GGUFWriter(str(file), architecture)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    tokens += [f"[unused {i}]" for i in range(config["vocab_size"] - len(tokens))]
    values = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": 256,
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **changed,
    }
    for key, value in values.items():
        if key.startswith("llama."):
            key = architecture + key.removeprefix("llama")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, weight in weights.items():
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name and architecture in ("llama", "smollm3"):
                weight = interleave_rows(weight, heads)
        stored = (kinds or {}).get(name, kind) if weight.ndim == 2 else Q.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor of the model; return any other name unchanged."""
    if name in GGUF_MODEL_TENSORS:
        return GGUF_MODEL_TENSORS[name]
    parts = name.split(".")
    if parts[0] != "model":
        return name
    return f"blk.{parts[2]}.{GGUF_LAYER_TENSORS['.'.join(parts[3:])]}"


@pytest.fixture
def tiny(tmp_path):
    """Return a function that writes a GGUF file of a tiny model.

    The function returns the path of the file, the config and the weights.
    """
    make_tiny_tokenizer(tmp_path / "hf")

    def make(kind=Q.F32, weights=None, tied=True, fields=None, **changed):
        config = llama_config(**TINY, tie_word_embeddings=tied, **(fields or {}))
        tensors = llama_tensors(config, 3) | (weights or {})
        write_gguf(tmp_path / "m.gguf", tmp_path / "hf", config, tensors, kind, **changed)
        return tmp_path / "m.gguf", config, tensors

    return make


@pytest.mark.parametrize(
    ("kind", "dtype", "tied"),
    [
        (Q.F32, "float32", True),
        (Q.F16, "float16", False),
        (Q.BF16, "bfloat16", True),
        (Q.Q8_0, "bfloat16", True),
    ],
)
def test_gguf_import_preserves_weights_and_config(tiny, tmp_path, kind, dtype, tied):
    """Matrices of 32 and 16 bits are copied exactly. Vectors are copied in float32."""
    file, config, weights = tiny(kind, tied=tied)
    folder = convert(file, tmp_path / "out")
    assert LlamaConfig.from_dir(folder) == LlamaConfig.from_dict(config | {"torch_dtype": dtype})
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names) == set(weights)
    for name, weight in weights.items():
        expected = "float32"
        if weight.ndim == 2:
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
            expected = dtype
        stored, stored_dtype = checkpoint.get(name)
        assert stored_dtype == expected, name
        assert np.array_equal(stored, from_float32(weight, expected)), name


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize(
    ("architecture", "fields"), [("qwen2", QWEN2), ("qwen3", QWEN3), ("smollm3", SMOLLM3)]
)
def test_gguf_import_preserves_other_architectures(tiny, tmp_path, architecture, fields):
    """Biases and head norms are copied. Of these models, only SmolLM3 has interleaved rows."""
    norms = {}
    if architecture == "qwen3":
        for i, name in itertools.product(range(2), ("q_norm", "k_norm")):
            weight = np.random.default_rng(i).standard_normal(16, np.float32)
            norms[f"model.layers.{i}.self_attn.{name}.weight"] = weight
    fields = fields | ({"no_rope_layer_interval": 4} if architecture == "smollm3" else {})
    file, config, weights = tiny(weights=norms, fields=fields, architecture=architecture)
    folder = convert(file, tmp_path / "out")
    assert LlamaConfig.from_dir(folder) == LlamaConfig.from_dict(config)
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(checkpoint.get(name)[0], weight)


@pytest.mark.parametrize(
    ("changed", "scaling"),
    [
        ({"scaling.type": "linear", "scaling.factor": 2.5}, {"type": "linear", "factor": 2.5}),
        ({"scaling.factor": 2.5}, {"type": "linear", "factor": 2.5}),
        ({"scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"scaling.type": "none", "scaling.factor": 2.5}, None),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, None),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 64,
                "scaling.yarn_beta_fast": 16.0,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
            },
        ),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, {"type": "yarn", "factor": 4.0}),
    ],
)
def test_gguf_import_preserves_rope_scaling(tiny, tmp_path, changed, scaling):
    """YaRN and linear scaling are read. A factor without a type is linear, as in llama.cpp."""
    changed = {f"llama.rope.{key}": value for key, value in changed.items()}
    file, config, _ = tiny(fields=QWEN2, architecture="qwen2", **changed)
    folder = convert(file, tmp_path / "out")
    expected = LlamaConfig.from_dict(config | {"rope_scaling": scaling})
    assert LlamaConfig.from_dir(folder) == expected


@pytest.mark.parametrize(
    ("architecture", "fields"), [("llama", {}), ("qwen2", QWEN2)], ids=["llama", "qwen2"]
)
def test_gguf_import_preserves_sliding_window(tiny, tmp_path, architecture, fields):
    window = {"llama.attention.sliding_window": 32}
    file, *_ = tiny(fields=fields, architecture=architecture, **window)
    assert LlamaConfig.from_dir(convert(file, tmp_path / "out")).sliding_window == 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gguf_import_dtype_option_rounds_matrices(tiny, tmp_path, dtype):
    file, _, weights = tiny(Q.F32)
    out = tmp_path / "out"
    assert cli.main(["import", str(file), str(out), "--dtype", dtype]) == 0
    name = "model.layers.0.mlp.down_proj.weight"
    assert Checkpoint(out).get(name)[1] == dtype
    assert np.array_equal(Checkpoint(out).get(name)[0], from_float32(weights[name], dtype))


def test_gguf_import_of_mixed_precisions_keeps_the_widest(tiny, tmp_path):
    file, _, _ = tiny(Q.F16, kinds={"model.embed_tokens.weight": Q.BF16})
    assert LlamaConfig.from_dir(convert(file, tmp_path / "out")).dtype == "float32"


def test_gguf_import_rejects_values_that_overflow_the_dtype(tiny, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    large = np.full((96, 64), 70000, np.float32)
    file, _, _ = tiny(weights={name: large})
    with pytest.raises(GgufError, match=r"blk.1.ffn_up.weight has values above the range"):
        convert(file, tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()


def test_gguf_import_preserves_byte_level_tokenizer(tiny, tmp_path):
    """The converted tokenizer gives the same ids and texts as the original tokenizer.

    It also has the same special tokens and the same chat template.
    """
    folder = convert(tiny()[0], tmp_path / "out")
    original = Tokenizer(tmp_path / "hf")
    imported = Tokenizer(folder)
    for text in ('{"name": "é 日本", "value": [10, 100]}', "the<eos> being  on\n\n"):
        ids = original.encode(text)
        assert imported.encode(text) == ids
        assert imported.decode(ids) == original.decode(ids)
    assert imported.stop_ids == original.stop_ids
    assert imported.special_names == original.special_names
    assert imported.render([{"content": "hello"}]) == "hello"


def test_gguf_import_sentencepiece_merges_by_score(tiny, tmp_path):
    """Tokens with higher scores are merged first, and unknown characters become byte tokens."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "▁a",
    ]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -4.0]
    pad = 320 - len(tokens)
    file, *_ = tiny(
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.pre": None,
            "tokenizer.ggml.tokens": tokens + [f"[unused {i}]" for i in range(pad)],
            "tokenizer.ggml.scores": scores + [-99.0] * pad,
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (7 + pad),
        }
    )
    tokenizer = Tokenizer(convert(file, tmp_path / "out"))
    ids = tokenizer.encode("abcé")
    assert [tokens[i] for i in ids] == ["<s>", "▁a", "bc", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "abcé"
    assert tokenizer.stop_ids == (2,)


def test_gguf_import_derives_llama3_rope_scaling_from_factors(tiny, tmp_path):
    """The parameters of Llama 3's RoPE scaling are derived from the frequency factors of the file.

    Factors that do not follow Llama 3's formula raise an error.
    """
    published = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wave = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    file, *_ = tiny(weights={"rope_freqs.weight": factors})
    config = json.loads((convert(file, tmp_path / "out") / "config.json").read_text())
    assert config["rope_parameters"] == published
    file, *_ = tiny(weights={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(GgufError, match=r"rope_freqs.weight does not follow Llama 3's"):
        convert(file, tmp_path / "other")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"architecture": "gemma"}, GgufError, "architecture 'gemma'"),
        ({"llama.expert_count": 8}, GgufError, "llama.expert_count = 8"),
        ({"llama.rope.dimension_count": 8}, GgufError, "llama.rope.dimension_count = 8"),
        ({"llama.rope.scaling.type": "longrope"}, GgufError, "'longrope'"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.5},
            GgufError,
            "llama.rope.scaling.attn_factor = 1.5",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            GgufError,
            "yarn_log_multiplier = 0.1",
        ),
        ({"llama.attention.scale": 0.5}, GgufError, "llama.attention.scale = 0.5"),
        (
            {"llama.embedding_scale": 12.0},
            GgufError,
            "llama.embedding_scale = 12 .* must be 0 or 1",
        ),
        ({"llama.final_logit_softcapping": 30.0}, GgufError, "final_logit_softcapping = 30"),
        ({"llama.rope.scaling.factor": "2"}, GgufError, "rope.scaling.factor .* got '2'"),
        ({"llama.block_count": 1}, GgufError, r"tensor blk.1.* is not part of a LlamaForCausalLM"),
        ({"llama.block_count": 3}, GgufError, r"tensor blk.2.* is missing"),
        ({"llama.block_count": None}, GgufError, "llama.block_count is missing"),
        ({"llama.attention.head_count": 0}, ConfigError, "num_attention_heads is 0"),
        ({"llama.attention.head_count_kv": [2, 2]}, GgufError, r"head_count_kv .* got \[2, 2\]"),
        (
            {"tokenizer.ggml.token_type": [1, 1]},
            GgufTokenizerError,
            "320 tokens, but token_type has 2 entries",
        ),
        (
            {"tokenizer.ggml.merges": ["no such"]},
            GgufTokenizerError,
            "its tokenizer is inconsistent",
        ),
        ({"weights": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, GgufError, r"attn_q.bias"),
        ({"tokenizer.ggml.model": "bert"}, GgufTokenizerError, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, GgufTokenizerError, "'tekken'"),
    ],
)
def test_gguf_import_rejects_unsupported_models(tiny, tmp_path, changed, error, message):
    """The error contains the name and the value of the unsupported setting; no file is written."""
    file, *_ = tiny(**changed)
    with pytest.raises(error, match=message):
        convert(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_gguf_import_rejects_unreadable_files_and_existing_folders(tiny, tmp_path, monkeypatch):
    (tmp_path / "bad").write_bytes(b"GGUF" + bytes(40))
    for name in ("bad", "absent"):
        with pytest.raises(GgufError, match=f"{name}: cannot be read as GGUF"):
            convert(tmp_path / name, tmp_path / "out")
    file, *_ = tiny()
    with pytest.raises(GgufError, match="hf: exists already"):
        convert(file, tmp_path / "hf")

    with pytest.raises(GgufError, match="hf: exists already"):
        convert(tmp_path / "absent", tmp_path / "hf")  # before the file is read

    def dequantize(*_):
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(GgufError, match=r"quantized as F32, which the package gguf cannot"):
        convert(file, tmp_path / "out")


def test_gguf_import_reports_truncated_file(tiny, tmp_path):
    """Wherever the file ends, the error does not contain NumPy's message."""
    file, *_ = tiny()
    data = file.read_bytes()
    for numerator in range(1, 16):
        (tmp_path / "cut").write_bytes(data[: len(data) * numerator // 16])
        with pytest.raises(GgufError, match=r"the file is truncated or damaged"):
            convert(tmp_path / "cut", tmp_path / "out")


def test_gguf_import_removes_temporary_folder_on_sigterm(tiny, tmp_path, monkeypatch):
    """SIGTERM ends the import with status 143, and no incomplete model remains."""
    file, *_ = tiny()

    def write_weights(path, *_):
        path.write_bytes(b"incomplete")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(gguf_import, "write_weights", write_weights)
    with pytest.raises(SystemExit, match="143"):
        convert(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
