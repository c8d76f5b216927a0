"""Helpers of the router's tests.

Grammars are compiled with LLGuidance for a vocabulary of single bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from guide_util import BYTES, STOP, accepts

from graft.grammar import GrammarSpec, LLGuidanceBackend, Matcher, Route
from graft.grammar.automaton.unique_items import UniqueShapes
from graft.grammar.backends.llguidance import Prepared
from graft.grammar.schema.llguidance_check import document_text, schema_grammar

_backend = functools.cache(lambda: LLGuidanceBackend(BYTES))


class Grammar:
    """A compiled grammar.

    Parameters
    ----------
    schema
        JSON schema, which is compiled without being routed.
    rules
        Lark grammar to compile instead of the schema.
    spec
        Specification to compile instead of the schema.
    backend
        Backend; by default, one with a vocabulary of single bytes.
    automaton
        Serialized automaton of the grammar; None if there is none.
    unique
        Shapes with which the automaton's matchers enforce ``uniqueItems``; None without them.
    """

    def __init__(
        self,
        schema: Any = None,
        rules: str = "",
        spec: GrammarSpec | None = None,
        backend: LLGuidanceBackend | None = None,
        automaton: bytes | None = None,
        unique: UniqueShapes | None = None,
    ):
        backend = backend or _backend()
        if spec is not None:
            self._compiled = backend.compile(spec)
            return
        grammar = schema_grammar(document_text(schema, "line"))
        if rules:
            grammar = json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\n{rules}"}]})
        unchanged = GrammarSpec("json_schema", json.dumps(schema))
        self._compiled = backend.load(unchanged, Prepared(grammar, (), automaton, unique))

    @classmethod
    def routed(
        cls,
        found: Route,
        backend: LLGuidanceBackend | None = None,
        automaton: bytes | None = None,
        unique: UniqueShapes | None = None,
    ) -> Grammar:
        """Return the grammar that a route compiles."""
        schema = True if automaton else found.schema
        return cls(schema, found.rules, backend=backend, automaton=automaton, unique=unique)

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        return self._compiled.matcher()

    def generate(self, choose: Callable[[list[int]], int], max_bytes: int) -> bytes | None:
        """Generate a text that the grammar accepts.

        Parameters
        ----------
        choose
            Function that selects the next byte, or `STOP`, from the legal ones.
        max_bytes
            Maximum length of the text.

        Returns
        -------
        bytes or None
            The text; None if it is not complete after `max_bytes` bytes.
        """
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
        """Return whether the text that ``json.dumps`` writes for a value is accepted."""
        return self.accepts(json.dumps(value, ensure_ascii=False))


def plain(value: Any) -> Any:
    """Return a value in which floats without a fraction are replaced by integers.

    Grammars allow only this spelling of such numbers."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
