"""Rules for keys, arrays and objects in LLGuidance's Lark dialect.

JSON allows several spellings of a string, but the grammar allows only one spelling of each key.
Only characters that JSON requires to be escaped are escaped. The short escape sequence is used if
there is one (such as ``\\n``), otherwise ``\\u00xx`` in lower case. A key that a schema names
therefore cannot occur a second time in another spelling.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from graft.grammar.regular.regex import CHARACTER_CLASS
from graft.grammar.schema.llguidance_options import literal
from graft.grammar.schema.reasons import NoExactForm

__all__ = [
    "ANY_KEY",
    "BITS",
    "FRACTION",
    "PLAIN_KEY",
    "Pairs",
    "array_body",
    "containing_body",
    "key",
    "object_rules",
    "pattern_key",
    "regex",
    "separators",
]

BITS = 64  # number of bits of the parameter of a parametrized Lark rule
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_PLAIN_CHARACTER = r"[\x20-\x21\x23-\x5b\x5d-\x7e\x{80}-\x{10ffff}]"
_ESCAPED_CHARACTER = r'\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]|7f))'
_PATTERN_PIECE = re.compile(rf"\\.|{CHARACTER_CLASS}|.", re.DOTALL)
_ANY_TEXT = r"(?s:.)*"

#: Regular expressions of all keys, and of the keys without escape sequences.
ANY_KEY = f'"(?:{_PLAIN_CHARACTER}|{_ESCAPED_CHARACTER})*"'
PLAIN_KEY = f'"{_PLAIN_CHARACTER}*"'
#: Regular expression of the numbers with a fractional part, written without an exponent.
FRACTION = r"-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*"


def key(name: str) -> str:
    """Return a property name as a JSON string, in the only spelling that the grammar allows."""
    return '"' + "".join(map(_spelling, name)) + '"'


def _spelling(char: str) -> str:
    code = ord(char)
    if code in _SHORT:
        return "\\" + _SHORT[code]
    return char if code >= 32 and code != 127 else f"\\u{code:04x}"


def pattern_key(pattern: str) -> str:
    """Return a regular expression of the keys that contain a match of `pattern`.

    The regular expression matches the key with its quotes. It matches no keys with escape
    sequences. Raise `NoExactForm` if an anchor is not at the start or end of an alternative of the
    pattern.
    """
    alternatives = [""]
    depth = 0
    for piece in _PATTERN_PIECE.findall(pattern):
        if piece == "(":
            depth += 1
        elif piece == ")":
            depth -= 1
        if piece == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += piece
    expressions = [_containing(alternative, pattern) for alternative in alternatives]
    joined = "|".join(expressions)
    return f'"(?:{joined})"'


def _containing(alternative: str, pattern: str) -> str:
    """Return a regular expression of the texts that contain a match of `alternative`.

    `pattern` is the whole pattern, for error messages.
    """
    pieces = _PATTERN_PIECE.findall(alternative)
    at_start = pieces[:1] == ["^"]
    at_end = pieces[-1:] == ["$"]
    inner = pieces[at_start : len(pieces) - at_end]
    if "^" in inner or "$" in inner:
        raise NoExactForm(
            "patternProperties", f"pattern {pattern[:40]!r} has an anchor that is not at its ends"
        )
    before = "" if at_start else _ANY_TEXT
    after = "" if at_end else _ANY_TEXT
    return before + "".join(inner) + after


def regex(expression: str) -> str:
    """Return a regular expression in Lark's notation, that is, between slashes."""
    return "/" + expression.replace("/", "\\/") + "/"


def separators(options: dict[str, Any]) -> str:
    """Return the Lark definitions of the terminals between JSON values, such as ``COMMA``.

    `options` is the result of `json_options`. If the options allow flexible white space, the
    terminals that precede a value include white space, because ``%json`` allows none before a
    value.
    """
    space = r"[\x20\x0A\x0D\x09]"
    if options["whitespace_flexible"]:
        lines = [
            f"COMMA: /,{space}*/",
            f"COLON: /:{space}*/",
            f"OPEN: /\\[{space}*/",
            f"%ignore /{space}+/",
        ]
    else:
        lines = [
            f"COMMA: {literal(options['item_separator'])}",
            f"COLON: {literal(options['key_separator'])}",
            f"OPEN: {literal('[')}",
        ]
    return "\n".join(lines)


def containing_body(item: str, contained: str) -> str:
    """Return the rule body for arrays in which at least one item matches the rule `contained`.

    `item` is the name of the rule of all items.
    """
    return f'OPEN ({item} COMMA)* {contained} (COMMA {item})* "]"'


def array_body(item: str | None, low: int, high: int | None) -> str:
    """Return the rule body for arrays of `low` to `high` items.

    `high` is None if there is no maximum. `item` is the name of the items' rule; None if no item is
    possible, so that the array is empty.
    """
    if item is None or high == 0:
        return 'OPEN "]"'
    min_more = max(0, low - 1)
    max_more = "" if high is None else max(0, high - 1)
    items = item
    if max_more != 0:  # LLGuidance refuses {0,0}
        items += f" (COMMA {item}){{{min_more},{max_more}}}"
    if low == 0:
        items = f"({items})?"
    return f'OPEN {items} "]"'


class Pairs(NamedTuple):
    """The key-value pairs of an object.

    Attributes
    ----------
    names
        Each named key, with the name of the rule of its value. Required keys come first.
    required
        Number of required keys.
    others
        Name of the rule of a pair with a key that is not in `names`; None if such pairs are not
        allowed.
    low, high
        Minimum and maximum number of pairs; `high` is None if there is no maximum.
    """

    names: tuple[tuple[str, str], ...]
    required: int
    others: str | None
    low: int = 0
    high: int | None = None


