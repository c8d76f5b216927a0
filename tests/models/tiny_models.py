"""Tiny random checkpoints in Hugging Face layout: targets, drafters and a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from graft.cudagraph.driver.dtypes import from_float32, to_float32


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values rounded to `dtype`."""
    return to_float32(from_float32(x, dtype), dtype) if dtype != "float32" else x


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Write tensors. float32 is stored as `dtype`, uint8 as E4M3, and other dtypes unchanged."""
    stored = {
        name: np.ascontiguousarray(
            from_float32(t, dtype) if t.dtype == np.float32 and dtype != "float32" else t
        )
        for name, t in tensors.items()
    }
    save_file(stored, str(path))
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = (
        data[8:end].replace(b'"U16"', b'"BF16"').replace(b'"U8"', b'"F8_E4M3"')
    )  # dtypes that NumPy lacks
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes a field."""
    data = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in data.items() if value is not None})


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Apply `change` to the tensors of a checkpoint and rewrite it."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def llama_config(**overrides: Any) -> dict[str, Any]:
    """Return the config of a tiny Llama model. An override of None removes a field."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
        **overrides,
    }
    return {name: value for name, value in config.items() if value is not None}


#: Fields of config.json that make a tiny Llama a model of another architecture.
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layer_interval": 2,
}


def matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return random weights that preserve the scale of their input."""
    return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def norm(rng: np.random.Generator, width: int) -> np.ndarray:
    """Return random norm weights around 1."""
    return (1.0 + 0.2 * rng.standard_normal(width)).astype(np.float32)


def decoder_tensors(
    config: dict[str, Any], rng: np.random.Generator, prefix: str, width: int
) -> dict[str, np.ndarray]:
    """Return random tensors of a decoder layer whose attention input has `width` columns."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    keys = (config.get("num_key_value_heads") or heads) * dim
    matrices = {
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{prefix}.input_layernorm.weight": norm(rng, hidden),
        f"{prefix}.post_attention_layernorm.weight": norm(rng, hidden),
        **{f"{prefix}.{name}.weight": matrix(rng, *size) for name, size in matrices.items()},
    }
    if config.get("model_type") == "qwen2":
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, _ = matrices[f"self_attn.{name}"]
            bias = rng.standard_normal(rows).astype(np.float32)
            tensors[f"{prefix}.self_attn.{name}.bias"] = bias
    return tensors


def llama_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return random float32 tensors of a Llama, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    vocab = config["vocab_size"]
    hidden = config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32),
        "model.norm.weight": norm(rng, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        tensors |= decoder_tensors(config, rng, f"model.layers.{i}", hidden)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(rng, vocab, hidden)
    return tensors


def make_tiny_llama(
    folder: Path, *, seed: int = 0, dtype: str = "float32", shards: int = 1, **overrides: Any
) -> dict[str, np.ndarray]:
    """Write a random Llama checkpoint and return its tensors as float32 values.

    Overrides are fields of config.json; None removes a field. With several shards, one file per
    shard and an index are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(**{"torch_dtype": dtype, **overrides})
    write_json(folder / "config.json", config)
    tensors = llama_tensors(config, seed)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    else:
        write_shards(folder, tensors, dtype, shards)
    return {name: rounded(t, dtype) for name, t in tensors.items()}


