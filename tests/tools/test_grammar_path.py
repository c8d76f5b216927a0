"""Conversions of the grammar of a request between the HTTP body and the matcher."""

from __future__ import annotations

import importlib
import json
import pickle

import pytest

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from guide_util import BYTES
from request_util import chat_request

from graft.grammar import GrammarError, GrammarService
from graft.models.request import Limits
from graft.native.children.process import ChildProcess
from graft.tools.serve.grammars import FoundGrammar, find_grammars, make_grammar_spec
from graft.tools.serve.tool_formats import TOOL_FORMATS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "kind": {"type": ["string", "null"], "not": {"const": "x"}},
        "next": {"$ref": "#/$defs/next"},
    },
    "required": ["name"],
    "$defs": {"next": {"enum": ["a", "b"]}},
}
CLOSED = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]*$"}, "age": {"type": "integer"}},
    "additionalProperties": False,
}


def schema_fields(schema):
    definition = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": definition}}


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
CALL = {"tools": [FUNCTION], "tool_choice": "required"}


class Counters:
    """Counts conversions of JSON objects and arrays, and calls of child processes.

    Calls run in this process. Their arguments and results are pickled, as for a child process.
    """

    def __init__(self, monkeypatch):
        self.conversions = 0
        self.calls = 0
        self.pickles = 0
        dumps, loads = json.dumps, json.loads

        def count_dumps(value, **options):
            self.conversions += isinstance(value, (dict, list))
            return dumps(value, **options)

        def count_loads(text, **options):
            value = loads(text, **options)
            self.conversions += isinstance(value, (dict, list))
            return value

        monkeypatch.setattr(json, "dumps", count_dumps)
        monkeypatch.setattr(json, "loads", count_loads)
        monkeypatch.setattr(ChildProcess, "call", lambda _, call, *limit: self.run(call))

    def run(self, call):
        if call.setup is not None:
            self.run_function(call.setup)
        self.calls += 1
        return self.pickled(self.run_function(call))

    def run_function(self, call):
        module, _, name = call.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        return function(*self.pickled(call.arguments))

    def pickled(self, value):
        self.pickles += 1
        return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize(
    "fields, choice, conversions",
    [
        (schema_fields(SCHEMA), "auto", 3),
        (schema_fields(CLOSED), "auto", 3),  # compiled with an automaton
        (schema_fields(SCHEMA | {"additionalProperties": False}), "llguidance", 3),
        (schema_fields({"type": "object", "properties": {"a": {"enum": ["b"]}}}), "xgrammar", 3),
        # LLGuidance checks the schema alone, and the Lark grammar of a call contains its text
        # again.
        (CALL, "auto", 4),
    ],
)
def test_request_grammar_needs_one_child_call(monkeypatch, fields, choice, conversions):
    """The text of a schema is written for the cache, read in the child and written for LLGuidance.

    A request with the same schema only needs the text for the cache.
    """
    service = GrammarService(BYTES, choice)
    try:
        counters = Counters(monkeypatch)
        for most_conversions, calls in ((conversions, 1), (1, 0)):
            counters.conversions = counters.calls = counters.pickles = 0
            [found] = find_grammars(chat_request(**fields), Limits(), TOOL_FORMATS["hermes"])
            compiled = service.submit(make_grammar_spec(found)).result(60)
            assert counters.calls == calls
            assert 0 < counters.conversions <= most_conversions
            if choice != "xgrammar":  # a process of XGrammar receives the vocabulary once
                assert counters.pickles == 2 * calls
        assert len(compiled.matcher().legal()) > 0
    finally:
        service.close()


@pytest.mark.parametrize("kind", ["regex", "ebnf", "choice"])
def test_value_that_json_cannot_express_is_reported_with_its_kind(kind):
    grammar = FoundGrammar(kind, kind, float("nan"))
    with pytest.raises(GrammarError, match=f"^{kind}: cannot be read"):
        make_grammar_spec(grammar)