def object_rules(name: str, pairs: Pairs) -> dict[str, str]:
    """Return the rules of an object, as a dict from rule head to rule body.

    `name` is the name of the object's rule, and the names of the other rules begin with it.
    Consecutive pairs with keys that the schema does not name form a run. Only a named key or the
    end of the object may follow a run, so that the grammar is unambiguous. One rule matches the
    whole rest of the object after a pair, including the closing brace, so that the parser does not
    have to complete a rule at the end of each pair.

    Optional keys for which no bit is left can occur several times. A key that the schema does not
    name can always occur several times, and counts once towards the minimum number of pairs. Raise
    `NoExactForm` if the number of pairs or the required keys need more bits, or if the minimum
    needs several keys that the schema does not name.
    """
    count = len(pairs.names)
    required = pairs.required
    others = pairs.others
    if required > BITS:
        raise NoExactForm("required", f"more than {BITS} required properties ({required})")
    if others is not None and pairs.low > required + 1:
        raise NoExactForm("minProperties", "several keys that are not listed would be counted")
    if not pairs.names:
        body = array_body(others, pairs.low, pairs.high).removeprefix("OPEN").removesuffix('"]"')
        return {name: f'"{{"{body}"}}"'}
    if pairs.low > required or pairs.high is not None:
        return _counted_rules(name, pairs)
    end = '"}"'
    if required:
        end += f" %if is_ones([0:{required}])"
    more = f"COMMA {name}-named::_"
    if count <= BITS:
        more += f" %if not(is_ones([0:{count}]))"
    rules = {name: f'"{{" {name}-first::0'}
    rules[f"{name}-first::_"] = f"{end} | {name}-named::_"
    rules[f"{name}-more::_"] = f"{end} | {more}"
    if others is not None:
        run = f"{others} (COMMA {others})* {name}-after::_"
        rules[f"{name}-after::_"] = f"{end} | {more}"
        rules[f"{name}-first::_"] += f" | {run}"
        rules[f"{name}-more::_"] = f"{end} | COMMA {name}-named::_ | COMMA {run}"
    rules[f"{name}-named::_"] = " | ".join(_named_pairs(name, pairs))
    return rules


def _named_pairs(name: str, pairs: Pairs, room: str = "") -> list[str]:
    """Return the alternatives of the rule for a named pair and the rest of the object.

    `room` is the condition under which another key that is not required may follow.
    """
    options = []
    for bit, (text, value) in enumerate(pairs.names):
        pair = f"{literal(key(text))} COLON {value}"
        if bit < BITS:
            conditions = [f"bit_clear({bit})", room if bit >= pairs.required else ""]
            options.append(f"{pair} {name}-more::set_bit({bit}){_if(conditions)}")
        else:
            options.append(f"{pair} {name}-more::_")
    return options


def _if(conditions: list[str], operation: str = "and") -> str:
    """Return the condition of an alternative; empty if all conditions are empty."""
    kept = [condition for condition in conditions if condition]
    if not kept:
        return ""
    return f" %if {kept[0]}" if len(kept) == 1 else f" %if {operation}({', '.join(kept)})"


def _counted_rules(name: str, pairs: Pairs) -> dict[str, str]:
    """Return the rules of an object whose number of pairs is limited; see `object_rules`.

    The bits after those of the named keys count the other pairs: up to the maximum if there is one,
    and otherwise whether there is another pair. Keys that are not required leave room for the
    required ones.
    """
    count, required, high = len(pairs.names), pairs.required, pairs.high
    optional = 0 if high is None else high - required  # maximum number of keys not required
    total = count
    if pairs.others is not None:
        total += 1 if high is None else optional
    if total > BITS:
        keyword = "minProperties" if high is None else "maxProperties"
        raise NoExactForm(keyword, f"more than {BITS} keys would be counted")
    if high is not None and optional == 0:  # no key that is not required
        names = pairs.names[:required]
        return object_rules(name, Pairs(names, required, None)) if names else {name: '"{" "}"'}
    room = f"bit_count_lt([{required}:{total}], {optional})" if high is not None else ""
    options = _named_pairs(name, pairs, room)
    if pairs.others is not None and high is None:
        options.append(f"{pairs.others} {name}-more::set_bit({count})")
    elif pairs.others is not None:
        for bit in range(count, total):
            previous = f"bit_set({bit - 1})" if bit > count else ""
            conditions = [f"bit_clear({bit})", previous, room]
            options.append(f"{pairs.others} {name}-more::set_bit({bit}){_if(conditions)}")
    at_end = [f"is_ones([0:{required}])"] if required else []
    if pairs.low > required:
        at_end.append(f"bit_count_ge([0:{total}], {pairs.low})")
    # Whether one of the options is possible.
    more = []
    if high is not None:
        limit = min(optional, total - required)
        more = [f"not(is_ones([0:{required}]))"] if required else []
        more += [f"bit_count_lt([{required}:{total}], {limit})"] if limit else []
    elif pairs.others is None:
        more = [f"not(is_ones([0:{count}]))"]
    end = f'"}}"{_if(at_end)}'
    named = f"{name}-named::_"
    return {
        name: f'"{{" {name}-first::0',
        f"{name}-first::_": f"{end} | {named}{_if(more, 'or')}",
        f"{name}-more::_": f"{end} | COMMA {named}{_if(more, 'or')}",
        named: " | ".join(options),
    }
