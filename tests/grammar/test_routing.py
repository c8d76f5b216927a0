"""A schema that names no backend is judged by the engine's own one, and by no other."""

from __future__ import annotations

import json
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest

from graft.grammar import (
    GrammarError,
    GrammarService,
    GrammarSpec,
    LLGuidanceBackend,
    Vocabulary,
    XGrammarBackend,
)
from graft.grammar import routing as routing_module

pytest.importorskip("llguidance")

STOP = 256
NOT = {"type": "object", "properties": {"a": {"type": ["string", "null"], "not": {"const": "x"}}},
       "required": ["a"], "additionalProperties": False}  # fmt: skip
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
PLAIN = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def vocabulary() -> Vocabulary:
    """Single bytes and a stop id."""
    return Vocabulary([bytes([b]) for b in range(256)] + [b""], 257, [STOP])


def service(choice: Any) -> GrammarService:
    return GrammarService(vocabulary(), choice)


def takes(compiled: Any, value: Any) -> bool:
    """Whether the grammar accepts the value's text."""
    matcher = compiled.backend.matcher(compiled)
    return all(matcher.accept(b) for b in json.dumps(value).encode()) and matcher.accept(STOP)


@pytest.mark.parametrize("choice", ["auto", "llguidance"])
def test_the_engines_router_enforces_what_xgrammar_would_ignore(choice):
    """A schema with a complement runs, exactly, where the engine's backend can enforce it."""
    with_router = service(choice)
    try:
        compiled = with_router.submit(GrammarSpec.json_schema(NOT)).result(120)
        assert compiled.spec.backend == "llguidance" and not compiled.spec.partial
        assert compiled.spec.schema == NOT
        assert takes(compiled, {"a": "y"}) and takes(compiled, {"a": None})
        assert not takes(compiled, {"a": "x"})
        again = with_router.submit(GrammarSpec.json_schema(NOT))
        assert again.result(120) is compiled
    finally:
        with_router.close()


def test_an_xgrammar_engine_refuses_what_it_would_ignore():
    """The same schema fails by place and keyword with XGrammar; nothing is dropped."""
    plain = service("xgrammar")
    try:
        spec = GrammarSpec.json_schema(NOT)
        error = plain.submit(spec).exception(120)
        assert isinstance(error, GrammarError) and "#/properties/a: not" in str(error)
        assert str(plain.submit(spec).exception(120)) == str(error)
        compiled = plain.submit(GrammarSpec.json_schema(PLAIN)).result(120)
        assert isinstance(compiled.backend, XGrammarBackend) and takes(compiled, {"n": 1})
    finally:
        plain.close()
    with pytest.raises(GrammarError, match="#/properties/a: not"):
        XGrammarBackend(vocabulary()).compile(GrammarSpec.json_schema(NOT))


def test_what_no_backend_enforces_is_refused_when_it_is_stated():
    """uniqueItems over any strings is refused at once, by whichever name; partial takes it."""
    for backend in ("", "auto", "llguidance", "xgrammar"):
        with pytest.raises(GrammarError, match=r"cannot be enforced: #: uniqueItems"):
            GrammarSpec.json_schema(UNIQUE, backend=backend)
    with_router = service("auto")
    try:
        compiled = with_router.submit(GrammarSpec.json_schema(UNIQUE, partial=True)).result(120)
        assert compiled.spec.partial and takes(compiled, ["x", "x"])
    finally:
        with_router.close()


def test_a_backend_by_itself_judges_like_the_engine():
    """A schema without a backend is rewritten for LLGuidance, closed only where asked for."""
    backend = LLGuidanceBackend(vocabulary())
    compiled = backend.compile(GrammarSpec.json_schema(NOT))
    assert takes(compiled, {"a": "y"}) and not takes(compiled, {"a": "x"})
    closed = backend.compile(GrammarSpec.json_schema(PLAIN, strict=True))
    assert takes(closed, {"n": 1}) and not takes(closed, {"n": 1, "more": 2})
    open_ = backend.compile(GrammarSpec.json_schema(PLAIN))
    assert takes(open_, {"n": 1, "more": 2})


def test_auto_compiles_every_kind_of_grammar():
    """EBNF goes to XGrammar, whose notation it is; markers stay with their grammar."""
    with_router = service("auto")
    try:
        ebnf = with_router.submit(GrammarSpec.ebnf('root ::= "a" [0-9]')).result(120)
        assert isinstance(ebnf.backend, XGrammarBackend)
        for spec in (GrammarSpec.regex("a+"), GrammarSpec.choice(["a", "b"]),
                     GrammarSpec.json_object(), GrammarSpec.lark('start: "a"')):  # fmt: skip
            assert with_router.submit(spec).result(120).spec.kind == spec.kind
        marked = GrammarSpec.json_schema(PLAIN).after("</think>")
        compiled = with_router.submit(marked).result(120)
        assert compiled.spec.marker == marked.marker
        matcher = compiled.backend.matcher(compiled)
        assert all(matcher.accept(b) for b in b'hm</think>{"n": 1}') and matcher.accept(STOP)
    finally:
        with_router.close()


def test_a_closed_router_fails_what_is_open_and_what_comes(monkeypatch):
    """Closing leaves no future without an outcome, and no thread behind."""
    with_router = service("auto")
    monkeypatch.setattr(routing_module, "_KEPT", 2)
    specs = [GrammarSpec.json_schema({"type": "string", "maxLength": n}) for n in range(1, 40)]
    futures = [with_router.submit(spec) for spec in specs]
    with_router.close()
    assert not wait(futures, timeout=120).not_done
    for future in futures:
        assert future.exception() is None or isinstance(future.exception(), GrammarError)
    with pytest.raises(GrammarError, match="closed"):
        with_router.submit(specs[-1])


def test_auto_needs_a_backend(monkeypatch):
    """With neither library there is nothing to choose from."""
    from graft.cudagraph.errors import OptionError

    monkeypatch.setattr(routing_module, "available_backends", lambda: ())
    with pytest.raises(OptionError, match="auto needs llguidance or xgrammar"):
        service("auto")


def test_masks_of_a_routed_grammar_are_those_of_the_named_one():
    """Routing at submission and routing by name give one and the same grammar."""
    with_router = service("auto")
    try:
        first = with_router.submit(GrammarSpec.json_schema(NOT)).result(120)
        second = with_router.submit(
            GrammarSpec.json_schema(NOT, backend="auto", strict=True)
        ).result(120)
        rows = np.zeros((2, vocabulary().words), np.int32)
        matchers = [c.backend.matcher(c) for c in (first, second)]
        for byte in b'{"a": "yes"}':
            for row, matcher in zip(rows, matchers, strict=True):
                matcher.fill(row)
                assert matcher.accept(byte)
            np.testing.assert_array_equal(rows[0], rows[1])
    finally:
        with_router.close()
