r"""LLGuidance's matcher for texts that LLGuidance would refuse because of their ``\u`` escapes.

The automata of JSON schemas allow the ``\u`` escapes of all characters. LLGuidance allows only
those of control characters. `UnescapedMatcher` compares the two matchers nevertheless.
"""

from __future__ import annotations

import functools
import json
import re

import numpy as np

from graft.grammar import CompiledGrammar, Matcher, Vocabulary
from graft.grammar.resolve import resolve_for_backend
from graft.grammar.schema.llguidance_options import OPTIONS
from graft.grammar.spec import Spec

#: The vocabularies of the tests have a token for each byte. The first of these tokens:
FIRST_BYTE = 2
#: Characters whose escapes `UnescapedMatcher.require_escapes` tries.
_ESCAPES = {"é": rb"\u00e9", "日": rb"\u65E5", "😀": rb"\ud83d\uDE00"}
_HIGH_SURROGATE = re.compile(rb"\\u[Dd][89ABab]")
_CONTROL = re.compile(rb"\\u00(?:[01]|7[fF])")


class UnescapedMatcher:
    """Reads texts with LLGuidance, and compares mask rows of an automaton with LLGuidance's rows.

    Where LLGuidance refuses an escape, this matcher gives it the character for which the escape
    stands. The texts that the automaton and LLGuidance read are therefore equal as JSON.

    Parameters
    ----------
    compiled
        The grammar, compiled by LLGuidance's backend without automata.
    vocabulary
        Vocabulary of the grammar.
    """

    def __init__(self, compiled: CompiledGrammar, vocabulary: Vocabulary):
        spec = compiled.spec
        self._tokens = vocabulary.tokens
        self._words = vocabulary.words
        self._matcher = compiled.matcher()
        self._is_json = spec.kind == "json_schema"
        #: Whether LLGuidance allows the escapes of control characters. The router forbids them in
        #: schemas with patterns of names.
        self.allows_controls = not self._is_json or _allows_controls(spec)
        self._begun = b""  # an incomplete escape, which LLGuidance has not read
        # For each accepted token: the number of tokens that LLGuidance has read, and `_begun`
        # before the token.
        self._accepted: list[tuple[int, bytes]] = []

    def accept(self, token: int) -> bool:
        """Read a token; return False if LLGuidance refuses its text."""
        text = self._begun + self._tokens[token]
        if not text:  # a stop id
            return self._matcher.accept(token)
        plain, begun = _unescaped(text)
        count = self._read(text[: len(text) - len(begun)])
        if count is None:
            count = self._read(plain)
        if count is None:
            return False
        self._accepted.append((count, self._begun))
        self._begun = begun
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last calls of `accept`, none of them with a stop id."""
        for _ in range(num_tokens):
            count, self._begun = self._accepted.pop()
            self._matcher.rollback(count)

    def require_row(self, legal: list[int], text: bytes) -> None:
        """Require that `legal` are the tokens of LLGuidance's row, and tokens with escapes.

        The additional tokens must be legal after their escapes are replaced with characters.
        """
        count = self._read(self._begun)
        expected = [] if count is None else self._row()
        self._matcher.rollback(count or 0)
        if legal == expected:
            return
        more = set(legal) - set(expected)
        fewer = set(expected) - set(legal)
        wrong = {token for token in more if not self._is_escape(token)}
        if wrong or fewer:
            also, without = ([self._tokens[token] for token in part] for part in (wrong, fewer))
            raise AssertionError(f"after {text!r}: also allows {also}, does not allow {without}")

    def require_escapes(self, automaton: Matcher, text: bytes) -> None:
        """Require that an automaton allows the escapes of exactly those characters that are legal.

        The method tries a few characters. Escapes of ASCII characters need not be legal.
        """
        if self._begun or not self._is_json:
            return
        for character, escape in _ESCAPES.items():
            count = self._read(character.encode())
            self._matcher.rollback(count or 0)
            num_read = 0
            while num_read < len(escape) and automaton.accept(FIRST_BYTE + escape[num_read]):
                num_read += 1
            automaton.rollback(num_read)
            is_legal = num_read == len(escape)
            assert is_legal == (count is not None), f"{escape!r} after {text!r}"

    def _is_escape(self, token: int) -> bool:
        """Return whether a token contains a legal escape that LLGuidance refuses."""
        text = self._begun + self._tokens[token]
        if not self.allows_controls and _CONTROL.search(text):
            return True
        plain, _ = _unescaped(text)
        if plain == text:
            return False
        count = self._read(plain)
        self._matcher.rollback(count or 0)
        return count is not None

    def _row(self) -> list[int]:
        row = np.zeros(self._words, np.int32)
        assert self._matcher.fill(row)
        return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()

    def _read(self, text: bytes) -> int | None:
        """Let LLGuidance read a text; return the number of tokens, or None if it refuses them."""
        for count, byte in enumerate(text):
            if not self._matcher.accept(FIRST_BYTE + byte):
                self._matcher.rollback(count)
                return None
        return len(text)


@functools.lru_cache(maxsize=64)
def _allows_controls(spec: Spec) -> bool:
    """Return whether LLGuidance allows the escapes of control characters in strings of a schema."""
    return OPTIONS not in str(resolve_for_backend(spec, "llguidance").content)


def _unescaped(text: bytes) -> tuple[bytes, bytes]:
    r"""Replace the ``\u`` escapes of a part of a JSON text with their characters.

    Escapes of control characters remain. The second result is an incomplete escape at the end of
    the text, which the first result does not contain.
    """
    out = b""
    while b"\\" in text:
        start = text.index(b"\\")
        out += text[:start]
        text = text[start:]
        length = 2
        if text[1:2] == b"u":
            length = 12 if _HIGH_SURROGATE.match(text) else 6
        if len(text) < length:
            return out, text
        escape = text[:length]
        if not _CONTROL.match(escape):
            try:
                character = json.loads(b'"' + escape + b'"')
                escape = json.dumps(character, ensure_ascii=False)[1:-1].encode()
            except ValueError:  # no JSON, for example a tag's text
                length = 1
                escape = text[:1]
        out += escape
        text = text[length:]
    return out + text, b""
