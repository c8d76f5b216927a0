"""Every way to state a grammar, checked when it is stated."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.resolve import json_text, without_hint
from graft.grammar.schema.options import KeyOrder, Whitespace
from graft.grammar.schema.wellformed import check_schema
from graft.grammar.spec import Marker, Spec, check_text, parsed
from graft.native.children.process import ChildLost, Question, ask

__all__ = ["GrammarSpec", "StructuralTag"]


@dataclass(frozen=True)
class StructuralTag:
    """A tagged part of free text, such as a tool call.

    Attributes
    ----------
    begin, end
        The text around the content. ``begin`` starts with one of the triggers.
    schema
        JSON schema of the content, as JSON text. Keys come in its order.
    """

    begin: str
    schema: str
    end: str

    def __post_init__(self) -> None:
        check_text("tag begin", self.begin)
        if self.end != "":
            check_text("tag end", self.end)
        if not isinstance(parsed("tag schema", self.schema), (dict, bool)):
            raise GrammarError(f"tag schema: must be an object or a boolean: {self.schema[:60]}")

    @classmethod
    def of(cls, begin: str, schema: Any, end: str) -> StructuralTag:
        """A tag from a schema in any of the forms that ``GrammarSpec.json_schema`` takes."""
        try:
            text = GrammarSpec.json_schema(schema).text
        except GrammarError as error:
            raise GrammarError(f"tag schema: {without_hint(str(error))}") from error
        return cls(begin, text, end)


class GrammarSpec(Spec):
    """A validated, hashable grammar. Build one with the class methods.

    They refuse what no installed backend can read; made directly, it is read when compiled. `Spec`
    has the attributes.
    """

    @classmethod
    def json_schema(
        cls,
        schema: Any,
        *,
        whitespace: Whitespace = "line",
        strict: bool | None = None,
        partial: bool = False,
        backend: str = "",
        key_order: KeyOrder = "schema",
        assert_formats: bool | None = None,
    ) -> GrammarSpec:
        """A JSON schema: as JSON text, as what that parses to, or as what makes one.

        What makes one has ``model_json_schema`` (a pydantic model) or ``__json_schema__``, which
        is, or returns, the schema.

        ``backend="llguidance"`` rewrites the schema where an equivalent one can be enforced, and so
        does ``"auto"`` where that is installed; ``"xgrammar"`` takes the schema as it stands.
        Without a name the engine's backend decides when the request is submitted; refused here is
        what ``"auto"`` refuses. `partial` of a rewritten schema says whether something was left
        out, not whether that was allowed.

        The other options are those of `Spec`. ``key_order="any"`` refuses what it cannot be had
        for, such as XGrammar and objects with more than 64 named properties.

        Raises
        ------
        GrammarError
            If this is no JSON schema or one of nothing, or, unless ``partial``, it contains what
            cannot be enforced (named with its JSON pointer).
        """
        value = _document(schema)
        text = json_text(value)  # refuses what holds itself
        check_schema(value)
        spec = cls(
            "json_schema",
            text,
            whitespace=whitespace,
            strict=strict,
            partial=partial,
            key_order=key_order,
            assert_formats=assert_formats,
        )
        made = _bounded("JSON schema", "resolve:resolved", spec, backend or "auto")
        return made if backend else spec

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "line") -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str | re.Pattern[str]) -> GrammarSpec:
        """Text that matches the whole pattern; an empty one is refused. What a pattern may have
        differs by backend (grammar/README.md)."""
        if isinstance(pattern, re.Pattern):
            flags = "".join(c for c in "imsx" if pattern.flags & re.RegexFlag[c.upper()])
            pattern = f"(?{flags}){pattern.pattern}" if flags else pattern.pattern
        return cls._checked("regex", pattern)

    @classmethod
    def ebnf(cls, text: str, root: str = "root") -> GrammarSpec:
        """A grammar in XGrammar's EBNF (GBNF), started from the rule ``root``."""
        check_text("EBNF", text)
        return cls._checked("ebnf", _DOT.sub(lambda m: m[1] or _ANY_CHARACTER, text), root=root)

    @classmethod
    def choice(cls, options: Iterable[str | int | float] | type[enum.Enum]) -> GrammarSpec:
        """Exactly one of the given strings and numbers, or of the values of an ``Enum``."""
        if isinstance(options, (str, bytes, Mapping)) or not isinstance(options, Iterable):
            raise GrammarError(f"choice: must be a list of strings, not {type(options).__name__}")
        texts = dict.fromkeys(map(_choice, options))
        if not texts:
            raise GrammarError("choice: needs a list of at least one string")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """A grammar in the Lark dialect of the backend, started from the rule ``start``."""
        return cls._checked("lark", text)

    @classmethod
    def structural_tag(
        cls,
        tags: Sequence[StructuralTag],
        triggers: Sequence[str],
        *,
        at_least_one: bool = False,
        at_once: bool = False,
        whitespace: Whitespace = "line",
    ) -> GrammarSpec:
        """Free text in which every trigger opens one of the tags, whose content is constrained.

        Parameters
        ----------
        tags
            What may stand in the text, for example tool calls.
        triggers
            Texts that never occur in the free text; each tag begins with exactly one of them.
        at_least_one
            Whether the output must hold a tag. Text may come before it.
        at_once
            Whether the output must begin with a tag, as a forced tool call does.
        whitespace
            As for schemas.

        Raises
        ------
        GrammarError
            If there is no tag, or a tag begins with none or several of the triggers, or no tag
            with one of them.
        """
        lists = all(isinstance(given, Sequence) for given in (tags, triggers))
        if not lists or isinstance(triggers, str) or not tags or not triggers:
            raise GrammarError("structural tag: needs lists of at least one tag and one trigger")
        for trigger in triggers:
            check_text("structural tag trigger", trigger)
        for tag in tags:
            if not isinstance(tag, StructuralTag):
                raise GrammarError(
                    f"structural tag: a tag is a {type(tag).__name__}, expected StructuralTag"
                )
            count = sum(map(tag.begin.startswith, triggers))
            if count != 1:
                raise GrammarError(
                    f"structural tag: {tag.begin!r} begins with {count} of the triggers"
                )
        for trigger in triggers:
            if not any(tag.begin.startswith(trigger) for tag in tags):
                raise GrammarError(f"structural tag: no tag begins with the trigger {trigger!r}")
        for name, flag in (("at_least_one", at_least_one), ("at_once", at_once)):
            if not isinstance(flag, bool):
                raise GrammarError(f"structural tag: {name} must be a bool, not {flag!r}")
        parts = {
            "triggers": list(dict.fromkeys(triggers)),
            "tags": [
                {"begin": tag.begin, "schema": json.loads(tag.schema), "end": tag.end}
                for tag in tags
            ],
            "at_least_one": at_least_one,
            "at_once": at_once,
        }
        return cls._checked(
            "structural_tag", json.dumps(parts, ensure_ascii=False), whitespace=whitespace
        )

    @classmethod
    def _checked(cls, *arguments: Any, **options: Any) -> GrammarSpec:
        spec = cls(*arguments, **options)
        _bounded(spec.kind, "backends.registry:check_syntax", spec)
        return spec

    def after(self, marker: str | int, *, required: bool = False) -> GrammarSpec:
        """This grammar after free text that ends with ``marker``, as reasoning models write it.

        Parameters
        ----------
        marker
            Text, which may be spread over tokens, or the id of a token.
        required
            Whether stop ids are illegal until the marker has come. If not, a stop id there ends
            the output and the grammar never begins.
        """
        if isinstance(marker, (str, bool)):
            check_text("marker", marker)
            return replace(self, marker=Marker(text=str(marker), required=bool(required)))
        if not isinstance(marker, int) or marker < 0:
            raise GrammarError(f"marker: token {marker!r} is negative or no id")
        return replace(self, marker=Marker(token=marker, required=bool(required)))


