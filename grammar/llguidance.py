"""LLGuidance through its C ABI."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from collections.abc import Iterable
from typing import Any

from graft.native import _native

from .backend import ending_ids
from .errors import GrammarError, clean_message
from .json_lark_text import literal
from .key_order import in_any_order, json_options
from .marker import marked
from .matcher import CompiledGrammar, Matcher, NativeBackedMatcher
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = ["LLGuidanceBackend", "grammar_text", "library", "objection", "probe"]

_RELEASE = "1.9."
_MATCHER_BYTES = 80 << 10  # LLGuidance does not tell: measured for a schema and 129k tokens


@functools.cache
def library() -> Any:
    """LLGuidance's Python module.

    Raises
    ------
    GrammarError
        If LLGuidance is not installed, is of another release, or cannot be loaded.
    """
    install = "install it with: pip install llguidance==1.9.1"
    try:
        release = importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError as error:
        raise GrammarError(f"LLGuidance is not installed; {install}") from error
    if not release.startswith(_RELEASE):
        raise GrammarError(f"LLGuidance {release} is installed, graft needs {_RELEASE}x; {install}")
    try:
        import llguidance
    except (ImportError, OSError) as error:
        raise GrammarError(f"LLGuidance {release} cannot be used: {error}") from error
    return llguidance


@functools.cache
def probe() -> str:
    """Hand LLGuidance's C symbols to the native worker, which checks them; returns the release.

    Raises
    ------
    GrammarError
        If they are not the known ones.
    """
    try:
        return str(_native.guide.load_llguidance(library()._lib.__file__))
    except (OSError, RuntimeError, AttributeError) as error:
        raise GrammarError(f"LLGuidance cannot be driven natively: {error}") from error


def grammar_text(spec: GrammarSpec) -> str:
    """LLGuidance's JSON form of a grammar, in which any spelling of a text in tokens is legal.

    Raises
    ------
    GrammarError
        If the grammar cannot be stated to LLGuidance.
    """
    head = '%llguidance {"no_forcing": true}'
    return json.dumps({"grammars": [{"lark_grammar": f"{head}\n{_lark(spec)}"}]})


def _lark(spec: GrammarSpec) -> str:
    spec = spec.resolved("llguidance")
    if spec.kind == "json_schema":
        return _json_schema(spec)
    if spec.kind == "regex":
        # Slashes end a regex in Lark unless they are escaped.
        return "start: /" + _escape_slashes(spec.text) + "/"
    if spec.kind == "lark":
        return spec.text
    if spec.kind == "choice":
        options = (literal(option) for option in json.loads(spec.text))
        return "start: " + " | ".join(options)
    if spec.kind == "structural_tag":
        return _structural_tag(spec.text)
    if spec.root != "root":
        raise GrammarError(f"ebnf: LLGuidance starts from the rule root, not {spec.root!r}")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(spec.text)
    except Exception as error:  # the converter raises whatever comes, Exception itself too
        raise GrammarError(f"ebnf: {clean_message(error)}") from error


def objection(message: str, kind: str) -> str:
    """LLGuidance's reason in one sentence, with the place only where it is one of the user's."""
    lines = message.strip().split("\n")
    reasons = [line[len("error: ") :] for line in lines if line.startswith("error: ")]
    text = re.split(r"\s\d+ \| ", clean_message(message))[0]
    if reasons:  # of a regex: an excerpt stands before it
        text = re.split(r" \(in regex\)|: regex parse error", text)[0] + f": {reasons[0]}"
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", text)
    if place:  # graft's own first line is not the user's
        where = f"line {int(place[1]) - 1}, column {place[2]}: " if kind == "lark" else ""
        text = where + text[place.end() :]
    return text


def _escape_slashes(pattern: str) -> str:
    escaped, out = False, []
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def _json_schema(spec: GrammarSpec) -> str:
    schema = json.loads(spec.text)
    if not isinstance(schema, dict):
        schema = {}
    if spec.strict:
        schema = close_objects(schema)
    if spec.key_order == "any":
        found = in_any_order(json.dumps(schema, ensure_ascii=False), spec.any_whitespace)
        if found.rules:
            return found.rules
        if found.kept:
            raise GrammarError(f"JSON schema: {found.kept[0]}")
    return "start: %json " + json.dumps(
        {**schema, "x-guidance": json_options(spec.any_whitespace)}
    )


_COMBINING = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas")
)


def close_objects(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` where an object lists its properties.

    An object that says anything about further properties is left as it is, and so is every object
    of a schema that combines schemas with ``allOf``: closing one part would forbid what another
    part requires.
    """
    if '"allOf"' in json.dumps(schema):
        return schema
    return _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(out.get(key), dict):
            out[key] = {name: _close(value) for name, value in out[key].items()}
    for key in ("items", "additionalProperties", "contains"):
        if key in out:
            out[key] = _close(out[key])
    for key in ("prefixItems", "items", "anyOf", "oneOf"):
        if isinstance(out.get(key), list):
            combined = key in ("anyOf", "oneOf") and "properties" in out
            out[key] = out[key] if combined else [_close(value) for value in out[key]]
    says = ("additionalProperties", "patternProperties", "unevaluatedProperties")
    if "properties" in out and not any(key in out for key in says) and not _COMBINING & set(out):
        out["additionalProperties"] = False
    return out


