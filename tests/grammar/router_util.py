"""What the router's tests share: what graft gives LLGuidance, compiled for bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from guide_util import BYTES, STOP, accepts

from graft.grammar import GrammarSpec, LLGuidanceBackend, Route

_backend = functools.cache(lambda: LLGuidanceBackend(BYTES))


class Grammar:
    """A schema as LLGuidance is to take it, or a Lark grammar instead; or what graft gives it."""

    def __init__(self, schema: Any = None, rules: str = "", spec: GrammarSpec | None = None):
        text = json.dumps(schema)
        unchanged = GrammarSpec(
            "json_schema", text, backend="llguidance", partial=True, source=text, rules=rules
        )
        self._compiled = _backend().compile(spec or unchanged)

    @classmethod
    def routed(cls, found: Route) -> Grammar:
        """What graft gives LLGuidance for a route."""
        return cls(found.schema, found.rules)

    def walk(self, choose: Callable[[list[int]], int], most: int) -> bytes | None:
        """A text of legal bytes, each chosen among them; None if it is longer than ``most``."""
        matcher = self._compiled.matcher()
        out = bytearray()
        while len(out) < most:
            token = choose(matcher.legal().tolist())
            if token == STOP:
                return bytes(out)
            assert matcher.accept(token)
            out.append(token)
        return None

    def accepts(self, text: str) -> bool:
        """Whether the whole text is accepted."""
        return accepts(self._compiled, text)

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