# GBNF's "any character", which XGrammar does not know; strings, classes and comments stay.
_DOT = re.compile(r'("(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*)|\.')
_ANY_CHARACTER = "([^a] | [a])"


def _bounded(what: str, function: str, *arguments: Any) -> Any:
    """A function's result, from a process with limits of time and memory."""
    try:
        return ask(Question(f"graft.grammar.{function}", arguments))
    except ChildLost as error:
        raise GrammarError(f"{what}: {error}") from error


def _choice(option: Any) -> str:
    if isinstance(option, enum.Enum):
        option = option.value
    if isinstance(option, (int, float)) and not isinstance(option, bool):
        option = json.dumps(option)
    check_text("choice option", option)
    return str(option)


def _document(schema: Any) -> Any:
    """The parsed schema of whatever states one."""
    for name in ("model_json_schema", "__json_schema__"):
        maker = getattr(schema, name, None)
        if maker is None:
            continue
        try:
            schema = maker() if callable(maker) else maker
        except Exception as error:  # the user's code, whatever it raises
            raise GrammarError(f"JSON schema: {name}: {error}") from error
        break
    if isinstance(schema, type):
        raise GrammarError(
            f"JSON schema: the class {schema.__name__} has neither model_json_schema nor "
            "__json_schema__; of dataclasses and TypedDicts pydantic.TypeAdapter makes schemas"
        )
    if isinstance(schema, str):
        return parsed("JSON schema", schema)
    _check_keys(schema)
    return schema


def _check_keys(value: Any) -> None:
    """Refuses what JSON would turn into other keys without a word."""
    pending = [value]
    seen = set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)
            for key in part if isinstance(part, dict) else ():
                if not isinstance(key, str):
                    raise GrammarError(
                        f"JSON schema: the key {key!r} is a {type(key).__name__}, not text"
                    )
