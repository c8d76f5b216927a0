"""Build patterns that LLGuidance can enforce.

They replace the keywords ``pattern`` and ``format``, or match all strings except given ones.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable

from graft.grammar.regular.expression import words
from graft.grammar.regular.regex import CHARACTER_CLASS, NoAutomaton, has_alternatives, lower_regex
from graft.grammar.schema.documents import word_set
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.validate import python_pattern

__all__ = [
    "COMPLEMENTED_FORMATS",
    "FORMATS",
    "HOSTNAME",
    "HOSTNAME_WITHOUT_PUNYCODE",
    "KNOWN_FORMATS",
    "NOT_HOSTNAME",
    "PERHAPS_PUNYCODE",
    "PIECE",
    "QUANTIFIER",
    "ecma_pattern",
    "literals",
    "none_of",
    "quote",
]

#: Formats that JSON schema defines, and those of pydantic's types `UUID1` to `UUID8`.
KNOWN_FORMATS = word_set(
    """date-time time date duration email hostname ipv4 ipv6 uuid uri idn-email idn-hostname iri
    iri-reference json-pointer relative-json-pointer regex uri-reference uri-template
    uuid1 uuid3 uuid4 uuid5 uuid6 uuid7 uuid8"""
)

_MAX_WORDS = 1000  # maximum number of words that replace a pattern
ANY = r"[\x00-\U0010FFFF]"
_SPACE = r"\t-\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_NOT_LINE_END = r"[^\n\r\u2028\u2029]"
_BOUNDS = r"\{\d+(?:,\d*)?\}"
QUANTIFIER = re.compile(rf"[*+?]|{_BOUNDS}")
#: One piece of a pattern: an escape sequence, a character class, the start of a group, a quantifier
#: or a single character.
PIECE = re.compile(rf"\\.|{CHARACTER_CLASS}|\(\??|[*+?]|{_BOUNDS}|.", re.DOTALL)

#: Escape sequences with a letter: those that Rust's regular expressions and ECMA-262 share, and the
#: escape sequences of code points (`code_point`).
_ESCAPE = re.compile(r"\\([dDwWtnvfr]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})")
_CONTROL_ESCAPE = re.compile(r"\\c([A-Za-z])")
_SURROGATES = re.compile(r"\\u([Dd][89ABab][0-9A-Fa-f]{2})\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_BRACED_ESCAPE = re.compile(r"\\[upP]\{[^{}]*\}")
_FLAGS = re.compile(r"\(\?[A-Za-z-]+\)")
_COUNTS = re.compile(_BOUNDS)


def code_point(code: int) -> str:
    """Return the escape sequence of a character in Rust's and Python's regular expressions."""
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def quote(text: str) -> str:
    """Return a pattern that matches exactly this text."""
    return "".join(map(_quote_character, text))


def _quote_character(char: str) -> str:
    if char.isalnum() and char.isascii():
        return char
    return code_point(ord(char))


@functools.lru_cache(maxsize=256)
def ecma_pattern(pattern: str, *, without_nul: bool = True) -> str:
    """Convert an ECMA-262 pattern to the syntax of Rust's regular expressions.

    In ECMA-262, but not in Rust's syntax: U+FEFF is white space and U+0085 is not; four characters
    end a line; ``\\cX`` is a control character; ``[``, ``&&``, ``--`` and ``~~`` are literal in a
    character class; ``\\<`` and ``\\>`` are not word boundaries.

    If `without_nul` is True, U+0000 is removed from the classes that LLGuidance would otherwise
    enforce incorrectly.

    Raises
    ------
    NoExactForm
        The pattern has look-around, back-references, word boundaries or empty classes, which
        Rust's regular expressions do not support, or syntax that ECMA-262 does not define, such as
        ``(?i)``, ``\\A`` and ``a++``.
    """
    _check_quantifiers(pattern)
    out: list[str] = []
    at = 0
    in_class = False
    class_start = 0  # index in `out` of the first piece of the character class
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            piece, length = _escape(pattern, at, in_class)
            out.append(piece)
            at += length
            continue
        if in_class and char == "]":
            in_class = False
            characters = "".join(out[class_start:]) + char
            out[class_start:] = [_without_nul(characters) if without_nul else characters]
            at += 1
            continue
        bounds = None if in_class else _COUNTS.match(pattern, at)
        if bounds is not None:
            out.append(bounds[0])
            at = bounds.end()
            continue
        if char == "[" and not in_class:
            in_class = True
            class_start = len(out)
            if pattern.startswith(("[]", "[^]"), at):
                raise NoExactForm("pattern", f"the empty class in {pattern!r} is not supported")
            out.append(char)
        elif in_class:
            out.append(_class_character(pattern, at))
        else:
            out.append(_character(pattern, at))
        at += 1
    return "".join(out)


def _check_quantifiers(pattern: str) -> None:
    """Raise `NoExactForm` if a quantifier follows another, as in ``a++``."""
    quantifiers = 0
    for piece in PIECE.findall(pattern):
        if not QUANTIFIER.fullmatch(piece):
            quantifiers = 0
            continue
        quantifiers += 1
        is_lazy = quantifiers == 2 and piece == "?"
        if quantifiers > 1 and not is_lazy:
            raise NoExactForm("pattern", f"ECMA-262 does not define the quantifiers of {pattern!r}")


def _class_character(pattern: str, at: int) -> str:
    """Convert the character at `at` in a character class from ECMA-262 to Rust's syntax."""
    char = pattern[at]
    if char == "[" or pattern[at : at + 2] in ("&&", "--", "~~"):
        return "\\" + char
    return char


def _character(pattern: str, at: int) -> str:
    """Convert the character at `at` from ECMA-262 to Rust's syntax.

    The character is outside character classes and the counts of repetitions.
    """
    char = pattern[at]
    if pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
        raise NoExactForm("pattern", f"look-around in {pattern!r} cannot be enforced")
    flags = _FLAGS.match(pattern, at)
    if flags:
        raise NoExactForm("pattern", f"ECMA-262 does not define {flags[0]}")
    if char == ".":
        return _NOT_LINE_END
    return "\\" + char if char in "{}" else char


def _without_nul(characters: str) -> str:
    """Return a character class, without U+0000 if LLGuidance would enforce the class incorrectly.

    If a class contains all characters from U+0000 to U+001F, or all of them except the line feed,
    LLGuidance 1.9 allows every JSON escape sequence of these characters. It thus allows an escaped
    quote and an escaped backslash even if the class excludes these characters.
    """
    with contextlib.suppress(re.error):
        matches = re.compile(python_pattern(characters)).fullmatch
        if not all(matches(chr(code)) for code in range(0x20) if code != 0x0A):
            return characters
        if matches('"') and matches("\\"):
            return characters
    if characters.startswith("[^"):
        return "[^\\x00" + characters[2:]
    return f"[{characters}&&[^\\x00]]"


def _escape(pattern: str, at: int, in_class: bool) -> tuple[str, int]:
    """Convert the escape sequence at `at` from ECMA-262 to Rust's syntax.

    Return the result, and the length of the original escape sequence.
    """
    char = pattern[at + 1 : at + 2]
    control = _CONTROL_ESCAPE.match(pattern, at)
    if control:
        return f"\\x{ord(control[1]) % 32:02X}", 3
    if char == "s":
        return (_SPACE if in_class else f"[{_SPACE}]"), 2
    if char == "S":
        return _not_space(in_class), 2
    if char in "bB" and not in_class:
        raise NoExactForm("pattern", f"the word boundary in {pattern!r} cannot be enforced")
    if char == "b" and in_class:
        return r"\x08", 2
    if char.isdigit() and char != "0" and not in_class:
        raise NoExactForm("pattern", f"the back-reference in {pattern!r} cannot be enforced")
    if char == "0":
        return r"\x00", 2
    surrogates = _SURROGATES.match(pattern, at)
    if surrogates:
        high_bits = int(surrogates[1], 16) - 0xD800
        low_bits = int(surrogates[2], 16) - 0xDC00
        code = 0x10000 + (high_bits << 10) + low_bits
        return code_point(code), 12
    braced = _BRACED_ESCAPE.match(pattern, at)
    if braced:
        return braced[0], len(braced[0])
    is_letter = char.isascii() and char.isalpha()
    if is_letter and not _ESCAPE.match(pattern, at):
        raise NoExactForm("pattern", f"ECMA-262 does not define \\{char} in {pattern!r}")
    if char in ("/", "<", ">"):
        return char, 2
    return pattern[at : at + 2], 2


def _not_space(in_class: bool) -> str:
    """Return the ``\\S`` of ECMA-262 in Rust's syntax, for use inside or outside a class."""
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
    return text if in_class else f"[{text}]"


@functools.lru_cache(maxsize=256)
def literals(pattern: str) -> list[str] | None:
    """Return the words that a pattern such as ``^(a|b)$`` allows; None if they cannot be listed."""
    body = pattern[1:-1]
    anchored = pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$")
    if not anchored or has_alternatives(body):
        return None
    try:
        return words(lower_regex(body, classes={}), _MAX_WORDS)
    except (NoAutomaton, RecursionError):
        return None


def none_of(excluded: Iterable[str]) -> str:
    """Return a pattern of all strings except some words, built from the words' prefix tree."""
    tree: dict = {}
    for word in excluded:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}  # a word ends here
    return f"^{_complement(tree)}$"


