"""Tests of structural tags. The schema of a tag is either enforced exactly or refused."""

from __future__ import annotations

from typing import Any

import pytest
from guide_util import accepts, byte_vocabulary

from graft.grammar import GrammarError, GrammarService, GrammarSpec, StructuralTag

pytest.importorskip("llguidance")


@pytest.fixture(scope="module", params=["auto", "xgrammar", "llguidance"])
def service(request):
    service = GrammarService(byte_vocabulary(), request.param)
    yield service
    service.close()


def tagged(schema: Any, begin: str = "<t>") -> GrammarSpec:
    return GrammarSpec.structural_tag([StructuralTag.of(begin, schema, "</t>")], ["<t"])


def accepts_content(compiled: Any, content: str) -> bool:
    """Return whether a text that contains a tag with this content is accepted."""
    return accepts(compiled, f"say <t>{content}</t> so")


def closed_object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with the required property a."""
    return {
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "additionalProperties": False,
    }


#: Schemas, each with a text that satisfies it, a text that violates it, and whether XGrammar
#: enforces it.
SCHEMAS: dict[str, tuple[Any, str, str, bool]] = {
    "bounds": ({"type": "string", "minLength": 3, "maxLength": 5}, '"abc"', '"ab"', False),
    "pattern": ({"type": "string", "pattern": "^[a-c]{3,5}$"}, '"abc"', '"ab"', True),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, "42", "41", True),
    "reference": (
        {
            "$defs": {"n": closed_object(a={"type": "integer"}, b={"$ref": "#/$defs/n"})},
            "$ref": "#/$defs/n",
        },
        '{"a": 1, "b": {"a": 2}}',
        '{"a": 1, "b": {}}',
        True,
    ),
    "closed": (
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        '{"a": 1}',
        '{"a": 1, "b": 2}',
        True,
    ),
    "not": (
        closed_object(a={"type": ["string", "null"], "not": {"const": "x"}}),
        '{"a": "y"}',
        '{"a": "x"}',
        False,
    ),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, "5", "10", False),
}


@pytest.mark.parametrize("schema, good, bad, plain", SCHEMAS.values(), ids=SCHEMAS)
def test_structural_tag_schema_is_enforced_or_refused(service, schema, good, bad, plain):
    """The router converts the schema of a tag like the schema of a whole output.

    With XGrammar, a schema with a keyword that XGrammar ignores is refused.
    """
    future = service.submit(tagged(schema))
    if service.backend.name == "XGrammar" and not plain:
        refusal = str(future.exception(timeout=300))
        assert "cannot be enforced" in refusal and "partial" not in refusal
        return
    compiled = future.result(timeout=300)
    assert not compiled.spec.partial and compiled.spec.schema is None
    assert accepts_content(compiled, good) and not accepts_content(compiled, bad)


def test_structural_tag_error_names_tag_and_pointer(service):
    """check() fails if no installed backend enforces the schema of a tag.

    Compilation fails if the engine's backend does not enforce this schema.
    """
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(GrammarError, match=r"^tag schema: .*#/properties/a: uniqueItems: cannot"):
        StructuralTag.of("<t>", unique, "</t>").check()
    tag = StructuralTag("<tool=b>", GrammarSpec.json_schema(unique, partial=True).text, "</t>")
    with pytest.raises(GrammarError, match=r"<tool=b>.*#/properties/a: uniqueItems"):
        GrammarSpec.structural_tag([StructuralTag.of("<tool=a>", True, ""), tag], ["<tool"]).check()
    negated = closed_object(a={"type": ["string", "null"], "not": {"const": "x"}})
    spec = tagged(negated, "<t=f>")
    if service.backend.name == "XGrammar":
        refusal = str(service.submit(spec).exception(timeout=300))
        assert "structural_tag: '<t=f>': " in refusal and "#/properties/a: not" in refusal
    else:
        assert service.submit(spec).result(timeout=300) is not None


def test_structural_tag_schemas_are_independent(service):
    """Each tag accepts only content of its own schema, with and without a marker."""
    tags = [
        StructuralTag.of("<t=n>", {"type": "integer", "minimum": 5}, "</t>"),
        StructuralTag.of("<t=s>", {"enum": ["a", "b"]}, "</t>"),
    ]
    spec = GrammarSpec.structural_tag(tags, ["<t="], at_least_one=True).after("</think>")
    compiled = service.submit(spec).result(timeout=300)
    for text, fits in (
        ("<t=n>7</t>", True),
        ('<t=s>"b"</t>', True),
        ('<t=n>"b"</t>', False),
        ("<t=s>7</t>", False),
        ("<t=n>4</t>", False),
        ("none", False),
    ):
        assert accepts(compiled, f"hm </think>{text}") is fits, text


@pytest.mark.parametrize(
    "flags, fits",
    [
        ({}, [True, True, True, True]),
        ({"at_least_one": True}, [False, True, True, True]),
        ({"at_once": True}, [False, False, True, True]),
        ({"at_least_one": True, "at_once": True}, [False, False, True, True]),
    ],
)
def test_structural_tag_at_least_one_and_at_once(service, flags, fits):
    """Free text may precede the first tag with at_least_one, but not with at_once.

    In both cases, further tags may follow the first tag.
    """
    tag = StructuralTag.of("<t>", {"type": "integer"}, "</t>")
    compiled = service.submit(GrammarSpec.structural_tag([tag], ["<t"], **flags)).result(300)
    texts = ["none", "so <<t>1</t>", "<t>1</t>", "<t>1</t> and <t>2</t>."]
    assert [accepts(compiled, text) for text in texts] == fits
