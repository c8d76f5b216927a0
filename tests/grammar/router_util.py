"""What the router's tests share: LLGuidance fed byte by byte, and orders of an instance's keys."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graft.grammar.backends.llguidance import grammar_text
from graft.grammar.schema.router import Route
from graft.grammar.statement import GrammarSpec

OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STOP = 256


class _Bytes:
    """A tokenizer whose tokens are the bytes, and a stop id."""

    eos_token_id, bos_token_id = STOP, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"\xff<stop>"]  # noqa: RUF012
    special_token_ids = [STOP]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@functools.cache
def _library() -> tuple[Any, Any, Any]:
    llguidance = pytest.importorskip("llguidance")
    wrapper = pytest.importorskip("llguidance._tokenizer").TokenizerWrapper
    limits = llguidance.LLParserLimits(initial_lexer_fuel=10**8)
    return llguidance.LLMatcher, llguidance.LLTokenizer(wrapper(_Bytes())), limits


class Grammar:
    """A schema compiled by stock LLGuidance for bytes."""

    def __init__(self, schema: Any, text: str = ""):
        matcher, tokenizer, limits = _library()
        text = text or matcher.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)
        self._first = matcher(tokenizer, text, log_level=0, limits=limits)
        assert not self._first.is_error(), self._first.get_error()

    @classmethod
    def of(cls, spec: GrammarSpec) -> Grammar:
        """What graft gives LLGuidance for a grammar."""
        return cls(None, grammar_text(spec))

    @classmethod
    def routed(cls, found: Route) -> Grammar:
        """What graft gives LLGuidance for a route."""
        return cls.of(GrammarSpec(
            "json_schema", json.dumps(found.schema), strict=False, backend="llguidance",
            rules=found.rules,
        ))  # fmt: skip

    def walk(self, choose: Callable[[list[int]], int], most: int) -> bytes | None:
        """A text of legal bytes, each chosen among them; None if it is longer than ``most``."""
        matcher, mask, out = self._first.deep_copy(), np.zeros(9, np.int32), bytearray()
        while len(out) < most:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            token = choose(legal)
            if token == STOP:
                return bytes(out)
            assert matcher.try_consume_tokens([token]) == 1
            out.append(token)
        return None

    def accepts(self, text: str) -> bool:
        """Whether the whole text is accepted."""
        matcher = self._first.deep_copy()
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    def takes(self, value: Any) -> bool:
        """Whether the value is accepted as ``json.dumps`` writes it."""
        return self.accepts(json.dumps(value, ensure_ascii=False))


def plain(value: Any) -> Any:
    """The value with whole floats as integers, as grammars write them."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