def _complement(node: dict) -> str:
    """Return a pattern of the suffixes that may follow the prefix of a node.

    A suffix may follow if prefix and suffix together are not an excluded word. `node` is a node of
    the prefix tree of the excluded words. It maps each next character to the node of the longer
    prefix. The key ``""`` marks the end of a word.
    """
    chars = [char for char in node if char]
    options = []
    if chars:
        excluded = "".join(map(quote, chars))
        options.append(f"[^{excluded}]{ANY}*")
    else:
        options.append(f"{ANY}+")
    for char in chars:
        options.append(quote(char) + _complement(node[char]))
    pattern = f"(?:{'|'.join(options)})"
    return pattern if "" in node else pattern + "?"


def _dates() -> str:
    """Return a pattern of the valid dates of RFC 3339, including leap days.

    Like jsonschema and Python's ``datetime``, the pattern excludes the year 0000.
    """
    year = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
    leap_century = "(?:0[48]|[2468][048]|[13579][26])00"
    leap_year = f"(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|{leap_century})"
    long_months = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    short_months = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    february = "02-(?:0[1-9]|1[0-9]|2[0-8])"
    return f"(?:{year}-(?:{long_months}|{short_months}|{february})|{leap_year}-02-29)"


def _ipv6(v4: str) -> str:
    """Return a pattern of the IPv6 addresses of RFC 4291; `v4` is a pattern of IPv4 addresses."""
    group = "[0-9A-Fa-f]{1,4}"
    last_two_groups = f"(?:{group}:{group}|{v4})"
    options = [f"(?:{group}:){{6}}{last_two_groups}", f"::(?:{group}:){{5}}{last_two_groups}"]
    for before in range(1, 6):
        # At most `before` groups precede the "::".
        first_groups = f"(?:{group}:){{0,{before - 1}}}{group}"
        middle_groups = f"(?:{group}:){{{5 - before}}}"
        options.append(f"(?:{first_groups})?::{middle_groups}{last_two_groups}")
    options.append(f"(?:(?:{group}:){{0,5}}{group})?::{group}")
    options.append(f"(?:(?:{group}:){{0,6}}{group})?::")
    return "|".join(options)


