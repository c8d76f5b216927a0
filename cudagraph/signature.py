"""Kinds of kernel parameters, parsed from the kernel source.

The driver reports the sizes of a kernel's parameters but not their types. Without the source, an
int that is passed for a float parameter would be passed as its bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

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
# A statement of the kernel's body, before any inner block and before any return.
_WAIT = re.compile(r"\s*\{(?:(?:(?!\breturn\b)[^{}])*;)?\s*wait_for_previous_kernel\s*\(\s*\)\s*;")
_INT_WORDS = frozenset({"unsigned", "signed", "char", "short", "int", "long"})
_INT_NAMES = re.compile(r"bool|size_t|u?int(8|16|32|64|ptr)_t|cudaGraphConditionalHandle")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__"})


def parameter_kinds(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return the kinds of the parameters of each ``extern "C" __global__`` function by name.

    The kind is ``OTHER`` for a type that is neither built in nor a pointer, and for a parameter
    whose kind differs between several functions of the same name. Functions that are written by
    macros are not found.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, parameters, _ in _entries(text):
        kinds: tuple[str, ...] = ()
        if parameters.strip() not in ("", "void"):
            kinds = tuple(_kind(parameter) for parameter in parameters.split(","))
        earlier = found.get(name, kinds)
        if len(earlier) == len(kinds):
            pairs = zip(earlier, kinds, strict=True)
            kinds = tuple(a if a == b else OTHER for a, b in pairs)
        found[name] = kinds
    return found


def waiting_kernels(text: str) -> frozenset[str]:
    """Return the kernels that call ``wait_for_previous_kernel()`` before any block or return.

    Of several functions with the same name, every one must call it.
    """
    waiting = set()
    others = set()
    for name, _, body in _entries(text):
        if _WAIT.match(body):
            waiting.add(name)
        else:
            others.add(name)
    return frozenset(waiting - others)


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Iterate over (name, parameters, text that follows) of the kernels of a source."""
    parts = _ENTRY.split(_COMMENT.sub(" ", text))[1:]
    return zip(parts[::3], parts[1::3], parts[2::3], strict=True)


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
    if len(words) == 1 and _INT_NAMES.fullmatch(words[0]):
        return INT
    return OTHER
