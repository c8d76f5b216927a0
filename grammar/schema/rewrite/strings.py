"""Equivalent forms of string constraints: ECMAScript patterns, formats, finite complements."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable

from graft.grammar.schema.terms import Cannot

__all__ = ["FORMATS", "HOSTNAME", "ecma_pattern", "literals", "none_of", "quote"]

ANY = r"[\x00-\U0010FFFF]"
_SPACE = r"\t-\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_LINE = r"[^\n\r\u2028\u2029]"


def code_point(code: int) -> str:
    """A character in a form that Rust's and Python's expressions share."""
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def quote(text: str) -> str:
    """A pattern of exactly this text."""
    return "".join(c if c.isalnum() and c.isascii() else code_point(ord(c)) for c in text)


@functools.lru_cache(maxsize=256)
def ecma_pattern(pattern: str) -> str:
    """The same pattern for an engine with Unicode's idea of white space and stricter syntax.

    ECMA-262 counts U+FEFF as white space and U+0085 not, ends a line at four characters, knows
    ``\\cX``, and takes ``[``, ``&&``, ``--`` and ``~~`` in a class literally. `Cannot` for
    look-around and back-references, which describe no regular language here.
    """
    out: list[str] = []
    at = 0
    inside = False
    start = 0
    while at < len(pattern):
        char = pattern[at]
        pair = pattern[at : at + 2]
        if char == "\\":
            piece, step = _escape(pattern, at, inside)
            out.append(piece)
            at += step
            continue
        if inside:
            if char == "]":
                inside = False
                out[start:] = [_quotable("".join(out[start:]) + char)]
                at += 1
                continue
            elif char == "[" and not pattern.startswith("[:", at):
                char = "\\["
            elif pair in ("&&", "--", "~~"):
                char = "\\" + char
        elif char == "[":
            inside = True
            start = len(out)
            if pattern.startswith(("[]", "[^]"), at):
                raise Cannot("pattern", f"the empty class in {pattern!r} is not supported")
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            raise Cannot("pattern", f"look-around in {pattern!r} cannot be enforced")
        elif char == ".":
            char = _LINE
        elif char == "{" and not re.match(r"\{\d+(,\d*)?\}", pattern[at:]):
            char = "\\{"
        elif char == "}" and not re.search(r"\{\d+(,\d*)?$", pattern[:at]):
            char = "\\}"
        out.append(char)
        at += 1
    return "".join(out)


def _quotable(characters: str) -> str:
    """A class without U+0000 where LLGuidance would otherwise let quotes and backslashes in.

    When a class has all of U+0000 to U+001F, LLGuidance 1.9 allows every escape sequence of JSON
    for it, so also those of the quote and the backslash, which the class may exclude.
    """
    with contextlib.suppress(re.error):
        has = re.compile(characters).fullmatch
        if not all(has(chr(code)) for code in range(0x20)) or (has('"') and has("\\")):
            return characters
    if characters.startswith("[^"):
        return "[^\\x00" + characters[2:]
    return f"[{characters}&&[^\\x00]]"


def _escape(pattern: str, at: int, inside: bool) -> tuple[str, int]:
    """The piece that an escape at this place becomes, and how many characters it took."""
    char = pattern[at + 1 : at + 2]
    control = re.match(r"\\c([A-Za-z])", pattern[at:])
    if control:
        return f"\\x{ord(control[1]) % 32:02X}", 3
    if char == "s":
        return (_SPACE if inside else f"[{_SPACE}]"), 2
    if char == "S":
        return _not_space(inside), 2
    if char in "bB" and not inside:
        raise Cannot("pattern", f"the word boundary in {pattern!r} cannot be enforced")
    if char == "b" and inside:
        return r"\x08", 2
    if char.isdigit() and char != "0" and not inside:
        raise Cannot("pattern", f"the back-reference in {pattern!r} cannot be enforced")
    if char == "0":
        return r"\x00", 2
    digits = "[0-9A-Fa-f]{2}"
    surrogates = re.match(rf"\\u([Dd][89ABab]{digits})\\u([Dd][C-Fc-f]{digits})", pattern[at:])
    if surrogates:
        high = int(surrogates[1], 16)
        low = int(surrogates[2], 16)
        return code_point(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), 12
    braced = re.match(r"\\[uxpP]\{[^}]*\}", pattern[at:])
    if braced:
        return braced[0], len(braced[0])
    if char == "/":
        return "/", 2
    return pattern[at : at + 2], 2


def _not_space(inside: bool) -> str:
    ranges = []
    start = 0
    spaces = [
        *range(9, 14),
        32,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
        0xFEFF,
    ]
    for code in [*spaces, 0x110000]:
        if code > start:
            ranges.append(f"{code_point(start)}-{code_point(code - 1)}")
        start = code + 1
    text = "".join(ranges)
    return text if inside else f"[{text}]"


def literals(pattern: str) -> list[str] | None:
    """The strings of a pattern that is an anchored list of plain words; None if it is not."""
    body = re.fullmatch(r"\^\(?(?:\?:)?([A-Za-z0-9 _:,@%#|-]*)\)?\$", pattern)
    if body is None or ("|" in body[1] and "(" not in pattern):
        return None
    return body[1].split("|")


def none_of(words: Iterable[str]) -> str:
    """A pattern of every string but these, built along their common prefixes."""
    tree: dict = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_others(tree)}$"


def _others(node: dict) -> str:
    chars = [char for char in node if char]
    options = [f"[^{''.join(map(quote, chars))}]{ANY}*" if chars else f"{ANY}+"]
    options += [f"{quote(char)}{_others(node[char])}" for char in chars]
    text = f"(?:{'|'.join(options)})"
    return text if "" in node else text + "?"


def _dates() -> str:
    leap4 = "(?:[02468][048]|[13579][26])"
    leap = f"(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|{leap4}00)"
    long = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    short = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    return f"(?:[0-9]{{4}}-{long}|{short}|{leap}-02-29)"


def _formats() -> dict[str, str]:
    offset = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    time = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{offset}"
    date = _dates()
    byte = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    v4 = rf"(?:{byte}\.){{3}}{byte}"
    g = "[0-9A-Fa-f]{1,4}"
    tail = f"(?:{g}:{g}|{v4})"
    v6 = [f"(?:{g}:){{6}}{tail}", f"::(?:{g}:){{5}}{tail}"]
    for before in range(1, 6):
        lead = f"(?:{g}:){{0,{before - 1}}}{g}"
        v6.append(f"(?:{lead})?::(?:{g}:){{{5 - before}}}{tail}")
    v6 += [f"(?:(?:{g}:){{0,5}}{g})?::{g}", f"(?:(?:{g}:){{0,6}}{g})?::"]
    return {
        "date": f"^{date}$",
        "time": f"^{time}$",
        "date-time": f"^{date}[Tt]{time}$",
        "ipv6": f"^(?:{'|'.join(v6)})$",
        "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
        "uri-reference": _uri_reference(v4, "|".join(v6)),
    }


def _uri_reference(v4: str, v6: str) -> str:
    """RFC 3986."""
    free = r"A-Za-z0-9._~!$&'()*+,;=\-"
    pct = "%[0-9A-Fa-f]{2}"
    char = f"(?:[{free}:@]|{pct})"
    no_colon = f"(?:[{free}@]|{pct})+"
    host = rf"(?:\[(?:{v6}|[vV][0-9A-Fa-f]+\.[{free}:]+)\]|(?:[{free}]|{pct})*)"
    net = f"//(?:(?:[{free}:]|{pct})*@)?{host}(?::[0-9]*)?(?:/{char}*)*"
    rooted = f"/(?:{char}+(?:/{char}*)*)?"
    more = f"(?:/{char}*)*"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{net}|{rooted}|{char}+{more}|){tail}"
    return f"^(?:{absolute}|(?:{net}|{rooted}|{no_colon}{more}|){tail})$"


#: Formats with a regular language, as patterns.
FORMATS: dict[str, str] = _formats()

#: RFC 1034 host names of letters, digits and hyphens, which is all that drafts before 7 know.
HOSTNAME = (
    r"^[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$"
)
