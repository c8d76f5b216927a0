"""How arrays and objects are written as rules of a Lark grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..lark import literal
from .keys import key

__all__ = ["BITS", "Pairs", "array_body", "object_rules", "regex", "separators"]

BITS = 64  # of a rule's parameter


def regex(expression: str) -> str:
    """A Lark regular expression."""
    return "/" + expression.replace("/", "\\/") + "/"


def separators(options: dict[str, Any]) -> str:
    """The terminals between values; a ``%json`` skips no white space before it, so they do."""
    space = r"[\x20\x0A\x0D\x09]"
    if options["whitespace_flexible"]:
        texts = {"COMMA": f"/,{space}*/", "COLON": f"/:{space}*/", "OPEN": f"/\\[{space}*/"}
        return "\n".join([*(f"{k}: {v}" for k, v in texts.items()), f"%ignore /{space}+/"])
    texts = {"COMMA": options["item_separator"], "COLON": options["key_separator"], "OPEN": "["}
    return "\n".join(f"{name}: {literal(text)}" for name, text in texts.items())


def array_body(item: str | None, low: int, high: int | None) -> str:
    """The body of an array's rule: between ``low`` and ``high`` items; none if ``item`` is None."""
    if item is None or high == 0:
        return 'OPEN "]"'
    most = "" if high is None else max(0, high - 1)
    body = f"{item} (COMMA {item}){{{max(0, low - 1)},{most}}}"
    return f'OPEN {body if low else f"({body})?"} "]"'


@dataclass(frozen=True)
class Pairs:
    """What is in an object.

    Attributes
    ----------
    names
        Named properties and the rules of their values, the required ones first.
    needed
        How many of them are required.
    others
        Rule of a pair with any other key; None: there are none.
    """

    names: tuple[tuple[str, str], ...]
    needed: int
    others: str | None = None


def object_rules(name: str, pairs: Pairs) -> dict[str, str]:
    """The rules of an object, by their heads.

    A run of other keys is followed by a named one, if anything, so that each text is read in one
    way. The brace ends the rule of what follows a pair, and not that of the object, so that the
    parser has nothing to complete at the end of each pair.
    """
    count, needed, others = len(pairs.names), pairs.needed, pairs.others
    if not pairs.names:
        return {name: f'"{{" ({others} (COMMA {others})*)? "}}"' if others else '"{" "}"'}
    end = '"}"' + (f" %if is_ones([0:{needed}])" if needed else "")
    more = f"COMMA {name}-named::_ %if not(is_ones([0:{count}]))"
    rules = {name: f'"{{" {name}-first::0', f"{name}-first::_": f"{end} | {name}-named::_"}
    rules[f"{name}-more::_"] = f"{end} | {more}"
    if others is not None:
        run = f"{others} (COMMA {others})* {name}-after::_"
        rules[f"{name}-after::_"] = f"{end} | {more}"
        rules[f"{name}-first::_"] += f" | {run}"
        rules[f"{name}-more::_"] = f"{end} | COMMA {name}-named::_ | COMMA {run}"
    rules[f"{name}-named::_"] = " | ".join(
        f"{literal(key(text))} COLON {value} {name}-more::set_bit({bit}) %if bit_clear({bit})"
        for bit, (text, value) in enumerate(pairs.names)
    )
    return rules
