"""Parse structural formats, that is, the ``format`` of XGrammar's structural tags.

A format is a tree of JSON objects. Each object has a ``type`` and the fields of this type. Parsing
checks every field and adds the default values, so that later code can index all fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError

__all__ = [
    "Format",
    "LoweringError",
    "TriggerLookup",
    "convert_format",
    "has_free_text",
    "parse_format",
    "plain_format",
]

#: A format whose fields have been checked. `parse_format` adds the field ``path``, the place of the
#: format in the request, for error messages.
Format = dict[str, Any]
_STYLES = (
    "json",
    "qwen_xml",
    "minimax_xml",
    "minimax_m3_xml",
    "deepseek_xml",
    "deepseek_v4_1_xml",
    "glm_xml",
    "cohere_xml",
    "kimi_k3_xml",
)
_MAX_COUNT = 2**31 - 1
#: Maximum nesting of formats. The limit protects the recursive parsers of the backends.
_MAX_DEPTH = 64


class LoweringError(Exception):
    """Raised for a part of a format that a backend does not support.

    The message does not name the place of the part; `convert_format` adds it.
    """


class TriggerLookup:
    """Finds the triggers that a text begins with. If triggers are equal, all of them are found.

    The time of a search depends only on the text's length and on the number of different lengths of
    triggers, not on the number of triggers.
    """

    def __init__(self, triggers: Iterable[str]):
        self._counts = Counter(triggers)
        self._lengths = sorted({len(trigger) for trigger in self._counts})

    def find(self, text: str) -> list[str]:
        """Return the triggers that `text` begins with, the shortest first."""
        found: list[str] = []
        for length in self._lengths:
            if length > len(text):
                break
            beginning = text[:length]
            found += [beginning] * self._counts[beginning]
        return found


class _Field(NamedTuple):
    """Description of a field that the formats of one type have.

    Attributes
    ----------
    read
        Function that checks the field's value and returns it in parsed form. Its arguments are the
        value, the place of the field, and the nesting depth.
    default
        Value of an absent field; ``...`` if the field is required.
    """

    read: Callable[[Any, str, int], Any]
    default: Any = ...


def parse_format(value: Any, path: str = "format", depth: int = 0) -> Format:
    """Check a format, given as parsed JSON, and return it with the default values of absent fields.

    `path` is the place of the format in the request, and `depth` the number of formats that contain
    it. Raise `GrammarError` if a field is missing, unknown or invalid. The message starts with the
    place.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise _error(path, f"must be an object with a type, got {_short(value)}")
    kind = value["type"]
    if kind not in _FIELDS:
        raise _error(f"{path}.type", f"must be one of {', '.join(_FIELDS)}, got {kind!r}")
    if depth > _MAX_DEPTH:
        raise _error(path, f"is nested more than {_MAX_DEPTH} levels deep")
    fields = _FIELDS[kind]
    unknown = sorted(set(value) - set(fields) - {"type"})
    if unknown:
        raise _error(path, f"{kind} has no field {unknown[0]!r}; it has {', '.join(fields)}")
    parsed = {"type": kind, "path": path}
    for name, field in fields.items():
        found = value.get(name)
        if found is None:
            if field.default is ...:
                raise _error(path, f"{kind} needs the field {name!r}")
            parsed[name] = field.default
        else:
            parsed[name] = field.read(found, f"{path}.{name}", depth + 1)
    if kind == "qwen_xml_parameter":  # former name of json_schema with the style qwen_xml
        return parsed | {"type": "json_schema", "style": "qwen_xml", "strict": True, "place": None}
    _check_combination(parsed, path)
    if parsed.get("place") is not None:
        parsed["path"] = parsed["place"]
    return parsed


def convert_format(form: Format, convert: Callable[[Format], Format]) -> Format:
    """Return a format in which `convert` has replaced each format, the innermost ones first.

    If `convert` raises `LoweringError`, the function raises `GrammarError` with the place of the
    format.
    """
    converted = dict(form)
    for name, value in form.items():
        if name in ("content", "begin", "end") and isinstance(value, dict):
            converted[name] = convert_format(value, convert)
        elif name in ("elements", "tags"):
            converted[name] = [convert_format(part, convert) for part in value]
        elif name == "rules":
            converted[name] = [[pattern, convert_format(part, convert)] for pattern, part in value]
    try:
        return convert(converted)
    except LoweringError as error:
        raise _error(form["path"], str(error)) from error


