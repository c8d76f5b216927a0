"""LLGuidance through its C ABI."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.grammar.backends.base import ending_ids, require_release
from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.matcher import CompiledGrammar, Matcher, NativeBackedMatcher
from graft.grammar.resolve import resolved
from graft.grammar.schema.options import Whitespace, json_options, literal
from graft.grammar.schema.trial import validate
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native
from graft.native.children.process import Question

__all__ = ["LLGuidanceBackend", "grammar_text", "probe", "read", "readable_text"]

_MATCHER_BYTES = 80 << 10  # LLGuidance does not tell: measured for a schema and 129k tokens


@functools.cache
def probe() -> str:
    """Hand LLGuidance's C symbols to the native worker, which checks them; returns the release."""
    require_release("LLGuidance", "llguidance", "1.9.", "llguidance==1.9.1")
    try:
        import llguidance

        return str(_native.guide.load_llguidance(llguidance._lib.__file__))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise OptionError(
            f"grammar_backend: LLGuidance cannot be driven natively: {error}"
        ) from error


def grammar_text(spec: Spec) -> str:
    """LLGuidance's JSON form of a grammar, in which any spelling of a text in tokens is legal."""
    return json.dumps({"grammars": [_grammar(spec)]})


def _grammar(spec: Spec) -> dict[str, Any]:
    spec = resolved(spec, "llguidance")
    if spec.kind == "json_schema" and not spec.rules:  # reading Lark takes a millisecond
        return {"json_schema": _document(json.loads(spec.text), spec.whitespace)}
    head = '%llguidance {"no_forcing": true}'
    return {"lark_grammar": f"{head}\n{spec.rules or _lark(spec)}"}


def _lark(spec: Spec) -> str:
    if spec.kind == "regex":
        # slashes end a regex in Lark unless they are escaped, and so do newlines
        pattern = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", spec.text, flags=re.DOTALL)
        return "start: /" + pattern.replace("\n", r"\n") + "/"
    if spec.kind == "lark":
        return spec.text
    if spec.kind == "choice":
        options = (literal(option) for option in json.loads(spec.text))
        # one lexeme: as a rule of so many parts it would be slow, and too long for a row of items
        return "start: CHOICE\nCHOICE: " + " | ".join(options)
    if spec.kind == "structural_tag":
        return _structural_tag(json.loads(spec.text), spec.whitespace)
    if spec.root != "root":
        raise GrammarError(f"ebnf: LLGuidance starts from the rule root, not {spec.root!r}")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(spec.text)
    except Exception as error:  # the converter raises whatever comes, Exception itself too
        raise GrammarError(f"ebnf: {clean_message(error)}") from error


def read(spec: Spec) -> str:
    """LLGuidance's objection to a grammar, without compiling it; empty if it can read it."""
    try:
        readable_text(replace(spec, partial=True))
    except GrammarError as error:
        return str(error).removeprefix(f"{spec.kind}: ").removeprefix("structural tag ")
    return ""


def readable_text(spec: Spec) -> str:
    """`grammar_text` of a grammar that LLGuidance takes, without warnings unless ``partial``."""
    grammar = _grammar(spec)
    refused, lines = validate(grammar)
    # special tokens are known with the vocabulary: an unknown one is refused by `load`
    heard = [line for line in lines if not line.startswith("no tokenizer")]
    said = _objection("\n".join(heard), spec.kind)
    if refused:
        raise GrammarError(f"{spec.kind}: {said or 'is refused'}")
    if said and not spec.partial:
        raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {said}")
    return json.dumps({"grammars": [grammar]})


def _is_read(spec: Spec) -> bool:
    """Whether LLGuidance has taken this very schema when it was routed."""
    return bool(spec.source) and not spec.partial


def _objection(message: str, kind: str) -> str:
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


def _document(schema: Any, whitespace: Whitespace) -> dict[str, Any]:
    document = schema if isinstance(schema, dict) else {}
    return {**document, "x-guidance": json_options(whitespace)}


def _structural_tag(parts: dict[str, Any], whitespace: Whitespace) -> str:
    """Free text is a lazy lexeme that ends at a trigger; what follows is forced."""
    tags = range(len(parts["tags"]))
    more = f"({' | '.join(f'free_{i}' for i in tags)})"
    start = f"({' | '.join(f'tag_{i}' for i in tags)}) {more}*" if parts["at_once"] else more
    count = "" if parts["at_once"] else "+" if parts["at_least_one"] else "*"
    rules = [f"start: {start}{count} FREE", r"FREE: /(.|\n)*/"]
    for i, tag in enumerate(parts["tags"]):
        trigger = next(t for t in parts["triggers"] if tag["begin"].startswith(t))
        after = literal(tag["begin"][len(trigger) :]) if tag["begin"] != trigger else ""
        end = literal(tag["end"]) if tag["end"] else ""
        rules.append(f"open_{i}[lazy]: FREE {literal(trigger)}")
        schema = json.dumps(_document(tag["schema"], whitespace))
        rules.append(f"body_{i}: %json {schema} {end}")
        rules.append(f"free_{i}: open_{i} {after} body_{i}")
        if parts["at_once"]:
            rules.append(f"tag_{i}: {literal(tag['begin'])} body_{i}")
    return "\n".join(rules)


class LLGuidanceBackend:
    """Compiles grammars for one vocabulary and makes matchers.

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

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile on the calling thread; LLGuidance's limits of grammar and lexer size bound it."""
        found = resolved(spec, "llguidance")
        return self.load(spec, grammar_text(found) if _is_read(found) else readable_text(found))

    def question(self, spec: Spec, routed: bool) -> Question:
        """See `BoundedBackend`."""
        name = "grammar_text" if routed and _is_read(spec) else "readable_text"
        return Question(f"{__name__}:{name}", (spec,))

    def load(self, spec: Spec, answer: str) -> CompiledGrammar:
        """The grammar from its text as LLGuidance reads it, without the GIL."""
        try:
            native = _native.guide.LLGuidanceGrammar(self._tokenizer, answer)
        except RuntimeError as error:
            said = _objection(str(error), spec.kind)
            if "removal index" in said:  # a panic that this alone causes
                said = "names a special token that the vocabulary does not have"
            raise GrammarError(f"{spec.kind}: {said}") from None
        return CompiledGrammar(self, spec, native, _MATCHER_BYTES + len(answer))

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start; once complete, each of its `ending_ids` terminates it."""
        ending = ending_ids(self, compiled, stop_ids)
        handle = _native.guide.LLGuidanceMatcher(compiled.native, ending)
        return NativeBackedMatcher(compiled, ending, handle)
