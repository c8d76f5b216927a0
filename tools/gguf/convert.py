"""``graft import``: convert a GGUF file to a folder in Hugging Face format.

Each tensor is dequantized with the package ``gguf`` and written before the next tensor is read, so
the memory use does not grow with the model. If graft does not support a property of the model, an
error names the property before any file is written. The files are written to a temporary folder,
which is renamed at the end, so that no incomplete model remains after an error.

By default, the matrices keep the precision of the file: float32, float16 and bfloat16 are copied
exactly. Quantized matrices are dequantized to bfloat16, whose rounding error is smaller than the
error of the quantization. ``--dtype float32`` stores the dequantized values exactly, in twice the
memory. Vectors, such as norm weights, are always stored in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graft.cudagraph.driver.dtypes import from_float32, itemsize
from graft.cudagraph.errors import GraftError
from graft.models.llm.config import TARGETS, LlamaConfig
from graft.models.llm.rope import Llama3, Rope
from graft.models.tokenizer import Tokenizer
from graft.native.errors import short_repr
from graft.tools.console import exit_on_sigterm
from graft.tools.gguf.tokenizer import tokenizer_files

__all__ = ["GgufError", "add_arguments", "convert"]


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF files of an architecture differ from its Hugging Face checkpoints."""

    name: str  #: name of the architecture in Hugging Face configs, a key of `TARGETS`
    #: Whether the rows of query and key projections are in interleaved order (`to_half_split`).
    is_interleaved: bool = False
    #: Config fields, as pairs (name, value), that the metadata of a GGUF file does not contain.
    fields: tuple[tuple[str, Any], ...] = ()