def has_free_text(form: Format) -> bool:
    """Return whether a format has free text that is not inside one of its tags."""
    if form["type"] in ("any_text", "triggered_tags", "dispatch"):
        return True
    if form["type"] == "tag":
        return False
    parts = [*form.get("elements", ()), *form.get("tags", ())]
    if isinstance(form.get("content"), dict):
        parts.append(form["content"])
    return any(map(has_free_text, parts))


def plain_format(form: Format) -> Format:
    """Convert a parsed format back to the JSON form that `parse_format` and XGrammar read."""
    return convert_format(
        form,
        lambda part: {
            name: value for name, value in part.items() if name != "path" and value is not None
        },
    )


def _check_combination(form: Format, path: str) -> None:
    """Raise `GrammarError` if fields of a format contradict each other."""
    kind = form["type"]
    if kind == "repeat" and form["max"] != -1 and form["min"] > form["max"]:
        raise _error(path, f"min {form['min']} is greater than max {form['max']}")
    if kind == "triggered_tags":
        lookup = TriggerLookup(form["triggers"])
        for index, tag in enumerate(form["tags"]):
            place = f"{path}.tags[{index}].begin"
            if not isinstance(tag["begin"], str):
                raise _error(place, "must be a string in triggered_tags")
            count = len(lookup.find(tag["begin"]))
            if count != 1:
                raise _error(
                    place, f"{tag['begin']!r} starts with {count} of the triggers, must be 1"
                )


def _error(path: str, message: str) -> GrammarError:
    return GrammarError(f"structural format: {path}: {message}")


def _short(value: Any) -> str:
    return f"{value!r:.80}"


