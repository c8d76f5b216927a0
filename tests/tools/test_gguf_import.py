"""Importing GGUF: the same weights, configuration and token ids, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import llama_config, llama_tensors, make_tiny_tokenizer

from graft.cudagraph.dtypes import from_float32
from graft.models.errors import ConfigError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.tokenizer import Tokenizer
from graft.tools import gguf_import
from graft.tools.gguf_import import GgufError, convert
from graft.tools.gguf_tokenizer import GgufTokenizerError

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
SHORT = {there: here for here, there in gguf_import.NAMES.items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp turns them: each of a head's halves gives every other row."""
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
    **changed,
) -> None:
    """A GGUF of a tiny Llama and its tokenizer, with metadata changed or (None) left out."""
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
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    outer = {there: here for here, there in gguf_import.OUTER.items()}
    for name, weight in weights.items():
        parts = name.split(".")
        here = outer.get(name) or (
            name if parts[0] != "model" else f"blk.{parts[2]}.{SHORT['.'.join(parts[3:-1])]}.weight"
        )
        for mark, heads in (("q_proj", 4), ("k_proj", 2)):
            weight = interleaved(weight, heads) if mark in name else weight
        stored = kind if weight.ndim == 2 else Q.F32
        writer.add_tensor(here, gguf.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path):
    """Writes a GGUF: config changes, weights changes, then `write_gguf`'s."""
    make_tiny_tokenizer(tmp_path / "hf")

    def make(kind=Q.F32, weights=None, tied=True, **changed):
        config = llama_config(**TINY, tie_word_embeddings=tied)
        tensors = llama_tensors(config, 3) | (weights or {})
        write_gguf(tmp_path / "m.gguf", tmp_path / "hf", config, tensors, kind, **changed)
        return tmp_path / "m.gguf", config, tensors

    return make


@pytest.mark.parametrize(("kind", "tied"), [(Q.F32, True), (Q.F16, False), (Q.Q8_0, True)])
def test_weights_and_configuration_are_those_of_the_model(tiny, tmp_path, kind, tied):
    """Every tensor in its place and order, exactly what the quantisation left, as bfloat16."""
    file, config, weights = tiny(kind, tied=tied)
    folder = convert(file, tmp_path / "out")
    assert LlamaConfig.from_dir(folder) == LlamaConfig.from_dict(
        config | {"torch_dtype": "bfloat16"}
    )
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names) == set(weights)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
        assert np.array_equal(checkpoint.get(name)[0], from_float32(weight, "bfloat16")), name


def test_the_tokenizer_gives_the_same_ids(tiny, tmp_path):
    """Ids, text, special tokens, the end, and the chat template."""
    folder = convert(tiny()[0], tmp_path / "out")
    was = Tokenizer(tmp_path / "hf")
    now = Tokenizer(folder)
    for text in ('{"name": "é 日本", "value": [10, 100]}', "the<eos> being  on\n\n"):
        assert now.encode(text) == was.encode(text) and now.decode(now.encode(text)) == was.decode(
            was.encode(text)
        )
    assert now.stop_ids == was.stop_ids and now.special_names == was.special_names
    assert now.render([{"content": "hello"}]) == "hello"


def test_sentencepiece_joins_by_score(tiny, tmp_path):
    """The best score is joined first, a space becomes a mark, what is unknown becomes bytes."""
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
    assert tokenizer.decode(ids) == "abcé" and tokenizer.stop_ids == (2,)


def test_llama3_scaling_is_found_again(tiny, tmp_path):
    """The factors of the file name its parameters; factors of another law are refused."""
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
    with pytest.raises(GgufError, match=r"rope_freqs.weight is not Llama 3's scaling"):
        convert(file, tmp_path / "other")


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"architecture": "gemma"}, GgufError, "architecture 'gemma'"),
        ({"llama.expert_count": 8}, GgufError, "llama.expert_count = 8"),
        ({"llama.rope.dimension_count": 8}, GgufError, "llama.rope.dimension_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, GgufError, "'yarn'"),
        ({"llama.block_count": 1}, GgufError, r"tensor blk.1.* has no place"),
        ({"llama.block_count": 3}, GgufError, r"tensor blk.2.* is missing"),
        ({"llama.block_count": None}, GgufError, "llama.block_count is missing"),
        ({"llama.attention.head_count": 0}, ConfigError, "num_attention_heads is 0"),
        ({"llama.attention.head_count_kv": [2, 2]}, GgufError, r"head_count_kv is \[2, 2\]"),
        ({"tokenizer.ggml.token_type": [1, 1]}, GgufTokenizerError, "320 tokens, and kinds of 2"),
        ({"tokenizer.ggml.merges": ["no such"]}, GgufTokenizerError, "does not hold together"),
        ({"weights": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, GgufError, r"attn_q.bias"),
        ({"tokenizer.ggml.model": "bert"}, GgufTokenizerError, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, GgufTokenizerError, "'tekken'"),
    ],
)
def test_what_graft_would_not_run_is_refused(tiny, tmp_path, changed, error, says):
    """By name and value, and nothing is written."""
    file, *_ = tiny(**changed)
    with pytest.raises(error, match=says):
        convert(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_files_that_are_no_gguf_are_refused(tiny, tmp_path, monkeypatch):
    """Missing, damaged, of an unknown quantisation, or where the folder stands already."""
    (tmp_path / "bad").write_bytes(b"GGUF" + bytes(40))
    for name in ("bad", "absent"):
        with pytest.raises(GgufError, match=f"{name}: cannot be read as GGUF"):
            convert(tmp_path / name, tmp_path / "out")
    file, *_ = tiny()
    with pytest.raises(GgufError, match="hf: exists already"):
        convert(file, tmp_path / "hf")

    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(GgufError, match=r"quantised as F32, which the package gguf does not"):
        convert(file, tmp_path / "out")
