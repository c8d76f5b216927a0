"""What the rewriting passes share: reasons, drafts, types, references."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

__all__ = [
    "KINDS",
    "MAPS",
    "Cannot",
    "Kinds",
    "Reason",
    "References",
    "any_of",
    "dialect",
    "escape",
    "has_orders",
    "kinds_of",
    "meet",
    "required_of",
    "steps_of",
    "subschemas",
    "value_kind",
    "values_of",
    "word_set",
]

Kinds = frozenset[str]


def word_set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


#: The six types of JSON; ``integer`` stands in a set of types only where ``number`` does not.
KINDS = word_set("null boolean number string array object")
_YEARS = {"03": 3, "04": 4, "06": 6, "07": 7, "2019-09": 2019, "2020-12": 2020}
_DRAFT = re.compile(r"draft[-/](03|04|06|07|2019-09|2020-12)\b")


class Reason(NamedTuple):
    """Where in a schema something is not enforced as it stands, and why, in one clause.

    ``pointer`` is the JSON pointer of the subschema as a URI fragment (``#/properties/a``).
    """

    pointer: str
    keyword: str
    why: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.keyword}: {self.why}"


class Cannot(Exception):
    """No equivalent form of this keyword is known; the caller makes a `Reason` of it."""

    def __init__(self, keyword: str, why: str):
        super().__init__(f"{keyword}: {why}")
        self.keyword = keyword
        self.why = why


def dialect(schema: Any, default: int) -> int:
    """The draft a schema declares, as 3, 4, 6, 7, 2019 or 2020; ``default`` if it names none."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    found = _DRAFT.search(uri) if isinstance(uri, str) else None
    return _YEARS[found[1]] if found else default


def escape(name: object) -> str:
    """A step of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")


#: Keywords whose value is a map of schemas.
MAPS = word_set("properties patternProperties $defs definitions dependentSchemas dependencies")
_PARTS = word_set(
    """allOf anyOf oneOf prefixItems items additionalItems additionalProperties propertyNames
    contains not if then else unevaluatedItems unevaluatedProperties"""
)


def subschemas(schema: Any, at: str = "#") -> list[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its pointer; parents come first."""
    found: list[tuple[str, dict[str, Any]]] = []
    pending = [(at, schema)]
    while pending:
        here, part = pending.pop()
        if not isinstance(part, dict):
            continue
        found.append((here, part))
        for keyword, value in part.items():
            base = f"{here}/{escape(keyword)}"
            if isinstance(value, dict) and keyword in MAPS:
                pending += [(f"{base}/{escape(k)}", v) for k, v in reversed(value.items())]
            elif isinstance(value, list) and keyword in _PARTS:
                pending += [(f"{base}/{i}", v) for i, v in reversed([*enumerate(value)])]
            elif keyword in _PARTS:
                pending.append((base, value))
    return found


def meet(one: Kinds, other: Kinds) -> Kinds:
    """Types that are in both sets; a number that must be an integer is an integer."""
    both = set(one & other)
    if ("integer" in one and "number" in other) or ("integer" in other and "number" in one):
        both.add("integer")
    return frozenset(both - {"integer"} if "number" in both else both)


def value_kind(value: Any) -> str:
    """The JSON type of a parsed value; numbers are always ``number``."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    names = {str: "string", type(None): "null", list: "array", dict: "object"}
    return names[type(value)]


def kinds_of(schema: Any) -> Kinds:
    """Types that a schema's own ``type``, ``const`` and ``enum`` leave open."""
    if not isinstance(schema, dict):
        return KINDS if schema is not False else frozenset()
    kinds = KINDS
    if "type" in schema:
        kinds = frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
        kinds = kinds - {"integer"} if "number" in kinds else kinds
    if "const" in schema:
        kinds = meet(kinds, frozenset([value_kind(schema["const"])]))
    return meet(kinds, frozenset(map(value_kind, schema["enum"]))) if "enum" in schema else kinds


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """All values that a schema's own ``const`` or ``enum`` leaves open; None if it has neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def required_of(schema: dict[str, Any]) -> list[str]:
    """Names of the properties that must be there; draft 3 has a boolean for the keyword."""
    found = schema.get("required")
    return found if isinstance(found, list) else []


def has_orders(part: dict[str, Any]) -> bool:
    """Whether two keys or more can stand in an object that fits, one of them with a name."""
    values = values_of(part)
    if values is not None:
        return _several_keys(values)
    names = {name for name, schema in part.get("properties", {}).items() if schema is not False}
    names.update(required_of(part))
    patterns = len(part.get("patternProperties", ()))
    others = patterns + (part.get("additionalProperties") is not False)
    return bool(names or patterns) and len(names) + others > 1


def _several_keys(value: Any) -> bool:
    """Whether an object with two keys or more is somewhere in a value."""
    if isinstance(value, list):
        return any(map(_several_keys, value))
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_several_keys, value.values()))
    return False


def any_of(options: list[Any]) -> Any:
    """The union of schemas, without the impossible ones and repetitions."""
    kept: list[Any] = []
    for option in options:
        if option is True:
            return True
        if option is not False and option not in kept:
            kept.append(option)
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


class References:
    """Local references of one schema document.

    Where some subschema has a base of its own (``nested``), none is taken for a plain one.
    """

    def __init__(self, root: Any):
        self._root = root
        base = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self._base = base.rstrip("#") if isinstance(base, str) else ""
        self.nested = _has_nested_id(root)

    def pointer(self, reference: Any) -> str | None:
        """The JSON pointer that a reference means; None if it is not a plain local one."""
        if not isinstance(reference, str) or self.nested:
            return None
        if self._base and reference.startswith(self._base + "#"):
            reference = reference[len(self._base) :]
        if reference == "#" or reference.startswith("#/"):
            return reference[1:]
        return None

    def behind(self, schema: Any) -> Any:
        """What a schema that is a plain reference stands for; other schemas as they are."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            try:
                schema = self.resolve(schema["$ref"])
            except Cannot:
                break
        return schema

    def resolve(self, reference: Any) -> Any:
        """The schema a reference stands for; `Cannot` if it is remote, by name or missing."""
        pointer = self.pointer(reference)
        if pointer is None:
            raise Cannot("$ref", f"{reference!r} is not a plain pointer into this schema")
        found = self._root
        for key in steps_of(pointer):
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, ValueError, IndexError, TypeError):
                raise Cannot("$ref", f"'#{pointer}' points to nothing") from None
        return found


def steps_of(pointer: str) -> list[str]:
    """The keys that a JSON pointer leads through."""
    return [unquote(s).replace("~1", "/").replace("~0", "~") for s in pointer.split("/")[1:]]


def _has_nested_id(root: Any) -> bool:
    """Whether a subschema seems to have a base of its own (a property named id does not count)."""
    pending = list(root.values()) if isinstance(root, dict) else []
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            for key in ("$id", "id"):
                if isinstance(part.get(key), str) and not part[key].startswith("#"):
                    return True
            pending += part.values()
    return False