def _string(value: Any, path: str, _depth: int) -> str:
    if not isinstance(value, str):
        raise _error(path, f"must be a string, got {_short(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _error(path, f"is not Unicode text: {error}") from error
    return value


def _text(value: Any, path: str, depth: int) -> str:
    if not _string(value, path, depth):
        raise _error(path, "must not be empty")
    return str(value)


def _texts(value: Any, path: str, depth: int) -> list[str]:
    return [_text(item, f"{path}[{i}]", depth) for i, item in _items(value, path)]


def _some_texts(value: Any, path: str, depth: int) -> list[str]:
    return _texts(_not_empty(value, path), path, depth)


def _items(value: Any, path: str) -> Iterator[tuple[int, Any]]:
    if not isinstance(value, list):
        raise _error(path, f"must be a list, got {_short(value)}")
    return enumerate(value)


def _not_empty(value: Any, path: str) -> Any:
    if value == []:
        raise _error(path, "must have at least one element")
    return value


def _flag(value: Any, path: str, _depth: int) -> bool:
    if not isinstance(value, bool):
        raise _error(path, f"must be true or false, got {_short(value)}")
    return value


def _count(value: Any, path: str, _depth: int) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise _error(path, f"must be an integer from 0 to {_MAX_COUNT}, got {_short(value)}")
    return value


def _maximum(value: Any, path: str, depth: int) -> int:
    return -1 if value == -1 else _count(value, path, depth)


def _schema(value: Any, path: str, _depth: int) -> Any:
    if not isinstance(value, (dict, bool)):
        raise _error(path, f"must be a JSON schema, got {_short(value)}")
    return value


def _style(value: Any, path: str, _depth: int) -> str:
    if value not in _STYLES:
        raise _error(path, f"must be one of {', '.join(_STYLES)}, got {_short(value)}")
    return str(value)


def _formats(value: Any, path: str, depth: int) -> list[Format]:
    found = _items(_not_empty(value, path), path)
    return [parse_format(item, f"{path}[{i}]", depth) for i, item in found]


def _tags(value: Any, path: str, depth: int) -> list[Format]:
    """Read a list of tags. The field ``type`` of a tag may be absent, as in XGrammar."""
    tags = []
    for i, item in _items(_not_empty(value, path), path):
        if isinstance(item, dict):
            item = {"type": "tag", **item}
        tag = parse_format(item, f"{path}[{i}]", depth)
        if tag["type"] != "tag":
            raise _error(f"{path}[{i}]", f"must be a tag, got {tag['type']}")
        tags.append(tag)
    return tags


def _rules(value: Any, path: str, depth: int) -> list[list[Any]]:
    rules = []
    for i, item in _items(_not_empty(value, path), path):
        if not isinstance(item, list) or len(item) != 2:
            raise _error(f"{path}[{i}]", f"must be [pattern, format], got {_short(item)}")
        pattern = _text(item[0], f"{path}[{i}][0]", depth)
        rules.append([pattern, parse_format(item[1], f"{path}[{i}][1]", depth)])
    return rules


def _token(value: Any, path: str, depth: int) -> int | str:
    return _text(value, path, depth) if isinstance(value, str) else _count(value, path, depth)


def _begin(value: Any, path: str, depth: int) -> str | Format:
    """Read the field ``begin`` of a tag: a text, or a format of the type ``token``."""
    if isinstance(value, str):
        return _string(value, path, depth)
    form = parse_format(value, path, depth)
    if form["type"] != "token":
        raise _error(path, f"must be a string or a token, got {form['type']}")
    return form


def _end(value: Any, path: str, depth: int) -> list[str] | Format:
    """Read the field ``end`` of a tag: one text or several, or a format of the type ``token``."""
    if isinstance(value, list):
        texts = _items(_not_empty(value, path), path)
        return [_string(item, f"{path}[{i}]", depth) for i, item in texts]
    begin = _begin(value, path, depth)
    return [begin] if isinstance(begin, str) else begin


_CONTENT = _Field(parse_format)
_ELEMENTS = _Field(_formats)
_FALSE = _Field(_flag, False)
_TRUE = _Field(_flag, True)
_NO_TEXTS = _Field(_texts, [])
_NO_LIMIT = _Field(_count, None)
#: Fields of each type of formats. `parse_format` refuses all other types.
_FIELDS: dict[str, dict[str, _Field]] = {
    "any_text": {
        "excludes": _NO_TEXTS,
        "excluded_starts": _NO_TEXTS,
        "max_tokens": _NO_LIMIT,
        "max_chars": _NO_LIMIT,
    },
    "const_string": {"value": _Field(_string)},
    "json_schema": {
        "json_schema": _Field(_schema),
        "style": _Field(_style, "json"),
        "strict": _TRUE,
        "place": _Field(_text, None),
        "any_order": _FALSE,
        "max_whitespace_cnt": _NO_LIMIT,
        "excludes": _NO_TEXTS,
    },
    "qwen_xml_parameter": {
        "json_schema": _Field(_schema),
        "any_order": _FALSE,
        "max_whitespace_cnt": _NO_LIMIT,
        "excludes": _NO_TEXTS,
    },
    "grammar": {"grammar": _Field(_text)},
    "regex": {"pattern": _Field(_text)},
    "sequence": {"elements": _ELEMENTS},
    "or": {"elements": _ELEMENTS},
    "optional": {"content": _CONTENT},
    "plus": {"content": _CONTENT},
    "star": {"content": _CONTENT},
    "repeat": {"min": _Field(_count), "max": _Field(_maximum), "content": _CONTENT},
    "tag": {"begin": _Field(_begin), "content": _CONTENT, "end": _Field(_end)},
    "triggered_tags": {
        "triggers": _Field(_some_texts),
        "tags": _Field(_tags),
        "at_least_one": _FALSE,
        "stop_after_first": _FALSE,
        "excludes": _NO_TEXTS,
    },
    "tags_with_separator": {
        "tags": _Field(_tags),
        "separator": _Field(_string),
        "at_least_one": _FALSE,
        "stop_after_first": _FALSE,
    },
    "dispatch": {"rules": _Field(_rules), "loop": _TRUE, "excludes": _NO_TEXTS},
    "token": {"token": _Field(_token)},
}
