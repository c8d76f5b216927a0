"""Parameter kinds of kernels, read from their text.

The driver tells the sizes of a kernel's parameters and not their types, so an int given for a
float would arrive as its bits. The text knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

POINTER = "pointer"
INT = "int"
FLOAT = "float"
OTHER = "other"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_ENTRY = re.compile(
    r'extern\s+"C"\s+(?:__forceinline__\s+)?__global__\s+'
    rf"{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(([^()]*)\)"
)
# A statement of a body's own, in no inner block and behind no return.
_WAIT = re.compile(r"\s*\{(?:(?:(?!\breturn\b)[^{}])*;)?\s*wait_for_kernel_before\s*\(\s*\)\s*;")
_INT_WORDS = frozenset({"unsigned", "signed", "char", "short", "int", "long"})
_INT_NAMES = re.compile(r"bool|size_t|u?int(8|16|32|64|ptr)_t|cudaGraphConditionalHandle")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__"})


def kernel_kinds(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return the kind of each parameter of each ``extern "C" __global__`` entry.

    A type that is neither built in nor a pointer is ``OTHER``, as is one that differs between
    several entries of a name. Entries written by macros are not found.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in _ENTRY.finditer(_COMMENT.sub(" ", text)):
        name = entry[1]
        listed = entry[2].strip()
        kinds = tuple(_kind(one) for one in listed.split(",")) if listed not in ("", "void") else ()
        before = found.get(name, kinds)
        if len(before) == len(kinds):
            kinds = tuple(a if a == b else OTHER for a, b in zip(before, kinds, strict=True))
        found[name] = kinds
    return found


def waiting_kernels(text: str) -> frozenset[str]:
    """Return the entries that call ``wait_for_kernel_before()`` before any block or return."""
    parts = _ENTRY.split(_COMMENT.sub(" ", text))[1:]  # name, parameters, what follows
    entries = list(zip(parts[::3], map(_WAIT.match, parts[2::3]), strict=True))
    return frozenset(n for n, at in entries if at) - {n for n, at in entries if not at}


def _kind(parameter: str) -> str:
    if "*" in parameter:
        return POINTER
    words = [word for word in parameter.split() if word not in _QUALIFIERS]
    if len(words) > 1 and words[-1] not in _INT_WORDS:
        words.pop()  # the parameter's name
    if words and all(word in _INT_WORDS for word in words):
        return INT
    if words in (["float"], ["double"]):
        return FLOAT
    return INT if len(words) == 1 and _INT_NAMES.fullmatch(words[0]) else OTHER
