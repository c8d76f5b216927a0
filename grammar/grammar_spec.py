"""Constructors of grammar specifications.

The constructors only parse their arguments and check the arguments' types. They start no process
and take at most a few milliseconds. Parsing a pattern and rewriting a schema can take unbounded
time. This work therefore runs in child processes, either when an engine compiles the grammar of a
submitted request or when `GrammarSpec.check` is called.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from graft.grammar.errors import GrammarError
from graft.grammar.processes import run_call
from graft.grammar.resolve import check_backend
from graft.grammar.schema.wellformed import check_schema
from graft.grammar.spec import (
    WHITE_SPACE,
    JsonValue,
    KeyOrder,
    Marker,
    Spec,
    Whitespace,
    check_text,
    parse_json,
)
from graft.grammar.structural.formats import TriggerLookup, parse_format
from graft.grammar.structural.xgrammar import plain_ebnf
from graft.native.children.process import Call

__all__ = ["GrammarSpec", "StructuralTag"]


@dataclass(frozen=True)
class StructuralTag:
    """A tag with constrained content in otherwise free text, such as a tool call.

    Attributes
    ----------
    begin, end
        Text before and after the content. `begin` must start with one of the triggers of the
        structural tag (see `GrammarSpec.structural_tag`). `end` may be empty.
    schema
        JSON schema of the content, as JSON text. Object keys are written in the order of the
        schema.
    """

    begin: str
    schema: str
    end: str

    def __post_init__(self) -> None:
        check_text("tag begin", self.begin)
        if self.end != "":
            check_text("tag end", self.end)
        if not isinstance(parse_json("tag schema", self.schema), (dict, bool)):
            raise GrammarError(f"tag schema: must be an object or a boolean: {self.schema[:60]}")

    @classmethod
    def of(cls, begin: str, schema: Any, end: str) -> StructuralTag:
        """Return a tag. `schema` may have any form that `GrammarSpec.json_schema` accepts."""
        try:
            text = GrammarSpec.json_schema(schema).text
        except GrammarError as error:
            raise GrammarError(f"tag schema: {error}") from error
        return cls(begin, text, end)

    def check(self) -> None:
        """Raise `GrammarError` if the tag's schema cannot be enforced; see `GrammarSpec.check`."""
        try:
            GrammarSpec.structural_tag([self], [self.begin]).check()
        except GrammarError as error:
            reason = str(error).removeprefix(f"structural_tag: {self.begin!r}: ")
            raise GrammarError(f"tag schema: {reason}") from error


