"""Structs and constants of a C header, parsed from its text.

Structs that kernels and host code share need to be declared only once, in the header. The parser
supports ``#define NAME 3``, one enumerator ``NAME = 3,`` per line, and structs of 32- and 64-bit
scalars and arrays of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graft.cudagraph.errors import KernelError

_TYPES = {
    "int": np.int32,
    "unsigned int": np.uint32,
    "float": np.float32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
}
_NUMBER = re.compile(r"^#define\s+(\w+)\s+(-?\d+)u?\s*(?://.*)?$", re.MULTILINE)
_ENUMERATOR = re.compile(r"^ +(\w+) = (-?\d+),", re.MULTILINE)
_STRUCT = re.compile(r"^struct\s+(\w+)\s*\{(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^([\w ]+?)\s+(\w+)(?:\[(\w+)\])?$")
_COMMENT = re.compile(r"//[^\n]*")


@functools.cache
def read_numbers(path: Path) -> dict[str, int]:
    """Return the values of the integer macros and enumerators of a header, by name."""
    text = path.read_text()
    constants = _NUMBER.findall(text) + _ENUMERATOR.findall(text)
    return {name: int(value) for name, value in constants}


@functools.cache
def read_struct(path: Path, name: str) -> np.dtype:
    """Return the NumPy dtype of the struct `name` in a header, with C's alignment and padding.

    KernelError is raised if the header has no struct of this name, or if the parser does not
    support one of its fields.
    """
    numbers = read_numbers(path)
    body = dict(_STRUCT.findall(path.read_text())).get(name)
    if body is None:
        raise KernelError(f"{path.name} has no struct {name}")
    fields: list[tuple[object, ...]] = []
    for statement in _COMMENT.sub("", body).split(";"):
        text = " ".join(statement.split())
        if not text:
            continue
        field = _read_field(text, numbers)
        if field is None:
            raise KernelError(f"{path.name}: struct {name}: field {text!r} is not supported")
        fields.append(field)
    return np.dtype(fields, align=True)


def _read_field(text: str, numbers: Mapping[str, int]) -> tuple[object, ...] | None:
    """Parse the C declaration of a struct field to a NumPy field; None if it is not supported.

    The NumPy field is (name, type) or (name, type, shape). `numbers` maps macro names that may be
    array lengths to their values.
    """
    match = _FIELD.match(text)
    if match is None or match[1] not in _TYPES:
        return None
    type_name, name, length = match.groups()
    if not length:
        return name, _TYPES[type_name]
    count = numbers[length] if length in numbers else int(length)
    if count == 0:
        return name, _TYPES[type_name]
    return name, _TYPES[type_name], (count,)