def _formats() -> dict[str, str]:
    """Return the patterns of `FORMATS`."""
    offset = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    time = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{offset}"
    date = _dates()
    v6 = _ipv6(_IPV4)
    pointer = "(?:/(?:[^/~]|~[01])*)*"
    uri, relative = _uri_patterns(v6)
    iri, relative_iri = _uri_patterns(v6, _UCSCHAR, _IPRIVATE)
    return {
        "date": f"^{date}$",
        "time": f"^{time}$",
        "date-time": f"^{date}[Tt]{time}$",
        "ipv6": f"^(?:{v6})$",
        "json-pointer": rf"^{pointer}$",
        "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{pointer})$",
        "uri-reference": f"^(?:{uri}|{relative})$",
        "iri": f"^(?:{iri})$",
        "iri-reference": f"^(?:{iri}|{relative_iri})$",
        "uri-template": _uri_template(),
        "regex": _simple_regex(),
        **{f"uuid{version}": _uuid(str(version)) for version in (1, 3, 4, 5, 6, 7, 8)},
    }


def _uuid(version: str, variant: str = "[89ABab]") -> str:
    """Return the pattern of the UUIDs of a version, in the variant of RFC 9562."""
    digit = "[0-9A-Fa-f]"
    return rf"^{digit}{{8}}-{digit}{{4}}-{version}{digit}{{3}}-{variant}{digit}{{3}}-{digit}{{12}}$"


def _uri_patterns(v6: str, ucschar: str = "", iprivate: str = "") -> tuple[str, str]:
    """Return patterns of the URIs and of the relative references of RFC 3986.

    `v6` is a pattern of IPv6 addresses. The other arguments are the characters that RFC 3987 adds
    for IRIs. The variables are named after the rules of the RFCs' grammars. There is no
    alternative for IPv4 addresses, because they also match the rule for registered names.
    """
    ascii_unreserved = r"A-Za-z0-9._~!$&'()*+,;=\-"  # the RFC's rules unreserved and sub-delims
    unreserved = ascii_unreserved + ucschar
    encoded = "%[0-9A-Fa-f]{2}"
    pchar = f"(?:[{unreserved}:@]|{encoded})"
    segment_without_colon = f"(?:[{unreserved}@]|{encoded})+"
    ip_literal = rf"\[(?:{v6}|[vV][0-9A-Fa-f]+\.[{ascii_unreserved}:]+)\]"
    host = rf"(?:{ip_literal}|(?:[{unreserved}]|{encoded})*)"
    user = f"(?:(?:[{unreserved}:]|{encoded})*@)?"
    segments = f"(?:/{pchar}*)*"
    with_authority = f"//{user}{host}(?::[0-9]*)?{segments}"
    absolute_path = f"/(?:{pchar}+{segments})?"
    query = rf"(?:\?(?:{pchar}|[/?{iprivate}])*)?"
    fragment = f"(?:#(?:{pchar}|[/?])*)?"
    either = f"{with_authority}|{absolute_path}"
    uri = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{either}|{pchar}+{segments}|){query}{fragment}"
    relative = f"(?:{either}|{segment_without_colon}{segments}|){query}{fragment}"
    return uri, relative


