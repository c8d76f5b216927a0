"""Helpers of the router's tests: grammars in LLGuidance's form, compiled for single bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from guide_util import BYTES, STOP, accepts

from graft.grammar import GrammarSpec, LLGuidanceBackend, Route

_backend = functools.cache(lambda: LLGuidanceBackend(BYTES))


class Grammar:
    """A schema that is compiled unchanged, a Lark grammar, or a specification."""

    def __init__(self, schema: Any = None, rules: str = "", spec: GrammarSpec | None = None):
        text = json.dumps(schema)
        unchanged = GrammarSpec(
            "json_schema", text, backend="llguidance", partial=True, source=text, rules=rules
        )
        self._compiled = _backend().compile(spec or unchanged)

    @classmethod
    def routed(cls, found: Route) -> Grammar:
        """Return the grammar of a route."""
        return cls(found.schema, found.rules)

    def generate(self, choose: Callable[[list[int]], int], max_bytes: int) -> bytes | None:
        """Return a text of chosen legal bytes; None if it has more than `max_bytes`."""
        matcher = self._compiled.matcher()
        out = bytearray()
        while len(out) < max_bytes:
            token = choose(matcher.legal().tolist())
            if token == STOP:
                return bytes(out)
            assert matcher.accept(token)
            out.append(token)
        return None

    def accepts(self, text: str) -> bool:
        """Return whether the whole text is accepted."""
        return accepts(self._compiled, text)

    def accepts_value(self, value: Any) -> bool:
        """Return whether the value is accepted in the form of ``json.dumps``."""
        return self.accepts(json.dumps(value, ensure_ascii=False))


def plain(value: Any) -> Any:
    """Return the value with whole floats as integers, as grammars produce them."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
