"""Check schemas and grammars with LLGuidance's parser, which needs no vocabulary."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urldefrag, urljoin

from graft.grammar.schema.documents import SchemaObject, subschemas
from graft.grammar.schema.llguidance_options import OPTIONS, with_options
from graft.grammar.schema.name_spelling import with_one_spelling
from graft.grammar.schema.reasons import Reason
from graft.grammar.schema.references import References
from graft.grammar.spec import Whitespace, json_text

__all__ = [
    "document_text",
    "explain_assertion",
    "is_unsatisfiable",
    "keyword_of",
    "lark_error",
    "schema_error",
    "schema_errors",
    "schema_grammar",
    "text_error",
    "validate",
]

#: Limits of LLGuidance's parser and lexer, the same as in ``native/guide/llguidance_abi.cpp``.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 10**7,
    "step_lexer_fuel": 10**7,
    "max_items_in_row": 10**6,
    "step_max_items": 10**6,
}
#: Lower limits for proofs that no value satisfies a schema. A proof that exceeds them is given up.
_SMALL_LIMITS: dict[str, Any] = {"max_grammar_size": 20_000, "initial_lexer_fuel": 50_000}
_MAX_SEARCHED = 400  # maximum number of subschemas that are searched for the cause of an error
#: Patterns of LLGuidance's error messages, each with the keyword that causes the error.
_KEYWORD_OF = (
    (r"Unknown format", "format"),
    (r"range: min=None", "maximum"),
    (r"float range|integer range", "minimum"),
    (r"patternPropert", "patternProperties"),
    (r"regex|lookaround", "pattern"),
    (r"Resource|Anchor|circular references|Pointer|not found", "$ref"),
    (r"oneOf", "oneOf"),
    (r"min/maxProperties", "minProperties"),
)
#: LLGuidance's error for a reference to a document that it does not have.
_MISSING_RESOURCE = re.compile("Resource '.*' is not present")
#: LLGuidance's error for an assertion in a regular expression, such as an anchor.
_ASSERTION = re.compile(r"lookarounds not supported yet; (\w+) in regex (/.*/)", re.DOTALL)


def document_text(schema: Any, whitespace: Whitespace) -> str:
    """Return the JSON text that LLGuidance compiles: the schema with LLGuidance's options.

    Raise `GrammarError` if the schema cannot be written as JSON.
    """
    return json_text(with_options({"not": {}} if schema is False else schema, whitespace))


def schema_grammar(text: str) -> str:
    """Return a grammar in LLGuidance's JSON format. `text` is a result of `document_text`."""
    return f'{{"grammars": [{{"json_schema": {text}}}]}}'


def text_error(text: str) -> str:
    """Return LLGuidance's error for the result of `document_text`; empty if there is no error."""
    return _first_error(*validate(schema_grammar(text)))


def validate(text: str, limits: dict[str, Any] = _LIMITS) -> tuple[bool, list[str]]:
    """Return whether LLGuidance refuses a grammar, and its error messages and warnings.

    The grammar is in LLGuidance's JSON format. `limits` are arguments of ``LLParserLimits``.
    """
    from llguidance import LLMatcher, LLParserLimits  # type: ignore[import-not-found, unused-ignore]

    try:
        return LLMatcher.validate_grammar_with_warnings(text, limits=LLParserLimits(**limits))
    except BaseException as error:  # a panic of Rust code is not a subclass of Exception
        if type(error).__name__ != "PanicException":
            raise
        return True, [f"LLGuidance fails: {error}"]


