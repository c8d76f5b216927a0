"""What a request asks its output to be: every way to state a constraint, checked when stated."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from .compile.process import ChildLost, Question, ask
from .endless import is_endless
from .errors import GrammarError
from .marker import Marker
from .router import KEY_ORDERS, route_named
from .schema_audit import unenforced_keywords
from .statement import check_keys, check_text, parsed
from .tags import resolved_tags, said_of_tag

__all__ = ["GrammarSpec", "Kind", "StructuralTag"]

Kind = Literal["json_schema", "regex", "ebnf", "choice", "lark", "structural_tag"]
_KINDS = get_args(Kind)


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
    def of(cls, begin: str, schema: dict[str, Any] | bool | str, end: str) -> StructuralTag:
        """A tag from a schema in any of its forms; checked as ``GrammarSpec.json_schema`` does."""
        try:
            text = GrammarSpec.json_schema(schema).text
        except GrammarError as error:
            raise GrammarError(f"tag schema: {said_of_tag(error)}") from error
        return cls(begin, text, end)


@dataclass(frozen=True)
class GrammarSpec:
    """A validated, hashable grammar text. Build one with the class methods.

    They refuse what no installed backend can read; made directly, it is read when compiled.

    Attributes
    ----------
    kind
        ``"json_schema"``, ``"regex"``, ``"ebnf"``, ``"choice"``, ``"lark"`` or
        ``"structural_tag"``.
    text
        The schema as JSON text, the regex, the EBNF, the Lark grammar, the choices as a JSON list,
        or ``{"triggers": [...], "tags": [{"begin", "schema", "end"}, ...], "at_least_one"}``.
    root
        Start rule of an EBNF.
    any_whitespace
        JSON only. ``False``: one line with the separators ``", "`` and ``": "``, which small models
        follow best; ``True``: any whitespace between JSON's tokens.
    strict
        JSON only. ``True``: an object schema with properties allows no others unless it says so.
        Such output satisfies the schema whatever it says about further properties. ``None``: what
        the standard says, but ``True`` with XGrammar unrouted, which is loose otherwise.
    partial
        ``False``: a grammar of which a part cannot be enforced is refused. ``True``: it is taken,
        and the output may violate that part.
    backend
        The backend that compiles it; empty: the engine's own (`resolved`).
    key_order
        JSON schema only. ``"any"``: the keys of an object come in any order. ``"schema"``: as the
        schema lists them, named ones first, so that reasoning precedes answers and more text is
        forced. Empty: not decided yet (see `resolved`).
    source
        The user's schema where the router has rewritten it; ``text`` is what is compiled. With
        ``partial``, finished outputs are to be checked against it (`graft.grammar.check_output`).
    marker
        Free text until this marker, then the grammar; None: the grammar from the start.
    """

    kind: Kind
    text: str
    root: str = "root"
    any_whitespace: bool = False
    strict: bool | None = None
    partial: bool = False
    backend: str = ""
    key_order: str = ""
    source: str = ""
    marker: Marker | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            kinds = ", ".join(_KINDS)
            raise GrammarError(f"grammar: kind is {self.kind!r}, must be one of {kinds}")
        for name, text in (("text", self.text), ("root", self.root)):
            check_text(f"{self.kind} {name}", text)
        if not isinstance(self.backend, str) or not isinstance(self.source, str):
            raise GrammarError(f"{self.kind}: backend is {self.backend!r}, must be a string")

    @property
    def schema(self) -> Any:
        """The user's JSON schema, parsed, or None where the grammar is not one.

        Raises
        ------
        GrammarError
            If this was made directly and the text is not JSON.
        """
        if self.kind != "json_schema":
            return None
        return parsed("JSON schema", self.source or self.text)

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | bool | str,
        *,
        any_whitespace: bool = False,
        strict: bool | None = None,
        partial: bool = False,
        backend: str = "",
        key_order: str = "",
    ) -> GrammarSpec:
        """A JSON schema, as JSON text or as the object it parses to.

        ``backend="auto"`` lets the router choose among the installed backends, rewriting the schema
        where an equivalent one can be enforced; ``"llguidance"`` does the same for that one;
        ``"xgrammar"`` takes the schema as it stands. Without a name the engine's backend decides
        when the request is submitted (see `resolved`); refused here is what none could enforce.
        With a router, `partial` of the result says whether something was left out, not whether that
        was allowed. ``strict`` is `GrammarSpec.strict`.

        ``key_order`` is `GrammarSpec.key_order`. Left out, it becomes ``"any"`` where the backend
        can take keys in any order (objects of which it cannot keep the schema's), else
        ``"schema"``. ``"any"`` refuses what it cannot be had for, such as XGrammar and objects with
        more than 64 named properties.

        Raises
        ------
        GrammarError
            If the text is not JSON, the schema is neither an object nor a boolean, or, unless
            ``partial``, it contains what cannot be enforced (named with its JSON pointer).
        """
        value = parsed("JSON schema", schema) if isinstance(schema, str) else schema
        if not isinstance(value, (dict, bool)):
            raise GrammarError(
                f"JSON schema: must be an object or a boolean, not {type(value).__name__}"
            )
        if value is False:
            raise GrammarError("JSON schema: the schema false allows no output")
        if value is schema:
            check_keys(value)
        if key_order not in ("", *KEY_ORDERS):
            raise GrammarError(f"key order {key_order!r} is unknown; use {' or '.join(KEY_ORDERS)}")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise GrammarError("JSON schema: is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise GrammarError(f"JSON schema: cannot be read: {error}") from error
        check_text("JSON schema", text)
        stated = (text, any_whitespace, strict, partial, backend, key_order)
        return _bounded("JSON schema", Question(f"{__name__}:stated", stated))

    @classmethod
    def _stated(
        cls, text: str, any_whitespace: bool, strict: bool | None, partial: bool, backend: str,
        key_order: str,
    ) -> GrammarSpec:  # fmt: skip
        value = json.loads(text)
        try:
            endless = is_endless(value)
            unenforced = [] if partial else unenforced_keywords(value)
        except RecursionError:
            raise GrammarError("JSON schema: is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise GrammarError(f"JSON schema: cannot be read: {error}") from error
        if endless:
            raise GrammarError(
                "JSON schema: allows no output: a $ref leads back to itself in all that fits"
            )
        if backend not in ("", "xgrammar"):
            return cls._routed(value, backend, any_whitespace, bool(strict), partial, key_order)
        spec = cls(
            "json_schema", text, any_whitespace=any_whitespace, strict=strict, partial=partial,
            backend=backend, key_order=key_order,
        )  # fmt: skip
        if backend:
            spec = _in_schema_order(spec)
        if unenforced and backend:
            raise _unenforced(unenforced)
        if unenforced:
            try:
                spec.resolved("auto")
            except GrammarError as error:
                raise _unenforced(unenforced) from error
        return spec

    def resolved(self, backend: str) -> GrammarSpec:
        """This grammar as an engine compiles it whose own backend has this name.

        A JSON schema that names no backend goes through the router for ``"auto"`` and
        ``"llguidance"``, and is checked against what XGrammar ignores for ``"xgrammar"``; so are
        the schemas of a structural tag, by the backend that is to compile it. Other grammars stay
        as they are. The last answers are kept.

        Raises
        ------
        GrammarError
            If that backend cannot enforce the schema, unless this grammar is ``partial``.
        """
        if self.kind == "structural_tag" and backend in ("xgrammar", "llguidance"):
            tags = resolved_tags(replace(self, marker=None), backend)
            return replace(tags, marker=self.marker)
        if self.kind != "json_schema" or self.backend:
            return self
        return replace(_resolved(replace(self, marker=None), backend), marker=self.marker)

    @classmethod
    def _routed(
        cls, value: Any, backend: str, any_whitespace: bool, strict: bool, partial: bool,
        key_order: str,
    ) -> GrammarSpec:  # fmt: skip
        try:
            source = json.dumps(value, ensure_ascii=False, allow_nan=False)
            check_text("JSON schema", source)
            if strict:
                from .backends.llguidance import close_objects  # which itself builds on this module

                value = close_objects(value)
            found = route_named(value, backend, key_order or "any")
            text = json.dumps(found.schema, ensure_ascii=False)
        except RecursionError:
            raise GrammarError("JSON schema: is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise GrammarError(f"JSON schema: cannot be read: {error}") from error
        if found.backend is None or not (found.exact or partial):
            hint = "" if found.backend is None else " (partial=True takes the schema all the same)"
            raise GrammarError(f"JSON schema: {found.refusal()}{hint}")
        if key_order == "any" and found.ordered:
            raise GrammarError(f"JSON schema: {found.ordered[0]}")
        return cls(
            "json_schema", text, any_whitespace=any_whitespace,
            strict=found.backend == "xgrammar",  # which is known to be safe then
            partial=not found.exact, backend=found.backend, key_order=found.key_order,
            source=source,
        )  # fmt: skip

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that matches the whole pattern. An empty pattern is refused."""
        check_text("regex", pattern)
        return _check_syntax(cls("regex", pattern))

    @classmethod
    def ebnf(cls, text: str, root: str = "root") -> GrammarSpec:
        """A grammar in XGrammar's EBNF (GBNF), started from the rule ``root``."""
        check_text("EBNF", text)
        check_text("EBNF root rule", root)
        return _check_syntax(cls("ebnf", text, root=root))

    @classmethod
    def choice(cls, options: Sequence[str]) -> GrammarSpec:
        """Exactly one of the given strings.

        Raises
        ------
        GrammarError
            If there is no option, or an option is empty or no string.
        """
        if isinstance(options, (str, bytes, Mapping)) or not isinstance(options, Iterable):
            raise GrammarError(f"choice: must be a list of strings, not {type(options).__name__}")
        options = list(options)
        if not options:
            raise GrammarError("choice: needs a list of at least one string")
        for option in options:
            check_text("choice option", option)
        return cls("choice", json.dumps(list(dict.fromkeys(options)), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """A grammar in the Lark dialect of the backend, started from the rule ``start``."""
        check_text("Lark", text)
        return _check_syntax(cls("lark", text))

    @classmethod
    def structural_tag(
        cls,
        tags: Sequence[StructuralTag],
        triggers: Sequence[str],
        *,
        at_least_one: bool = False,
    ) -> GrammarSpec:
        """Free text in which every trigger opens one of the tags, whose content is constrained.

        Parameters
        ----------
        tags
            What may stand in the text, for example tool calls.
        triggers
            Texts that never occur in the free text; each tag begins with exactly one of them.
        at_least_one
            Whether the output must hold a tag.

        Raises
        ------
        GrammarError
            If there is no tag, or a tag begins with none or several of the triggers, or a trigger
            with no tag, or ``at_least_one`` is no bool.
        """
        if isinstance(triggers, str) or not tags or not triggers:
            raise GrammarError("structural tag: needs lists of at least one tag and one trigger")
        for trigger in triggers:
            check_text("structural tag trigger", trigger)
        for tag in tags:
            if not isinstance(tag, StructuralTag):
                raise GrammarError(
                    f"structural tag: a tag is a {type(tag).__name__}, expected StructuralTag"
                )
            opening = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
            if len(opening) != 1:
                raise GrammarError(
                    f"structural tag: {tag.begin!r} begins with {len(opening)} of the triggers"
                )
        for trigger in triggers:
            if not any(tag.begin.startswith(trigger) for tag in tags):
                raise GrammarError(f"structural tag: no tag begins with the trigger {trigger!r}")
        if not isinstance(at_least_one, bool):
            raise GrammarError(f"structural tag: at_least_one must be a bool, not {at_least_one!r}")
        parts = {
            "triggers": list(dict.fromkeys(triggers)),
            "tags": [
                {"begin": tag.begin, "schema": json.loads(tag.schema), "end": tag.end}
                for tag in tags
            ],
            "at_least_one": at_least_one,
        }
        text = json.dumps(parts, ensure_ascii=False)
        return _check_syntax(cls("structural_tag", text))

    def after(self, marker: str | int, *, required: bool = False) -> GrammarSpec:
        """This grammar after free text that ends with ``marker``, as reasoning models write it.

        Parameters
        ----------
        marker
            Text, which may be spread over tokens, or the id of a token.
        required
            Whether stop ids are illegal until the marker has come. If not, a stop id there ends
            the output and the grammar never begins.

        Raises
        ------
        GrammarError
            If the marker is empty, no text, or a negative id.
        """
        if isinstance(marker, bool) or not isinstance(marker, (str, int)):
            raise GrammarError(f"marker: must be text or an id, not {type(marker).__name__}")
        if isinstance(marker, int):
            if marker < 0:
                raise GrammarError(f"marker: token {marker} is negative")
            return replace(self, marker=Marker(token=marker, required=bool(required)))
        check_text("marker", marker)
        return replace(self, marker=Marker(text=marker, required=bool(required)))


@functools.lru_cache(maxsize=256)
def _resolved(spec: GrammarSpec, backend: str) -> GrammarSpec:
    value = parsed("JSON schema", spec.text)
    if backend != "xgrammar":
        return GrammarSpec._routed(
            value, backend, spec.any_whitespace, bool(spec.strict), spec.partial, spec.key_order
        )
    unenforced = [] if spec.partial else unenforced_keywords(value)
    if unenforced:
        raise _unenforced(unenforced)
    return _in_schema_order(spec)


def _in_schema_order(spec: GrammarSpec) -> GrammarSpec:
    """For XGrammar unrouted, which knows no other order."""
    if spec.key_order == "any":
        raise GrammarError("JSON schema: XGrammar writes keys in the schema's order only")
    return replace(spec, key_order="schema", strict=spec.strict is not False)


def _unenforced(found: list[str]) -> GrammarError:
    named = "; ".join(found[:5])
    return GrammarError(
        f"JSON schema: cannot be enforced: {named} (partial=True takes the schema all the same)"
    )


def stated(*statement: Any) -> GrammarSpec:
    """In a compiling process: what `GrammarSpec.json_schema` gives."""
    return GrammarSpec._stated(*statement)


def _check_syntax(spec: GrammarSpec) -> GrammarSpec:
    return _bounded(spec.kind, Question("graft.grammar.syntax:check_syntax", (spec,)))


def _bounded(what: str, question: Question) -> GrammarSpec:
    try:
        answer: GrammarSpec = ask(question)
    except ChildLost as error:
        raise GrammarError(f"{what}: {error}") from error
    return answer
