"""Patterns of the values of ``format``, as LLGuidance defines the formats."""

from __future__ import annotations

__all__ = ["FORMATS"]

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-]{_CLOCK})"
_DAYS = "[0-9]+D"
_MONTHS = f"[0-9]+M(?:{_DAYS})?"
_YEARS = f"[0-9]+Y(?:{_MONTHS})?"
_SECONDS = "[0-9]+S"
_MINUTES = f"[0-9]+M(?:{_SECONDS})?"
_HOURS = f"[0-9]+H(?:{_MINUTES})?"
_DURATION = f"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Return the pattern of IPv6 addresses without an embedded IPv4 address.

    ``::`` replaces omitted groups. The pattern limits the numbers of groups before and after it.
    """
    options = [f"(?:{_GROUP}:){{7}}{_GROUP}"]
    options.append(f"::(?:{_GROUP}:){{0,5}}{_GROUP}:{_GROUP}")
    for before in range(7):
        after = 4 - before
        if after >= 0:
            end = f"(?:{_GROUP}:){{0,{after}}}{_GROUP}:{_GROUP}"
            if after == 1:
                end = f"{_GROUP}:{_GROUP}:{_GROUP}"
        else:
            end = _GROUP if before == 5 else ""
        options.append(f"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?::{end}")
    return "|".join(options)


def _uri() -> str:
    escaped = f"%{_HEX}{{2}}"
    name = r"a-zA-Z0-9\-._~!$&'()*+,;="
    addresses = [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{1,7}}:"]
    for before in range(6, 0, -1):
        addresses.append(f"(?:{_GROUP}:){{1,{before}}}(?::{_GROUP}){{1,{7 - before}}}")
    addresses += [f":(?::{_GROUP}){{1,7}}", "::", rf"v{_HEX}+\.[{name}:]+"]
    host = rf"(?:\[(?:{'|'.join(addresses)})\]|(?:[{name}]|{escaped})*)"
    authority = f"(?:(?:[{name}:]|{escaped})*@)?{host}(?::[0-9]*)?"
    character = f"(?:[{name}:@]|{escaped})"
    segments = f"(?:/{character}*)*"
    path = f"(?://{authority}{segments}|/(?:{character}+{segments})?|{character}+{segments}|)"
    query = f"(?:[{name}:@/?]|{escaped})*"
    return rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{path}(?:\?{query})?(?:#{query})?"


def _email() -> str:
    word = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
    label = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
    return rf"{word}(?:\.{word})*@(?:{label}(?:\.{label})*|\[{_IPV4}\])"


_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"

#: Pattern of each format. The whole string matches the pattern.
FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": (f"P(?:(?:{_YEARS}|{_MONTHS}|{_DAYS})(?:{_DURATION})?|{_DURATION}|[0-9]+W)"),
    "email": _email(),
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "time": _TIME,
    "unknown": "(?s:.*)",
    "uri": _uri(),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