#: Supported architectures, by GGUF name. Mistral models have the name "llama" too.
ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", is_interleaved=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    # The metadata does not list the layers without RoPE. As in llama.cpp, the architecture
    # determines them.
    "smollm3": GgufArchitecture(
        "SmolLM3ForCausalLM", is_interleaved=True, fields=(("no_rope_layer_interval", 4),)
    ),
}
#: Tensors of a decoder layer: GGUF name to Hugging Face name.
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
#: Biases of the query, key and value projections, for layers that have them: GGUF name to Hugging
#: Face name.
BIAS_TENSORS = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
#: Norms of query heads and key heads, for layers that have them: GGUF name to Hugging Face name.
HEAD_NORM_TENSORS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
#: Tensors outside the decoder layers: GGUF name to Hugging Face name.
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
#: Maps metadata keys that can change the model's results to the values that have no effect. graft
#: supports only these values.
NEUTRAL_VALUES: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "use_parallel_residual": (0,),
}
#: Maps metadata keys that apply only to models with YaRN to the values that have no effect.
NEUTRAL_YARN_VALUES: dict[str, tuple[float, ...]] = {
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
MAX_FLOAT16 = float(np.finfo(np.float16).max)
#: Name of each stored dtype in safetensors files.
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: Maps GGUF types that are not quantized to dtypes. All other GGUF types are quantized.
UNQUANTIZED = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
#: Parameters of Llama 3's RoPE scaling. A GGUF file contains only the frequency factors that result
#: from them.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_MAX_POSITIONS = 8192


class GgufError(GraftError):
    """A GGUF file cannot be read or converted, or contains a model that graft does not support."""


def import_gguf() -> Any:
    """Return the module ``gguf``.

    Raise GgufError if the package is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise GgufError(
            f"reading GGUF needs the package gguf ({error}): pip install gguf"
        ) from error
    return gguf


class GgufFile:
    """Metadata and tensors of a GGUF file of one of the `ARCHITECTURES`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.gguf = import_gguf()
        try:
            self._reader = self.gguf.GGUFReader(self.path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            reason = str(error)
            if not isinstance(error, OSError) and "GGUF" not in reason and "version" not in reason:
                reason = "the file is truncated or damaged"  # NumPy's message does not help
            raise GgufError(f"{self.path}: cannot be read as GGUF ({reason})") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._prefix = self.get("general.architecture")
        if self._prefix not in ARCHITECTURES:
            raise GgufError(
                f"{self.path}: architecture {self._prefix!r} is not supported; it must be one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[self._prefix]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value, or `default` if it is absent.

        Raise GgufError if the value is absent and `default` is None.
        """
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise GgufError(f"{self.path}: {key} is missing")
        return default

    def key(self, key: str) -> str:
        """Return a metadata key, prefixed with the architecture: ``llama.<key>``."""
        return f"{self._prefix}.{key}"

    def get_size(self, key: str, default: int | None = None) -> int:
        """Return a metadata value of the architecture, which must be a non-negative integer.

        Raise GgufError if the value is not a non-negative integer, or is absent and `default` is
        None.
        """
        value = self.get(self.key(key), default)
        if not isinstance(value, int) or value < 0:
            raise GgufError(
                f"{self.path}: {self.key(key)} must be a non-negative integer, "
                f"got {short_repr(value)}"
            )
        return value

    def get_number(self, key: str, default: float | None = None) -> float:
        """Return a metadata value of the architecture, which must be a number.

        Raise GgufError if the value is not a number, or is absent and `default` is None.
        """
        value = self.get(self.key(key), default)
        if not isinstance(value, (int, float)):
            raise GgufError(
                f"{self.path}: {self.key(key)} must be a number, got {short_repr(value)}"
            )
        # The text of a float32 is its shortest decimal form, such as 1e-05, not 9.99999974e-06.
        stored = np.float32(value)
        return float(str(stored)) if stored == value else float(value)

    def require_neutral(self, neutral: dict[str, tuple[float, ...]]) -> None:
        """Raise GgufError if a metadata value changes the model's results in an unsupported way.

        `neutral` maps metadata keys of the architecture (`key`) to the values that have no effect.
        If the file lacks a key, the first of these values applies.
        """
        for key, values in neutral.items():
            value = self.get_number(key, values[0])
            if value not in values:
                raise GgufError(
                    f"{self.path}: {self.key(key)} = {value:g} is not supported; it must be "
                    f"{' or '.join(map(str, values))}"
                )

    def has(self, key: str) -> bool:
        """Return whether the metadata contains a key."""
        return self._reader.get_field(key) is not None

    def read_tensor(self, name: str) -> np.ndarray:
        """Return a dequantized tensor in float32, with the outermost dimension first."""
        tensor = self.tensors[name]
        values = self.gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, np.float32).reshape(tensor_shape(tensor))


def tensor_shape(tensor: Any) -> tuple[int, ...]:
    """Return the dimensions of a GGUF tensor, outermost first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def file_dtype(file: GgufFile) -> str:
    """Return the narrowest dtype that holds all unquantized matrices of a file exactly.

    The result is "bfloat16" if all matrices are quantized.
    """
    dtypes = set()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2 and tensor.tensor_type.name in UNQUANTIZED:
            dtypes.add(UNQUANTIZED[tensor.tensor_type.name])
    if len(dtypes) > 1:
        return "float32"
    return dtypes.pop() if dtypes else "bfloat16"


def make_config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """Return ``config.json`` for the model of a GGUF file, with `dtype` as the matrices' dtype.

    Raise GgufError if the model has an unsupported head dimension or RoPE scaling, or another
    property that graft does not support, such as experts (`NEUTRAL_VALUES`).
    """
    file.require_neutral(NEUTRAL_VALUES)
    hidden_size = file.get_size("embedding_length")
    num_heads = file.get_size("attention.head_count")
    head_dim = file.get_size("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        size = file.get_size(key, head_dim)
        if size != head_dim:
            raise GgufError(
                f"{file.path}: {file.key(key)} = {size} differs from the head dimension "
                f"{head_dim}, which is not supported"
            )
    window = file.get_size("attention.sliding_window", 0)
    windows: dict[str, Any] = {}
    if window:
        windows = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    name = file.architecture.name
    return {
        "architectures": [name],
        "model_type": TARGETS[name].model_type,
        "dtype": dtype,
        "vocab_size": tensor_shape(file.tensors["token_embd.weight"])[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.get_size("feed_forward_length"),
        "num_hidden_layers": file.get_size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get_size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": file.get_number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.get_size("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": make_rope_parameters(file, head_dim),
        **windows,
        **dict(file.architecture.fields),
    }


def make_rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the value of ``rope_parameters`` in ``config.json``.

    If the model uses Llama 3's scaling, the GGUF file contains frequency factors instead of the
    scaling parameters. The parameters are then derived from the factors.

    Raise GgufError if the scaling is not supported, or the factors do not follow Llama 3's formula.
    """
    theta = file.get_number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    # As in llama.cpp, RoPE scaling is linear if the file has a factor but no type.
    scaling = file.get(file.key("rope.scaling.type"), "linear")
    factor = (
        file.get_number("rope.scaling.factor", file.get_number("rope.scale_linear", 0.0)) or 1.0
    )
    if scaling == "yarn":
        rope |= yarn_parameters(file, factor)
    elif scaling == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif scaling not in ("linear", "none"):
        raise GgufError(
            f"{file.path}: {file.key('rope.scaling.type')} = {scaling!r} is not supported"
        )
    if ROPE_FACTORS not in file.tensors:
        return rope
    factors = file.read_tensor(ROPE_FACTORS)
    factor = float(factors.max())
    plain = Rope(theta)
    parameters = (LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITIONS)
    scaled = Rope(theta, Llama3(factor, *parameters))
    expected = plain.frequencies(head_dim) / scaled.frequencies(head_dim)
    is_llama3 = factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-3)
    if rope["rope_type"] != "default" or not is_llama3:
        raise GgufError(
            f"{file.path}: {ROPE_FACTORS} does not follow Llama 3's RoPE scaling; other frequency "
            "factors are not supported"
        )
    return rope | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_MAX_POSITIONS,
    }


def yarn_parameters(file: GgufFile, factor: float) -> dict[str, Any]:
    """Return the RoPE parameters of a model with YaRN scaling by `factor`.

    Raise GgufError if the file sets YaRN's attention factor or interpolation in a way that a
    Hugging Face config cannot express.
    """
    file.require_neutral(NEUTRAL_YARN_VALUES)
    length = file.get_size("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.get_size(
            "rope.scaling.original_context_length", length
        ),
        "beta_fast": file.get_number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.get_number("rope.scaling.yarn_beta_slow", 1.0),
    }


def to_half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection for half-split RoPE.

    GGUF files have the rows in interleaved order: RoPE rotates rows ``2i`` and ``2i + 1`` of a head
    together. In half-split order, it rotates rows ``i`` and ``i + head_dim / 2``.
    """
    half_dim = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half_dim, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def map_tensor_names(file: GgufFile, config: dict[str, Any]) -> dict[str, str]:
    """Return a map from the Hugging Face names of the tensors to their GGUF names.

    Raise GgufError if a tensor is missing, is not part of the architecture, or has an unsupported
    quantization.
    """
    name = file.architecture.name
    layer_tensors = dict(LAYER_TENSORS)
    if TARGETS[name].qkv_bias:
        layer_tensors |= BIAS_TENSORS
    if TARGETS[name].head_norm:
        layer_tensors |= HEAD_NORM_TENSORS
    names = {hf: gguf for gguf, hf in MODEL_TENSORS.items() if gguf in file.tensors}
    for layer in range(config["num_hidden_layers"]):
        for gguf, hf in layer_tensors.items():
            names[f"model.layers.{layer}.{hf}"] = f"blk.{layer}.{gguf}"
    missing = sorted(set(names.values()) - set(file.tensors))
    if missing:
        raise GgufError(f"{file.path}: tensor {missing[0]} is missing")
    unknown = sorted(set(file.tensors) - set(names.values()) - {ROPE_FACTORS})
    if unknown:
        raise GgufError(f"{file.path}: tensor {unknown[0]} is not part of a {name}")
    for tensor_name in names.values():
        tensor = file.tensors[tensor_name]
        try:
            file.gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise GgufError(
                f"{file.path}: {tensor_name} is quantized as {tensor.tensor_type.name}, which the "
                "package gguf cannot dequantize"
            ) from None
    return names


def write_weights(
    path: Path, file: GgufFile, names: dict[str, str], config: dict[str, Any]
) -> None:
    """Write all tensors to a safetensors file, one after the other.

    Raise GgufError if a value exceeds the range of the config's dtype.
    """
    header, size = _safetensors_header(file, names, config["dtype"])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensor data must be aligned to 8 bytes
    num_heads = {}
    if file.architecture.is_interleaved:
        num_heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }
    with path.open("wb") as out, tqdm(total=size, unit="B", unit_scale=True, desc="tensors") as bar:
        out.write(struct.pack("<Q", len(text)) + text)
        for hf_name, gguf_name in names.items():
            weight = file.read_tensor(gguf_name)
            projection = hf_name.split(".")[-2]
            if projection in num_heads:
                weight = to_half_split(weight, num_heads[projection])
            dtype = stored_dtype(weight.shape, config["dtype"])
            limit = MAX_FLOAT16 if dtype == "float16" else np.inf
            if np.abs(weight).max() > limit:
                raise GgufError(
                    f"{file.path}: {gguf_name} has values above the range of {dtype}; convert the "
                    "file with --dtype bfloat16 or float32"
                )
            data = from_float32(weight, dtype).tobytes()
            out.write(data)
            bar.update(len(data))


def stored_dtype(shape: tuple[int, ...], dtype: str) -> str:
    """Return the dtype in which a tensor is stored: `dtype` for matrices, float32 for vectors."""
    return dtype if len(shape) == 2 else "float32"


def _safetensors_header(
    file: GgufFile, names: dict[str, str], dtype: str
) -> tuple[dict[str, Any], int]:
    """Return the header of the safetensors file, and the size of all tensors in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for hf_name, gguf_name in names.items():
        shape = tensor_shape(file.tensors[gguf_name])
        stored = stored_dtype(shape, dtype)
        start = end
        end += itemsize(stored) * int(np.prod(shape))
        header[hf_name] = {
            "dtype": SAFETENSORS_DTYPES[stored],
            "shape": shape,
            "data_offsets": [start, end],
        }
    return header, end


def convert(file: str | Path, out: str | Path, dtype: str = "auto") -> Path:
    """Convert a GGUF file to a Hugging Face folder, and return the folder.

    Parameters
    ----------
    file
        GGUF file of one of the `ARCHITECTURES`, with any quantization that the package ``gguf``
        reads.
    out
        Folder to create. The files written to it are ``config.json``, ``model.safetensors``,
        ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.
    dtype
        Dtype of the stored matrices: "float32", "float16", "bfloat16", or "auto" for the precision
        of the file (`file_dtype`).

    Raises
    ------
    GgufError
        If `out` exists, if the file is not a GGUF file or has an unsupported architecture,
        quantization or RoPE scaling, or if a value exceeds the range of `dtype`.
    GgufTokenizerError
        If the tokenizer is not supported.
    ConfigError, TokenizerError
        If graft cannot load the resulting model.
    """
    out = Path(out)
    if out.exists():  # checked first, because reading a large file takes long
        raise GgufError(f"{out}: exists already")
    source = GgufFile(file)
    if "token_embd.weight" not in source.tensors:
        raise GgufError(f"{source.path}: tensor token_embd.weight is missing")
    config = make_config(source, file_dtype(source) if dtype == "auto" else dtype)
    LlamaConfig.from_dict(config, str(source.path))
    names = map_tensor_names(source, config)
    contents = tokenizer_files(source)
    config["eos_token_id"] = contents["generation_config.json"]["eos_token_id"]
    contents["config.json"] = config
    with exit_on_sigterm():
        _write_folder(out, contents, source, names, config)
    return out


def _write_folder(
    out: Path,
    contents: dict[str, Any],
    source: GgufFile,
    names: dict[str, str],
    config: dict[str, Any],
) -> None:
    """Write the files of a model to a temporary folder, then rename the folder to `out`.

    `contents` maps names of JSON files to their contents. The weights are read from `source`;
    `names` is the result of `map_tensor_names`.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise GgufError(f"{out}: cannot be written ({error})") from error
    try:
        for name, content in contents.items():
            text = json.dumps(content, ensure_ascii=False, indent=1)
            (folder / name).write_text(text, encoding="utf-8")
        write_weights(folder / "model.safetensors", source, names, config)
        Tokenizer(folder)
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        raise GgufError(f"{out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``graft import``."""
    parser.add_argument("file", help="GGUF file of a Llama, Mistral, Qwen2, Qwen3 or SmolLM3 model")
    parser.add_argument("out", help="folder to create; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=("auto", *SAFETENSORS_DTYPES),
        default="auto",
        help="dtype of the stored matrices; auto keeps the precision of the file and stores "
        "quantized matrices as bfloat16 (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert the file, and print a command that runs the converted model."""
    out = convert(options.file, options.out, options.dtype)
    print(f"{out}: written; graft generate --model {out} ...")
    return 0
