"""The tokenizer of a GGUF file as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from graft.cudagraph.errors import GraftError

__all__ = ["GgufTokenizerError", "tokenizer_files"]

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER = 4
DIGITS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+""" + (
    r"""[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
#: How GGUF's names of byte-level tokenizers cut text: a regular expression, or what precedes
#: GPT-2's own.
CUTS: dict[str, str | list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [],
    "default": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": DIGITS % "{1,3}",
    "qwen2": DIGITS % "",
}
SPACE = "▁"


class GgufTokenizerError(GraftError):
    """A GGUF file's tokenizer is of a kind that graft does not rebuild."""


def tokenizer_files(source: Any) -> dict[str, dict[str, Any]]:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``, decoded.

    Parameters
    ----------
    source : tools.gguf_import.Source
        The file, with tokens, their kinds and their merges (byte level) or scores
        (SentencePiece).

    Raises
    ------
    GgufTokenizerError
        Another kind of tokenizer, or another way of cutting text.
    """

    def value(key: str, default: Any = None) -> Any:
        return source.get(f"tokenizer.ggml.{key}", default)

    kind = value("model")
    tokens = value("tokens")
    kinds = value("token_type", [NORMAL] * len(tokens))
    makers = {"gpt2": byte_level, "llama": sentence_piece}
    if kind not in makers:
        raise GgufTokenizerError(
            f"{source.path}: tokenizer.ggml.model = {kind!r} is not "
            f"implemented ({', '.join(makers)})"
        )
    if len(kinds) != len(tokens):
        raise GgufTokenizerError(f"{source.path}: {len(tokens)} tokens, and kinds of {len(kinds)}")
    try:
        backend = makers[kind](source, tokens, kinds)
    except GraftError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise GgufTokenizerError(
            f"{source.path}: its tokenizer does not hold together ({error})"
        ) from error
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind_ in zip(tokens, kinds, strict=True)
        if kind_ in (CONTROL, UNKNOWN)
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind_ in zip(tokens, kinds, strict=True)
            if kind_ == USER
        ]
    )
    named = {
        name: tokens[value(f"{key}_token_id")]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if source.has(f"tokenizer.ggml.{key}_token_id")
    }
    if value("add_bos_token", kind == "llama" or value("pre", "") == "llama-bpe"):
        bos = value("bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A $B",
            special_tokens=[(tokens[bos], bos)],
        )
    config: dict[str, Any] = {**named, "tokenizer_class": "PreTrainedTokenizerFast"}
    if source.has("tokenizer.chat_template"):
        config["chat_template"] = source.get("tokenizer.chat_template")
    ends = [
        value(f"{key}_token_id")
        for key in ("eos", "eot", "eom")
        if source.has(f"tokenizer.ggml.{key}_token_id")
    ]
    return {
        "tokenizer.json": json.loads(backend.to_str()),
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": list(dict.fromkeys(ends))},
    }


def byte_level(source: Any, tokens: list[str], kinds: list[int]) -> Backend:
    """BPE over bytes, as GPT-2, Llama 3, Qwen2 and SmolLM have it."""
    cut = source.get("tokenizer.ggml.pre", "default")
    if cut not in CUTS:
        raise GgufTokenizerError(
            f"{source.path}: tokenizer.ggml.pre = {cut!r} is not implemented ({', '.join(CUTS)})"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in source.get("tokenizer.ggml.merges")]
    backend = Backend(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=cut == "llama-bpe",
        )
    )
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    how = CUTS[cut]
    own = isinstance(how, list)  # GPT-2's expression follows
    first = how if isinstance(how, list) else [pre_tokenizers.Split(Regex(how), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece(source: Any, tokens: list[str], kinds: list[int]) -> Backend:
    """SentencePiece's BPE with bytes to fall back on, as Llama 1 and 2 have it.

    The file keeps a score for each piece and no merges: each way to join two pieces to a piece
    is one, the best score first.
    """
    ids = {token: id for id, token in enumerate(tokens)}
    scores = source.get("tokenizer.ggml.scores")
    joins = [
        (-scores[id], ids[piece[:at]], ids[piece[at:]], (piece[:at], piece[at:]))
        for piece, id in ids.items()
        if kinds[id] == NORMAL
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    unknown = tokens[source.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(
        models.BPE(
            vocab=ids,
            merges=[pair for *_, pair in sorted(joins)],
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prefix = source.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
