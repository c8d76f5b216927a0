r"""Expressions of the characters of JSON strings in all their spellings.

JSON can write a character as itself, with a short escape such as ``\n``, and with ``\u`` and four
hexadecimal digits. A character above U+FFFF has two such escapes, its surrogates, as in
``\ud83d\ude00``. A surrogate without the other one is not allowed, because it is no character: many
parsers refuse or replace it.
"""

from __future__ import annotations

import functools

from graft.grammar.regular.expression import (
    MAX_CHARACTER,
    Expression,
    Ranges,
    characters,
    complement,
    concat,
    intersection,
    text,
    union,
)

__all__ = ["spelled"]

#: Letters of the short escapes of the characters that need an escape, by the code of the character.
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_WITHOUT_SHORT = complement([(code, code) for code in _SHORT])
#: Characters that are only written as escapes. JSON allows U+007F, but LLGuidance does not.
_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
_PLAIN = complement(_ESCAPED)
_ONE_UNIT: Ranges = ((0, 0xD7FF), (0xE000, 0xFFFF))
_TWO_UNITS: Ranges = ((0x10000, MAX_CHARACTER),)


@functools.lru_cache(256)
def spelled(
    ranges: tuple[tuple[int, int], ...], escaped: tuple[tuple[int, int], ...]
) -> Expression:
    """Return the expression of one character of `ranges`, as JSON strings may contain it.

    Characters that are also in `escaped` have all their spellings. Other characters are written as
    themselves or, if this is not allowed, with a short escape or else with a ``\\u`` escape.
    """
    options = []
    plain = intersection(ranges, _PLAIN)
    if plain:
        options.append(characters(plain))
    needed = intersection(ranges, _ESCAPED)
    with_digits = intersection(ranges, escaped)
    letters = [letter for code, letter in _SHORT.items() if _contains(needed, code)]
    if _contains(with_digits, ord("/")):
        letters.append("/")
    with_digits += intersection(needed, intersection(complement(escaped), _WITHOUT_SHORT))
    escapes = _unicode_escapes(with_digits)
    if letters:
        escapes.append(characters(sorted((ord(letter), ord(letter)) for letter in letters)))
    if escapes:
        options.append(concat([text("\\"), union(escapes)]))
    return union(options) if options else characters([])


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _unicode_escapes(ranges: Ranges) -> list[Expression]:
    r"""Return expressions of the ``\u`` escapes of some characters, without the first backslash.

    There is a common expression of all escapes whose last two digits can have any value. The
    automaton therefore has few states.
    """
    begins = []  # before two digits that can have any value
    others = []
    whole, parts = _blocks(intersection(ranges, _ONE_UNIT), 0x100)
    if whole:
        begins.append(_number(whole, 2))
    others += [concat([_number([(block, block)], 2), _number(part, 2)]) for block, part in parts]
    above = [(low - 0x10000, high - 0x10000) for low, high in intersection(ranges, _TWO_UNITS)]
    whole, parts = _blocks(above, 0x400)
    if whole:
        first = _number([(low + 0xD800, high + 0xD800) for low, high in whole], 4)
        begins.append(concat([first, text("\\u"), _number([(0xDC, 0xDF)], 2)]))
    for block, part in parts:
        first = _number([(block + 0xD800, block + 0xD800)], 4)
        second = _number([(low + 0xDC00, high + 0xDC00) for low, high in part], 4)
        others.append(concat([first, text("\\u"), second]))
    if begins:
        others.append(concat([union(begins), _number([(0, 0xFF)], 2)]))
    return [concat([text("u"), union(others)])] if others else []


def _blocks(
    ranges: Ranges, size: int
) -> tuple[list[tuple[int, int]], list[tuple[int, list[tuple[int, int]]]]]:
    """Divide the numbers in ascending `ranges` into blocks of `size` numbers.

    Return the ranges of the blocks of which all numbers are in `ranges`. Also return each block of
    which only some numbers are in `ranges`, with the ranges of these numbers, counted from the
    beginning of the block.
    """
    whole = []
    parts: dict[int, list[tuple[int, int]]] = {}
    for low, high in ranges:
        first, last = -(-low // size), (high + 1) // size - 1
        if first <= last:
            whole.append((first, last))
        for block in {low // size, high // size}:
            if not first <= block <= last:
                begin = block * size
                part = max(low - begin, 0), min(high - begin, size - 1)
                parts.setdefault(block, []).append(part)
    return whole, sorted(parts.items())


def _number(ranges: Ranges, num_digits: int) -> Expression:
    """Return the expression of the numbers in `ranges`, with hexadecimal digits."""
    if num_digits == 1:
        return _digit(ranges)
    size = 16 ** (num_digits - 1)
    whole, parts = _blocks(ranges, size)
    options = []
    if whole:
        options.append(concat([_digit(whole), _number([(0, size - 1)], num_digits - 1)]))
    for digit, part in parts:
        options.append(concat([_digit([(digit, digit)]), _number(part, num_digits - 1)]))
    return union(options)


def _digit(ranges: Ranges) -> Expression:
    """Return the expression of one hexadecimal digit, in lower or upper case."""
    codes = [(low + 0x30, high + 0x30) for low, high in intersection(ranges, [(0, 9)])]
    for letter in "Aa":
        offset = ord(letter) - 10
        codes += [(low + offset, high + offset) for low, high in intersection(ranges, [(10, 15)])]
    return characters(codes)
