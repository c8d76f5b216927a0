"""Unicode character classes of regular expressions, in the version of Unicode of LLGuidance.

``general_categories.txt`` contains the general categories of Unicode 16.0: one line per category,
with its name and its characters as hexadecimal ranges. Unassigned characters and surrogates have
no line.
"""

from __future__ import annotations

import functools
from pathlib import Path

from graft.grammar.regular.expression import Ranges

__all__ = ["category_ranges", "digit_ranges", "word_ranges"]

_TABLE = Path(__file__).with_name("general_categories.txt")
#: Characters of ``\w`` that are neither letters, marks, digits nor connectors: letters in circles
#: and squares, and the joiners.
_OTHER_WORD_CHARACTERS = (
    (0x200C, 0x200D),
    (0x24B6, 0x24E9),
    (0x1F130, 0x1F149),
    (0x1F150, 0x1F169),
    (0x1F170, 0x1F189),
)
_LONG_NAMES = {
    "letter": "L",
    "lowercaseletter": "Ll",
    "uppercaseletter": "Lu",
    "mark": "M",
    "number": "N",
    "decimalnumber": "Nd",
    "punctuation": "P",
    "symbol": "S",
    "separator": "Z",
}


@functools.cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    found = {}
    for line in _TABLE.read_text("ascii").splitlines():
        name, *texts = line.split(" ")
        pairs = [text.partition("-") for text in texts]
        found[name] = [(int(low, 16), int(high or low, 16)) for low, _, high in pairs]
    return found


@functools.cache
def category_ranges(name: str) -> Ranges | None:
    """Return the characters of a general category such as ``L`` or ``Lu``; None if unknown."""
    name = _LONG_NAMES.get(name.lower().replace("_", "").replace(" ", ""), name)
    if name.startswith("C"):  # includes unassigned characters and surrogates
        return None
    ranges = [
        pair for key, pairs in _categories().items() if key.startswith(name) for pair in pairs
    ]
    return _merged(ranges) if name and ranges else None


@functools.cache
def digit_ranges() -> Ranges:
    """Return the characters of ``\\d``."""
    return _categories()["Nd"]


@functools.cache
def word_ranges() -> Ranges:
    """Return the characters of ``\\w``."""
    ranges = list(_OTHER_WORD_CHARACTERS)
    for name, pairs in _categories().items():
        if name[0] in "LM" or name in ("Nd", "Nl", "Pc"):
            ranges += pairs
    return _merged(ranges)


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    """Return the ranges in ascending order, and join ranges that overlap or are adjacent."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out