def schema_error(schema: Any, *, lenient: bool = False) -> str:
    """Return LLGuidance's error for a parsed schema; empty if it accepts the schema.

    With `lenient`, LLGuidance ignores unsupported keywords instead of refusing them, and the lower
    limits `_SMALL_LIMITS` apply.
    """
    document = schema
    if schema is True:
        document = {}
    elif schema is False:
        document = {"not": {}}
    options = {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": lenient}
    text = json.dumps({**document, OPTIONS: {**document.get(OPTIONS, {}), **options}})
    limits = _SMALL_LIMITS if lenient else _LIMITS
    error = _first_error(*validate(schema_grammar(text), limits))
    return _name_first_resource(document, error) if _MISSING_RESOURCE.match(error) else error


def _name_first_resource(document: SchemaObject, error: str) -> str:
    """Return the error about the first document to which a schema refers and that is missing.

    If several documents are missing, LLGuidance names an arbitrary one, another one in each call.
    """
    references = References(document)
    if references.nested:
        return error
    for _, part in subschemas(document):
        reference = part.get("$ref")
        if not isinstance(reference, str) or references.pointer(reference) is not None:
            continue
        resource = urldefrag(urljoin(references.base, reference)).url
        text = json.dumps({"$ref": resource})
        first_error = _first_error(*validate(schema_grammar(text)))
        if _MISSING_RESOURCE.match(first_error):
            return first_error
    return error


def lark_error(rules: str) -> str:
    """Return LLGuidance's error for a Lark grammar; empty if it accepts the grammar."""
    text = json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\n{rules}"}]})
    return _first_error(*validate(text))


def _first_error(refused: bool, messages: list[str]) -> str:
    if not refused:
        return ""
    first, *details = messages[0].split("\n")
    # LLGuidance prints an excerpt of a regular expression before the reason of its error.
    reasons = [line for line in details if line.startswith("error: ")]
    if not reasons:
        return explain_assertion(first)
    reason = reasons[0].removeprefix("error: ")
    return f"{first} {reason}"


def explain_assertion(message: str) -> str:
    """Rewrite LLGuidance's error message for an unsupported assertion in a regular expression."""
    found = _ASSERTION.search(message)
    if found is None:
        return message
    name, pattern = found.groups()
    if name.startswith("Word"):
        assertion = "a word boundary"
    else:
        assertion = "an anchor (^ or $) that is not at its start or end"
    before, after = message[: found.start()], message[found.end() :]
    return f"{before}the regex {pattern} contains {assertion}, which is not supported{after}"


def is_unsatisfiable(schema: SchemaObject) -> bool:
    """Return whether LLGuidance proves that no value satisfies a schema.

    Keywords that LLGuidance does not support are ignored in the proof.
    """
    return schema_error(schema, lenient=True).startswith("Unsatisfiable")


def schema_errors(schema: Any) -> list[Reason]:
    """Return the reason why LLGuidance refuses a schema, as a list of at most one element.

    The list is empty if LLGuidance accepts the schema. The reason names the innermost subschema
    that causes the same error when it is compiled alone.
    """
    schema = with_one_spelling(schema).schema
    error = schema_error(schema)
    if not error:
        return []
    if error.startswith("Unsatisfiable"):
        return [Reason("#", "schema", f"allows no output ({error})")]
    keyword = keyword_of(error)
    shared = {}  # keywords of the document that every subschema needs
    for key in (OPTIONS, "$schema", "$id", "id", "$defs", "definitions"):
        if isinstance(schema, dict) and key in schema:
            shared[key] = schema[key]
    innermost = "#"
    for pointer, part in subschemas(schema)[:_MAX_SEARCHED]:
        inside = pointer == innermost or pointer.startswith(innermost + "/")
        if inside and keyword in part and schema_error({**shared, **part}) == error:
            innermost = pointer
    return [Reason(innermost, keyword, error)]


def keyword_of(error: str) -> str:
    """Return the keyword that an error message refers to, or ``"schema"`` if it is unknown."""
    named = re.search(r"(?:keys: \[\"|for ')([$A-Za-z]+)", error)
    if named:
        return named[1]
    for pattern, keyword in _KEYWORD_OF:
        if re.search(pattern, error):
            return keyword
    return "schema"
