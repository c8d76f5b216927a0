"""The model's own spelling of a text in tokens, for LLGuidance, without Python at run time.

A ``tokenizer.json`` of byte-level BPE is turned into a native encoder. Of another kind it is
refused by name: an encoder that is almost right would forbid tokens that the model writes.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import tokenizers

from .errors import GrammarError

__all__ = ["make_encoder"]

_CODE_POINTS = 0x110000
_BLOCK = 0x800  # code points asked for at once
_ASSIGNED = 0x40000  # planes in use; of the others, plane 14 has two small ranges
_EMPTY = {0x40000: 0xE0000, 0xE0800: 0xF0000, 0xF0000: _CODE_POINTS}
#: GPT-2's way to cut text, which ``ByteLevel`` does unless told otherwise.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MOST = 2**32 - 1

Item = tuple[int, int, bool, bytes]  # least, most, absent, set
Step = list[list[Item]]


def make_encoder(description: dict[str, Any], tokens: tuple[bytes, ...]) -> Any:
    """The native encoder of a tokenizer.

    Parameters
    ----------
    description
        A parsed ``tokenizer.json``.
    tokens
        Bytes of each id.

    Raises
    ------
    GrammarError
        Naming what the encoder does not know: model, normalizer, pre-tokenizer, pattern.
    """
    from graft.native import _native

    model = description["model"]
    steps = _steps(description.get("pre_tokenizer"))
    if model.get("type", "BPE") != "BPE":
        raise _unknown("model", model.get("type"))
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _unknown(f"model {key}", model[key])
    normalizer = description.get("normalizer") or {}
    if normalizer and normalizer != {"type": "Sequence", "normalizers": []}:
        raise _unknown("normalizer", normalizer.get("type"))
    vocab = model["vocab"]
    own = set(vocab.values())
    pieces = [text if token in own else b"" for token, text in enumerate(tokens)]
    merges = []
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        try:
            merges.append((vocab[left], vocab[right], vocab[left + right]))
        except KeyError as error:
            raise GrammarError(f"tokenizer: merges {merge!r}, which gives no token") from error
    try:
        return _native.guide.Encoder(pieces, merges, steps, bool(model.get("ignore_merges")))
    except ValueError as error:
        raise GrammarError(f"tokenizer: {error}") from error


def _unknown(what: str, value: object) -> GrammarError:
    return GrammarError(f"tokenizer: canonical spelling does not know the {what} {value!r}")


def _steps(part: dict[str, Any] | None) -> list[Step]:
    """The patterns that cut text, one after the other; bytes come last."""
    if part is None:
        raise _unknown("pre-tokenizer", None)
    parts = part["pretokenizers"] if part["type"] == "Sequence" else [part]
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise _unknown("pre-tokenizer", parts[-1]["type"] if parts else None)
    steps = []
    for one in parts:
        kind = one["type"]
        if kind == "Split":
            how = (one.get("behavior"), bool(one.get("invert")))
            if how != ("Isolated", False) or "Regex" not in one["pattern"]:
                raise _unknown("pre-tokenizer Split", one)
            steps.append(_pattern(one["pattern"]["Regex"]))
        elif kind == "Digits" and one.get("individual_digits"):
            steps.append(_pattern(r"\p{N}"))
        elif kind == "ByteLevel" and one is parts[-1] and not one.get("add_prefix_space"):
            if one.get("use_regex", True):
                steps.append(_pattern(_GPT2))
        else:
            raise _unknown("pre-tokenizer", one)
    return steps


@functools.cache
def _class(name: str) -> np.ndarray:
    """A property of ``\\p{...}`` or an escape, as a flag per code point.

    The tokenizer's own engine is asked: Python's knowledge may be of another release of Unicode.
    """
    expression = f"\\{name}" if name in ("s", "d") else f"\\p{{{name}}}"
    try:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"{expression}+"), "removed")
    except Exception as error:  # what the engine raises is Exception itself
        raise _unknown("property", expression) from error
    flags = np.ones(_CODE_POINTS, bool)
    flags[0xD800:0xE000] = False
    for first in (*range(0, 0xD800, _BLOCK), *range(0xE000, _ASSIGNED, _BLOCK), 0xE0000, *_EMPTY):
        block = "".join(map(chr, range(first, first + _BLOCK)))
        for _, (begin, end) in split.pre_tokenize_str(block):
            flags[first + begin : first + end] = False
    for first, end in _EMPTY.items():  # all alike
        flags[first:end] = flags[first]
    return flags


def _pattern(text: str) -> Step:
    """Reads the regular expressions that tokenizers use; others are refused."""
    reader = _Reader(text)
    alternatives = reader.alternatives()
    if reader.rest:
        raise reader.refusal()
    return [
        [(least, most, absent, np.packbits(flags, bitorder="little").tobytes())
         for least, most, absent, flags in items]
        for items in alternatives
    ]  # fmt: skip


class _Reader:
    """Recursive descent over a pattern; a sequence is a list of (least, most, absent, flags)."""

    def __init__(self, text: str):
        self.text = self.rest = text
        self.fold = False

    def refusal(self) -> GrammarError:
        return _unknown("pattern", f"{self.text} (at {self.rest[:20]!r})")

    def take(self, expression: str) -> re.Match[str] | None:
        found = re.match(expression, self.rest)
        if found:
            self.rest = self.rest[found.end() :]
        return found

    def alternatives(self) -> list[list[Any]]:
        found = self.sequence()
        while self.take(r"\|"):
            found += self.sequence()
        return found

    def sequence(self) -> list[list[Any]]:
        """The alternatives that one branch stands for: a group multiplies them."""
        branches: list[list[Any]] = [[]]
        while self.rest and self.rest[0] not in "|)":
            if self.take(r"\(\?!"):
                branches = [[*items, (0, 0, True, self.one())] for items in branches]
                if not self.take(r"\)"):
                    raise self.refusal()
            elif group := self.take(r"\(\?(i?):|\((?!\?)"):
                fold, self.fold = self.fold, self.fold or bool(group[1])
                inner = self.alternatives()
                self.fold = fold
                # tried in the same order only if nothing before the group can be given back
                fixed = all(least == most for items in branches for least, most, *_ in items)
                if not self.take(r"\)(?![?*+{])") or not fixed:
                    raise self.refusal()
                branches = [[*items, *more] for items in branches for more in inner]
            else:
                flags = self.one()
                least, most = self.count()
                branches = [[*items, (least, most, False, flags)] for items in branches]
        return branches

    def count(self) -> tuple[int, int]:
        if found := self.take(r"([?*+])(?![+?])"):
            return {"?": (0, 1), "*": (0, _MOST), "+": (1, _MOST)}[found[1]]
        if found := self.take(r"\{(\d+)(,?)(\d*)\}(?![+?])"):
            least = int(found[1])
            return least, int(found[3]) if found[3] else _MOST if found[2] else least
        if self.rest[:1] in ("?", "*", "+", "{"):
            raise self.refusal()
        return 1, 1

    def one(self) -> np.ndarray:
        """The flags of one character."""
        if self.take(r"\["):
            negated = bool(self.take(r"\^"))
            flags = np.zeros(_CODE_POINTS, bool)
            while not self.take(r"\]"):
                if not self.rest or self.rest.startswith(("[", "&&")):
                    raise self.refusal()
                flags |= self.atom(in_set=True)
            return ~flags if negated else flags
        if not self.rest or self.rest[0] in ".^$*+?{})":
            raise self.refusal()
        return self.atom(in_set=False)

    def atom(self, *, in_set: bool) -> np.ndarray:
        if found := self.take(r"\\([pP])\{(\w+)\}"):
            return _class(found[2]) if found[1] == "p" else ~_class(found[2])
        if found := self.take(r"\\([sdSD])"):
            flags = _class(found[1].lower())
            return ~flags if found[1].isupper() else flags
        first = last = self.character()
        if in_set and re.match(r"-[^\]]", self.rest):
            self.take("-")
            last = self.character()
        flags = np.zeros(_CODE_POINTS, bool)
        flags[first : last + 1] = True
        if self.fold:
            for character in range(first, last + 1):
                for folded in (chr(character).lower(), chr(character).upper()):
                    flags[ord(folded)] = True
        return flags

    def character(self) -> int:
        if found := self.take(r"\\([nrtfv])"):
            return ord({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}[found[1]])
        if found := self.take(r"\\u([0-9A-Fa-f]{4})|\\x\{([0-9A-Fa-f]+)\}|\\x([0-9A-Fa-f]{2})"):
            return int(found[1] or found[2] or found[3], 16)
        if found := self.take(r"(?s)\\(\W)|([^\\])"):
            return ord(found[1] or found[2])
        raise self.refusal()
