"""``graft import``: a GGUF file of a Llama becomes a Hugging Face folder that graft loads.

Tensors are dequantised by the package ``gguf`` and written one after the other, so a large model
needs no memory. What the file holds and graft would not run is refused by name before anything
is written; the folder appears complete or not at all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graft.cudagraph.dtypes import from_float32
from graft.cudagraph.errors import GraftError
from graft.models.llm.config import LlamaConfig
from graft.models.llm.rope import Rope
from graft.models.tokenizer import Tokenizer
from graft.tools.gguf_tokenizer import tokenizer_files

__all__ = ["GgufError", "add_arguments", "convert"]

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
#: Llama 3's scaling, of which a GGUF file keeps only the factors that come out of it.
LOW = 1.0
HIGH = 4.0
ORIGINAL = 8192


class GgufError(GraftError):
    """A GGUF file cannot be read, or holds a model that graft does not run."""


def package() -> Any:
    """The package ``gguf``."""
    try:
        import gguf
    except ImportError as error:
        raise GgufError(
            f"reading GGUF needs the package gguf ({error}): pip install 'graft-cuda[gguf]'"
        ) from error
    return gguf


class Source:
    """Metadata and tensors of a file; wrong or missing ones are named.

    Raises
    ------
    GgufError
        The file is missing, is no GGUF, or is of another architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.gguf = package()
        try:
            self._reader = self.gguf.GGUFReader(self.path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise GgufError(f"{self.path}: cannot be read as GGUF ({error})") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if (found := self.get("general.architecture")) != "llama":
            raise GgufError(f"{self.path}: architecture {found!r} is not implemented (llama)")

    def get(self, key: str, default: Any = None) -> Any:
        """A value; `default` where the file has none. None as default: it must be there."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise GgufError(f"{self.path}: {key} is missing")
        return default

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def array(self, name: str) -> np.ndarray:
        """A tensor, dequantised: float32, its dimensions outermost first."""
        tensor = self.tensors[name]
        plain = self.gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(plain, np.float32).reshape(shape_of(tensor))


def shape_of(tensor: Any) -> tuple[int, ...]:
    """A tensor's dimensions, outermost first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def config_of(source: Source) -> dict[str, Any]:
    """``config.json`` of the model."""

    def value(key: str, default: Any = None) -> Any:
        return source.get(f"llama.{key}", default)

    def integer(key: str, default: int | None = None) -> int:
        if not isinstance(found := value(key, default), int) or found < 0:
            raise GgufError(f"{source.path}: llama.{key} is {found!r}, not a number of things")
        return found

    if experts := integer("expert_count", 0):
        raise GgufError(
            f"{source.path}: llama.expert_count = {experts}: a mixture of experts is "
            "not implemented"
        )
    hidden = integer("embedding_length")
    heads = integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if (found := integer(key, head_dim)) != head_dim:
            raise GgufError(
                f"{source.path}: llama.{key} = {found} differs from the {head_dim} of "
                "a head, which is not implemented"
            )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": shape_of(source.tensors["token_embd.weight"])[0],
        "hidden_size": hidden,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        "max_position_embeddings": integer("context_length"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "rope_parameters": rope_of(source, head_dim),
    }


def rope_of(source: Source, head_dim: int) -> dict[str, Any]:
    """Rotary parameters; Llama 3's are found again from the factors they gave."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(source.get("llama.rope.freq_base", 10000.0)),
    }
    kind = source.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(source.get("llama.rope.scaling.factor"))}
    elif kind != "none":
        raise GgufError(f"{source.path}: llama.rope.scaling.type = {kind!r} is not implemented")
    if ROPE_FACTORS in source.tensors:
        factors = source.array(ROPE_FACTORS)
        rope |= {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL,
        }
        plain = Rope(rope["rope_theta"])
        scaled = Rope(rope["rope_theta"], "llama3", rope["factor"], LOW, HIGH, ORIGINAL)
        expected = plain.frequencies(head_dim) / scaled.frequencies(head_dim)
        if (
            kind != "none"
            or factors.shape != expected.shape
            or not np.allclose(factors, expected, rtol=1e-3)
        ):
            raise GgufError(f"{source.path}: {ROPE_FACTORS} is not Llama 3's scaling")
    return rope


def unrotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in half-split order, from the interleaved of GGUF."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def named(source: Source, config: dict[str, Any]) -> dict[str, str]:
    """GGUF's tensor names by Hugging Face's; every tensor of the file has its place."""
    names = {there: here for here, there in OUTER.items() if here in source.tensors}
    for layer in range(config["num_hidden_layers"]):
        names |= {
            f"model.layers.{layer}.{there}.weight": f"blk.{layer}.{here}.weight"
            for here, there in NAMES.items()
        }
    if missing := sorted(set(names.values()) - set(source.tensors)):
        raise GgufError(f"{source.path}: tensor {missing[0]} is missing")
    if extra := sorted(set(source.tensors) - set(names.values()) - {ROPE_FACTORS}):
        raise GgufError(f"{source.path}: tensor {extra[0]} has no place in a Llama of graft")
    for name in names.values():
        tensor = source.tensors[name]
        try:
            source.gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise GgufError(
                f"{source.path}: {name} is quantised as {tensor.tensor_type.name}, "
                "which the package gguf does not dequantise"
            ) from None
    return names


def tensors(source: Source, names: dict[str, str], config: dict[str, Any]) -> Iterator[np.ndarray]:
    """Bits of the tensors in the order of `names`."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for there, here in names.items():
        array = source.array(here)
        turned = next((count for name, count in heads.items() if f".{name}." in there), None)
        yield from_float32(array if turned is None else unrotated(array, turned), "bfloat16")


def write(file: Path, source: Source, names: dict[str, str], config: dict[str, Any]) -> None:
    """The safetensors file, tensor after tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for there, here in names.items():
        shape = shape_of(source.tensors[here])
        begin = end
        end = end + 2 * int(np.prod(shape))
        header[there] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out, tqdm(total=end, unit="B", unit_scale=True, desc="tensors") as bar:
        out.write(struct.pack("<Q", len(text)) + text)
        for bits in tensors(source, names, config):
            bar.update(out.write(bits.tobytes()))


def convert(file: str | Path, out: str | Path) -> Path:
    """Write a GGUF file's model as a Hugging Face folder of bfloat16 weights.

    Parameters
    ----------
    file : str or Path
        GGUF of the architecture ``llama``; any quantisation that the package ``gguf`` reads.
    out : str or Path
        The folder, which must not exist: ``config.json``, ``model.safetensors``,
        ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json``.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    GgufError
        No GGUF, or an architecture, quantisation, scaling or tokenizer that graft does not run.
    ConfigError, TokenizerError
        What came out is not what graft loads.
    """
    source = Source(file)
    out = Path(out)
    if out.exists():
        raise GgufError(f"{out}: exists already")
    if "token_embd.weight" not in source.tensors:
        raise GgufError(f"{source.path}: tensor token_embd.weight is missing")
    config = config_of(source)
    LlamaConfig.from_dict(config, str(source.path))
    names = named(source, config)
    files = tokenizer_files(source)
    config["eos_token_id"] = files["generation_config.json"]["eos_token_id"]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise GgufError(f"{out}: cannot be written ({error})") from error
    try:
        for name, content in {"config.json": config, **files}.items():
            (folder / name).write_text(
                json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8"
            )
        write(folder / "model.safetensors", source, names, config)
        Tokenizer(folder)
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        raise GgufError(f"{out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``graft import``."""
    parser.add_argument("file", help="a GGUF file of a Llama")
    parser.add_argument("out", help="the folder to write; it must not exist")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert, and say what may be done with it."""
    out = convert(options.file, options.out)
    print(f"{out}: written; graft generate --model {out} ...")
    return 0