class GrammarSpec(Spec):
    """The grammar of a structured output. Immutable and hashable; created with the class methods.

    The class methods raise `GrammarError` for arguments of the wrong type or form. Some errors can
    only be found by a backend, such as a syntax error in a pattern or a schema keyword that cannot
    be enforced. `check` raises these errors. If a request is submitted without a call of `check`,
    the engine finds the errors while it compiles the grammar, and ends the request with the finish
    reason ``"refused"``.

    The base class `Spec` describes the attributes.
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
        """Return the grammar of a JSON schema.

        Parameters
        ----------
        schema
            JSON text, the parsed schema, a `JsonValue` with the parsed schema, or an object that
            provides a schema: through the method ``model_json_schema`` (a pydantic model) or
            ``json_schema`` (a ``pydantic.TypeAdapter``), or through the method or attribute
            ``__json_schema__``.
        backend
            Name of the backend that compiles the schema; empty for the engine's backend.
            ``"llguidance"`` rewrites keywords that it does not support where an equivalent schema
            is known. ``"xgrammar"`` compiles the schema unchanged. ``"auto"`` selects LLGuidance
            if it can be used.
        whitespace, strict, partial, key_order, assert_formats
            As in `Spec`. ``key_order="any"`` is supported neither by XGrammar nor for objects with
            more than 64 named properties.

        Raises
        ------
        GrammarError
            The argument is not a JSON schema, recursive references make the schema unsatisfiable,
            or an option is unknown.
        """
        document = schema
        if not isinstance(document, JsonValue):
            document = JsonValue(_schema_document(schema))  # detects circular references
        check_schema(document.value)
        if isinstance(backend, str) and backend:
            check_backend(backend)
        return cls(
            "json_schema",
            document.text,
            whitespace=whitespace,
            strict=strict,
            partial=partial,
            backend=backend,
            key_order=key_order,
            assert_formats=assert_formats,
        )

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "line") -> GrammarSpec:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str | re.Pattern[str]) -> GrammarSpec:
        """Return the grammar of a regular expression that the whole output must match.

        The supported syntax depends on the backend. The table of backends in grammar/README.md
        lists the differences.
        """
        if isinstance(pattern, re.Pattern):
            flags = ""
            for letter in "imsx":
                if pattern.flags & re.RegexFlag[letter.upper()]:
                    flags += letter
            pattern = f"(?{flags}){pattern.pattern}" if flags else pattern.pattern
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, text: str, root: str = "root") -> GrammarSpec:
        """Return the grammar that `text` defines in XGrammar's EBNF notation (GBNF).

        `root` is the name of the start rule.
        """
        check_text("EBNF", text)
        return cls("ebnf", plain_ebnf(text), root=root)

    @classmethod
    def choice(cls, options: Iterable[str | int | float] | type[enum.Enum]) -> GrammarSpec:
        """Return the grammar that allows exactly one of several options.

        Parameters
        ----------
        options
            Strings and numbers, or an ``Enum`` class or a ``Literal`` whose values are strings or
            numbers.
        """
        if get_origin(options) is Literal:
            options = get_args(options)
        if isinstance(options, (str, bytes, Mapping)) or not isinstance(options, Iterable):
            raise GrammarError(f"choice: must be a list of strings, not {type(options).__name__}")
        texts = dict.fromkeys(map(_choice_text, options))
        if not texts:
            raise GrammarError("choice: needs a list of at least one string")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """Return the grammar that `text` defines in LLGuidance's Lark dialect.

        The start rule is ``start``.
        """
        return cls("lark", text)

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
        """Return the grammar of free text with tags whose content is constrained.

        Parameters
        ----------
        tags
            Tags that may occur in the text, for example tool calls.
        triggers
            Texts that start a tag. A trigger never occurs in the free text. The begin text of each
            tag must start with exactly one trigger.
        at_least_one
            Whether the output must contain a tag. Free text may precede the first tag.
        at_once
            Whether the output must start with a tag, as for a forced tool call.
        whitespace
            White space between the JSON tokens of the content, as in `Spec`.

        Raises
        ------
        GrammarError
            There is no tag or no trigger, the begin text of a tag starts with no trigger or with
            several triggers, or no tag starts with one of the triggers.
        """
        _check_tags(tags, triggers)
        for name, flag in (("at_least_one", at_least_one), ("at_once", at_once)):
            if not isinstance(flag, bool):
                raise GrammarError(f"structural tag: {name} must be a bool, not {flag!r}")
        document = {
            "triggers": list(dict.fromkeys(triggers)),
            "tags": [
                {"begin": tag.begin, "schema": json.loads(tag.schema), "end": tag.end}
                for tag in tags
            ],
            "at_least_one": at_least_one,
            "at_once": at_once,
        }
        text = json.dumps(document, ensure_ascii=False)
        return cls("structural_tag", text, whitespace=whitespace)

    @classmethod
    def structural_format(cls, form: Any, *, whitespace: Whitespace = "line") -> GrammarSpec:
        """Return the grammar of a structural format, the ``format`` of XGrammar's structural tags.

        Parameters
        ----------
        form
            The format as parsed JSON, as JSON text, or as a `JsonValue`. For example, a
            ``sequence`` of a ``tag`` and a ``json_schema``. grammar/README.md lists the types.
        whitespace
            White space between the JSON tokens of the type ``json_schema``, as in `Spec`.

        Raises
        ------
        GrammarError
            A field is missing, unknown or invalid. The message names the place of the field.
        """
        subject = "structural format"
        if isinstance(form, str):
            form = parse_json(subject, form)
        try:
            parse_format(form.value if isinstance(form, JsonValue) else form)
        except RecursionError:
            raise GrammarError(f"{subject}: is nested too deeply") from None
        document = form if isinstance(form, JsonValue) else JsonValue(form, subject)
        return cls("structural_format", document.text, whitespace=whitespace)

    def after(
        self,
        marker: str | int,
        *,
        required: bool = False,
        opening: str = "",
        skips_space: bool = False,
    ) -> GrammarSpec:
        """Return this grammar preceded by free text that ends with `marker`.

        This is meant for reasoning models, whose answer follows a marker such as ``</think>``.

        Parameters
        ----------
        marker
            Text of the marker, which may span several tokens, or the token id of the marker.
        required
            Whether stop ids are illegal before the marker. If False, the model may end its output
            within the free text, so that the output contains no text of the grammar.
        opening
            Text that begins the free text, such as ``<think>``. If an output does not begin with
            this text, the grammar applies from its first token. Empty: every output begins with
            free text.
        skips_space
            Whether up to 16 white-space characters may follow the marker before the text of the
            grammar, such as the two line feeds that Qwen3 writes or the space of the token
            ``" Paris"``.

        Raises
        ------
        GrammarError
            The marker is neither a text nor a token id, or the opening begins with white space.
        """
        if opening != "":
            check_text("marker opening", opening)
            if opening[0] in WHITE_SPACE:
                raise GrammarError(f"marker opening: {opening!r} begins with white space")
        if isinstance(marker, (str, bool)):
            check_text("marker", marker)
            found = Marker(str(marker), None, bool(required), opening, skips_space)
            return replace(self, marker=found)
        if not isinstance(marker, int) or marker < 0:
            raise GrammarError(f"marker: token {marker!r} is negative or not an integer")
        found = Marker("", marker, bool(required), opening, skips_space)
        return replace(self, marker=found)

    def check(self, backend: str = "auto") -> None:
        """Check in a child process whether an engine accepts the grammar.

        If the grammar is a JSON schema, the check first rewrites it. The backend with which an
        engine would compile the grammar then parses it. The check needs no vocabulary and compiles
        nothing.

        The call blocks until the result is known. The child process has a time limit of 30 s.
        Calling `check` is optional, because an engine finds the same errors when it compiles the
        grammar of a submitted request.

        Parameters
        ----------
        backend
            Value of the engine's option `grammar_backend`, which applies if the grammar names no
            backend.

        Raises
        ------
        GrammarError
            The backend cannot be used, cannot read or enforce the grammar, or the check exceeded
            its limit of time or memory.
        GrammarUnavailableError
            No child process could finish the check.
        """
        if self.kind == "choice":  # needs no check: every backend accepts a list of strings
            return
        run_call(self.kind, Call("graft.grammar.backends.registry:check_syntax", (self, backend)))


def _check_tags(tags: Sequence[StructuralTag], triggers: Sequence[str]) -> None:
    """Check the tags and triggers of a structural tag.

    Raise `GrammarError` unless each tag begins with exactly one trigger, and each trigger begins at
    least one tag.
    """
    are_lists = isinstance(tags, Sequence) and isinstance(triggers, Sequence)
    if not are_lists or isinstance(triggers, str) or not tags or not triggers:
        raise GrammarError("structural tag: needs lists of at least one tag and one trigger")
    for trigger in triggers:
        check_text("structural tag trigger", trigger)
    lookup = TriggerLookup(triggers)
    used: set[str] = set()
    for tag in tags:
        if not isinstance(tag, StructuralTag):
            raise GrammarError(
                f"structural tag: a tag is a {type(tag).__name__}, expected StructuralTag"
            )
        found = lookup.find(tag.begin)
        if len(found) != 1:
            raise GrammarError(
                f"structural tag: {tag.begin!r} begins with {len(found)} of the triggers, "
                "must begin with exactly one trigger"
            )
        used.update(found)
    for trigger in triggers:
        if trigger not in used:
            raise GrammarError(f"structural tag: no tag begins with the trigger {trigger!r}")


def _choice_text(option: Any) -> str:
    """Return the text of one option of `GrammarSpec.choice`."""
    if isinstance(option, enum.Enum):
        option = option.value
    if isinstance(option, (int, float)) and not isinstance(option, bool):
        option = json.dumps(option)
    check_text("choice option", option)
    return str(option)


def _schema_document(schema: Any) -> Any:
    """Return the parsed form of the argument `schema` of `GrammarSpec.json_schema`."""
    for name in ("model_json_schema", "json_schema", "__json_schema__"):
        provider = getattr(schema, name, None)
        if provider is None:
            continue
        try:
            schema = provider() if callable(provider) else provider
        except Exception as error:  # user code may raise exceptions of any type
            raise GrammarError(f"JSON schema: {name}: {error}") from error
        break
    if isinstance(schema, type) or get_origin(schema) is not None:  # such as list[int]
        name = schema.__name__ if isinstance(schema, type) else repr(schema)
        raise GrammarError(
            f"JSON schema: the type {name} provides no schema; pass pydantic.TypeAdapter({name})"
        )
    if isinstance(schema, str):
        return parse_json("JSON schema", schema)
    _check_keys(schema)
    return schema


def _check_keys(value: Any) -> None:
    """Raise `GrammarError` for a key that is not a string.

    ``json.dumps`` would convert some of these keys to strings without an error.
    """
    pending = [value]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if not isinstance(part, (dict, list, tuple)) or id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, dict):
            pending.extend(part)
            continue
        pending.extend(part.values())
        for key in part:
            if not isinstance(key, str):
                raise GrammarError(
                    f"JSON schema: the key {key!r} is a {type(key).__name__}, not text"
                )