def _structural_tag(text: str) -> str:
    """Free text is a lazy lexeme that ends at a trigger; what follows is forced."""
    spec = json.loads(text)
    rules = [
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(spec['tags'])))})"
        + ("+" if spec["at_least_one"] else "*")
        + " rest",
        "rest: FREE",
        r"FREE: /(.|\n)*/",
    ]
    for i, tag in enumerate(spec["tags"]):
        trigger = next(t for t in spec["triggers"] if tag["begin"].startswith(t))
        schema = tag["schema"] if isinstance(tag["schema"], dict) else {}
        content = {**schema, "x-guidance": {"whitespace_flexible": True}}
        parts = [tag["begin"][len(trigger) :], content, tag["end"]]
        body = [
            literal(part) if isinstance(part, str) else "%json " + json.dumps(part)
            for part in parts
            if part != ""
        ]
        rules.append(f"open_{i}[lazy]: FREE {literal(trigger)}")
        rules.append(f"tag_{i}: open_{i} " + " ".join(body))
    return "\n".join(rules)


class LLGuidanceBackend:
    """Compiles grammars for one vocabulary and makes matchers.

    Parameters
    ----------
    vocabulary
        Token bytes, logit columns and stop ids.

    Notes
    -----
    Construction sorts the vocabulary, about 0.6 s for 128k tokens. Matchers share nothing, no lock
    either: each is a deep copy, made in microseconds, of one that stands at the start.
    Every spelling of a text in tokens is legal.
    """

    name = "LLGuidance"

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        probe()
        tokens = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        for name, token in vocabulary.names.items():
            tokens[token] = b"\xff" + name.encode("utf-8")
        try:
            self._tokenizer = _native.guide.LLGuidanceTokenizer(
                [len(token) for token in tokens], b"".join(tokens), vocabulary.stop_ids
            )
        except RuntimeError as error:
            raise GrammarError(f"LLGuidance refuses the vocabulary: {error}") from error

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile on the calling thread; LLGuidance's limits of grammar and lexer size bound it.

        Raises
        ------
        GrammarError
            With LLGuidance's reason, if it refuses the grammar or would enforce it in part only.
        """
        text = grammar_text(spec)
        kind, _, said = self._tokenizer.judge(text).partition(": ")
        if kind == "error":
            raise GrammarError(f"{spec.kind}: {objection(said, spec.kind)}")
        if said and not spec.partial:
            ignored = objection(said, spec.kind)
            raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {ignored}")
        try:
            native = _native.guide.LLGuidanceGrammar(self._tokenizer, text)
        except RuntimeError as error:
            raise GrammarError(f"{spec.kind}: {objection(str(error), spec.kind)}") from None
        return CompiledGrammar(self, spec, native, _MATCHER_BYTES + len(text))

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start of the grammar, independent of all others.

        Parameters
        ----------
        compiled
            A grammar of this backend.
        stop_ids
            The request's stop ids, the vocabulary's if absent. Once the grammar is complete, each
            of them that is no text is legal and terminates it.
        """
        if compiled.backend is not self:
            raise GrammarError("matcher: the grammar was compiled for another vocabulary")
        ending = ending_ids(self.vocabulary, stop_ids)
        handle = _native.guide.LLGuidanceMatcher(compiled.native, ending)
        return marked(NativeBackedMatcher(compiled, ending, handle), compiled.spec.marker)