def write_shards(folder: Path, tensors: dict[str, np.ndarray], dtype: str, shards: int) -> None:
    """Write tensors to several files with an index."""
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[i::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in names}, dtype)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def make_tiny_eagle3(
    folder: Path,
    target_config: dict[str, Any],
    *,
    draft_vocab: int | None = None,
    seed: int = 1,
    dtype: str = "float32",
    names: str = "official",
    own_embedding: bool = False,
    **overrides: Any,
) -> dict[str, np.ndarray]:
    """Write a random EAGLE-3 head for a target and return its tensors as float32 values.

    Without `draft_vocab` the head has the vocabulary of the target and no d2t. `names` selects the
    format: "official" (``midlayer.*``, flat config) or "speculators" (``layers.0.*``, nested
    config). Overrides are fields of config.json; None removes a field. For a target with fewer than
    seven layers ``eagle_config`` names the outputs of layers 0, n//2 and n-1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    target_layers = target_config["num_hidden_layers"]
    vocab = target_config["vocab_size"]
    shape = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
    base: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab or vocab,
        "tie_word_embeddings": False,
        "rope_theta": None,
        "torch_dtype": dtype,
    }
    if target_layers < 7:
        layers = [0, target_layers // 2, target_layers - 1]
        base["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    wanted = {name: target_config.get(name) for name in shape}
    config = llama_config(**{**wanted, **base, **overrides})
    hidden = config["hidden_size"]
    of_target = config.get("target_hidden_size", hidden)
    prefix = "midlayer" if names == "official" else "layers.0"
    tensors = decoder_tensors(config, rng, prefix, 2 * hidden)
    for i in range(1, config["num_hidden_layers"]):
        tensors |= decoder_tensors(config, rng, f"layers.{i}", hidden)
    tensors |= {
        f"{prefix}.hidden_norm.weight": norm(rng, hidden),
        "norm.weight": norm(rng, hidden),
        "fc.weight": matrix(rng, hidden, 3 * of_target),
        "lm_head.weight": matrix(rng, config["draft_vocab_size"], hidden),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = rng.standard_normal((vocab, hidden)).astype(np.float32)
    result = {name: rounded(t, dtype) for name, t in tensors.items()}
    if draft_vocab:
        kept = np.sort(rng.permutation(vocab)[:draft_vocab])
        maps = {"d2t": kept - np.arange(draft_vocab), "t2d": np.isin(np.arange(vocab), kept)}
        tensors |= maps
        result |= maps
    if names == "speculators":
        config = _speculators(config)
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return result


def make_tiny_mtp(
    folder: Path, target_config: dict[str, Any], *, modules: int, seed: int = 1, own: bool = False
) -> dict[str, np.ndarray]:
    """Write random multi-token prediction modules for a target and return their tensors.

    With `own`, the checkpoint has embeddings and LM heads for the modules. Otherwise the modules
    use those of the target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    hidden = target_config["hidden_size"]
    shape = target_config["vocab_size"], hidden
    tensors: dict[str, np.ndarray] = {}
    for i in range(modules):
        prefix = f"model.layers.{target_config['num_hidden_layers'] + i}"
        tensors |= decoder_tensors(target_config, rng, prefix, hidden)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}.{name}.weight"] = norm(rng, hidden)
        tensors[f"{prefix}.eh_proj.weight"] = matrix(rng, hidden, 2 * hidden)
        for name in ("embed_tokens", "shared_head.head") if own else ():
            tensors[f"{prefix}.{name}.weight"] = matrix(rng, *shape)
    write_json(folder / "config.json", {**target_config, "num_nextn_predict_layers": modules})
    write_safetensors(folder / "model.safetensors", tensors, "float32")
    return tensors


def make_tiny_dflash(
    folder: Path,
    target_config: dict[str, Any],
    *,
    layers: tuple[int, ...],
    block: int,
    rank: int = 0,
    seed: int = 1,
) -> None:
    """Write a random block drafter with two layers that reads the outputs of target layers.

    The drafter is a DFlash drafter, or a DSpark drafter if `rank` is not 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    hidden = target_config["hidden_size"]
    own = {"block_size": block, "mask_token_id": 3, "target_layer_ids": list(layers)}
    write_json(
        folder / "config.json",
        {
            **target_config,
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "num_target_layers": target_config["num_hidden_layers"],
            "markov_rank": rank,
            "architectures": ["Qwen3DSparkModel" if rank else "DFlashDraftModel"],
            **(own if rank else {"dflash_config": own}),
        },
    )
    tensors = {"fc.weight": matrix(rng, hidden, len(layers) * hidden)}
    tensors |= {f"{name}.weight": norm(rng, hidden) for name in ("hidden_norm", "norm")}
    for name in ("w1", "w2") if rank else ():
        vocab = target_config["vocab_size"]
        tensors[f"markov_head.markov_{name}.weight"] = matrix(rng, vocab, rank)
    for i in range(2):
        tensors |= decoder_tensors(target_config, rng, f"layers.{i}", hidden)
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{i}.self_attn.{name}.weight"] = norm(rng, target_config["head_dim"])
    write_safetensors(folder / "model.safetensors", tensors, "float32")


def _speculators(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a flat EAGLE-3 config to the nested speculators format.

    In that format a feature layer id means the input of the layer, not its output.
    """
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "norm_before_residual": config.pop("norm_before_residual", False),
    }
    if "target_hidden_size" in config:
        outer["target_hidden_size"] = config.pop("target_hidden_size")
    layers = config.pop("eagle_config", None)
    if layers is not None:
        ids = layers["eagle_aux_hidden_state_layer_ids"]
        outer["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
    config["architectures"] = ["LlamaForCausalLM"]
    return {**outer, "transformer_layer_config": config}


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


WORDS = [
    '{"',
    '":',
    '",',
    '"}',
    "],",
    "[{",
    "}]",
    "true",
    "false",
    "null",
    "name",
    "value",
    " the",
    " a",
    "ing",
    "er",
    "on",
    "10",
    "00",
    "é",
    "日",
]


def make_tiny_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """Write a byte-level tokenizer: <eos> 0, <bos> 1, 256 bytes, then merges up to `vocab_size`.

    JSON punctuation and a few words are merged, so there are tokens of several bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<eos>", "<bos>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", config)