def _hostname() -> str:
    """Return the pattern `HOSTNAME_WITHOUT_PUNYCODE`."""
    end, inner = "[A-Za-z0-9]", "[A-Za-z0-9-]"
    longer = f"{inner}(?:{end}{inner}|-{end}){inner}{{0,58}}{end}"
    label = f"{end}(?:{inner}{{0,2}}{end}|{longer})?"
    return rf"^{label}(?:\.{label})*$"


def _simple_regex() -> str:
    """Return a pattern of regular expressions that ECMA-262 and Python's ``re`` both accept.

    They have neither look-around, back-references, named groups nor escapes of code points. Groups
    have at most three levels.
    """
    escape = r"\\(?:[dDwWsStnrfv]|[\^$\\.*+?()\[\]{}|/])"
    member = r"(?:a-z|A-Z|0-9|[^\x00\\\[\]\-\^&~|]|\\[dDwWsStnrfv\-\^$\\.*+?()\[\]{}|/])"
    char_class = rf"\[\^?(?:{member})+-?\]"
    quantifier = r"(?:(?:[*+?]|\{(?:0|[1-9][0-9]{0,2})(?:,|)\})\??)?"
    single = rf"(?:[^\x00\\^$.*+?()\[\]{{}}|]|\.|{escape}|{char_class}){quantifier}"
    expression = rf"(?:{single}|[|^$])*"
    for _ in range(3):
        expression = rf"(?:{single}|[|^$]|\((?:\?:)?{expression}\){quantifier})*"
    return f"^{expression}$"


def _uri_template() -> str:
    """Return a pattern of the URI templates of RFC 6570, without the operators that it reserves."""
    encoded = "%[0-9A-Fa-f]{2}"
    literal = rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~{_UCSCHAR}{_IPRIVATE}]|{encoded})"
    character = f"(?:[A-Za-z0-9_]|{encoded})"
    name = rf"{character}(?:\.?{character})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"^(?:{literal}|\{{[+#./;?&]?{name}(?:,{name})*\}})*$"


#: Characters that RFC 3987 allows in IRIs, and only in the queries of IRIs, within a class.
_UCSCHAR = r"\xA0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF" + "".join(
    f"\\U{plane:04X}{0x1000 if plane == 14 else 0:04X}-\\U{plane:04X}FFFD" for plane in range(1, 15)
)
_IPRIVATE = r"\uE000-\uF8FF\U000F0000-\U000FFFFD\U00100000-\U0010FFFD"

_IPV4_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_IPV4_BYTE}\.){{3}}{_IPV4_BYTE}"
#: Formats whose patterns do not match all valid strings.
_INCOMPLETE = word_set("time date-time uri-template relative-json-pointer regex")

#: Patterns of the formats that are regular languages.
FORMATS: dict[str, str] = _formats()

#: Patterns of the formats whose patterns match exactly the valid strings.
COMPLEMENTED_FORMATS = {
    **{name: text for name, text in FORMATS.items() if name not in _INCOMPLETE},
    "ipv4": f"^{_IPV4}$",
    "uuid": _uuid("[0-9A-Fa-f]", "[0-9A-Fa-f]"),
}

#: Pattern of the host names of RFC 1034, which consist of letters, digits and hyphens. JSON schema
#: drafts before 7 allow no other host names.
HOSTNAME = (
    r"^[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$"
)

#: Pattern of all strings that `HOSTNAME` does not match: they have an illegal character, an empty
#: label, a hyphen at the start or end of a label, or a label with more than 63 characters.
NOT_HOSTNAME = r"[^A-Za-z0-9.-]|^\.|\.\.|\.$|^$|^-|\.-|-\.|-$|^[^.]{64}|\.[^.]{64}"

#: Pattern of the host names of `HOSTNAME` except those with a label such as ``xn--a``, which has
#: hyphens as third and fourth character. From draft 7 on, this label must be valid punycode.
HOSTNAME_WITHOUT_PUNYCODE = _hostname()

#: Pattern of the strings with such a label.
PERHAPS_PUNYCODE = r"^[A-Za-z0-9-]{2}--|\.[A-Za-z0-9-]{2}--"
