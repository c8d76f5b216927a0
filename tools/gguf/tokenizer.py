"""Conversion of the tokenizer of a GGUF file to the tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from graft.cudagraph.errors import GraftError

__all__ = ["GgufTokenizerError", "tokenizer_files"]

#: Token types in the GGUF metadata.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4

#: Pre-tokenization pattern of Llama 3 and Qwen2. "%s" is replaced with a quantifier, which
#: limits the number of digits in a group.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Pre-tokenizers of byte-level tokenizers, by GGUF name. A value is either a pattern, which
#: replaces GPT-2's pattern, or a list of steps that precede GPT-2's pattern.
PRE_TOKENIZERS: dict[str, str | list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [],
    "default": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": _PATTERN % "{1,3}",
    "qwen2": _PATTERN % "",
}
#: Character that SentencePiece uses in place of a space.
SPACE = "▁"


class GgufTokenizerError(GraftError):
    """The tokenizer of a GGUF file is not supported."""


def tokenizer_files(file: Any) -> dict[str, dict[str, Any]]:
    """Return ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    `file` is a `GgufFile` whose metadata contains the tokens, their types, and either merges
    (byte-level BPE) or scores (SentencePiece). Raise GgufTokenizerError if the kind of tokenizer
    or its pre-tokenizer is not supported.
    """

    def value(key: str, default: Any = None) -> Any:
        return file.get(f"tokenizer.ggml.{key}", default)

    kind = value("model")
    tokens = value("tokens")
    types = value("token_type", [NORMAL] * len(tokens))
    makers = {"gpt2": make_byte_level_bpe, "llama": make_sentencepiece_bpe}
    if kind not in makers:
        raise GgufTokenizerError(
            f"{file.path}: tokenizer.ggml.model = {kind!r} is not supported; it must be one of "
            f"{', '.join(makers)}"
        )
    if len(types) != len(tokens):
        raise GgufTokenizerError(
            f"{file.path}: there are {len(tokens)} tokens, but token_type has {len(types)} entries"
        )
    try:
        backend = makers[kind](file, tokens, types)
    except GraftError:
        raise
    except Exception as error:  # the package tokenizers raises no narrower type
        raise GgufTokenizerError(f"{file.path}: its tokenizer is inconsistent ({error})") from error
    _add_special_tokens(backend, tokens, types)
    if value("add_bos_token", kind == "llama" or value("pre", "") == "llama-bpe"):
        bos_id = value("bos_token_id")
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )
    stop_ids = []
    for name in ("eos", "eot", "eom"):
        if file.has(f"tokenizer.ggml.{name}_token_id"):
            stop_ids.append(value(f"{name}_token_id"))
    return {
        "tokenizer.json": json.loads(backend.to_str()),
        "tokenizer_config.json": _tokenizer_config(file, tokens),
        "generation_config.json": {"eos_token_id": list(dict.fromkeys(stop_ids))},
    }


def _add_special_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    special = []
    added = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif token_type == USER_DEFINED:
            added.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(added)


def _tokenizer_config(file: Any, tokens: list[str]) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with the special tokens and the chat template."""
    config: dict[str, Any] = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        if file.has(f"tokenizer.ggml.{key}_token_id"):
            config[name] = tokens[file.get(f"tokenizer.ggml.{key}_token_id")]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.get("tokenizer.chat_template")
    return config


def make_byte_level_bpe(file: Any, tokens: list[str], types: list[int]) -> Backend:
    """Return a byte-level BPE tokenizer, the kind that GPT-2, Llama 3, Qwen2 and SmolLM use."""
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise GgufTokenizerError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is not supported "
            f"({', '.join(PRE_TOKENIZERS)})"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    pre_tokenizer = PRE_TOKENIZERS[name]
    if isinstance(pre_tokenizer, list):
        steps = pre_tokenizer
        uses_gpt2_pattern = True
    else:
        steps = [pre_tokenizers.Split(Regex(pre_tokenizer), "isolated")]
        uses_gpt2_pattern = False
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=uses_gpt2_pattern)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def make_sentencepiece_bpe(file: Any, tokens: list[str], types: list[int]) -> Backend:
    """Return a SentencePiece BPE tokenizer with byte fallback, the kind that Llama 1 and 2 use.

    A GGUF file of this kind contains a score for each token but no merges, so this function
    reconstructs the merges. A merge exists for each pair of tokens whose concatenation is a token.
    The merges are sorted by the score of the concatenation, the highest score first.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    scores = file.get("tokenizer.ggml.scores")
    merges = []
    for piece, token_id in ids.items():
        if types[token_id] != NORMAL:
            continue
        for split in range(1, len(piece)):
            left = piece[:split]
            right = piece[split:]
            if left in ids and right in ids:
                order = (-scores[token_id], ids[left], ids[right])
                merges.append((order, (left, right)))
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(
        models.BPE(
            vocab=ids,
            merges=[pair for _, pair in sorted(merges)],
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    normalizer: Any = normalizers.Replace(" ", SPACE)
    decoder_steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizer])
        decoder_steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(decoder_steps)
    return backend
