"""Structs and numbers of a C header, read from its text: what kernels and host share is said once.

Understood are ``#define NAME 3`` and structs of 32- and 64-bit scalars and arrays of them, which is
all that a header shared with kernels may hold.
"""

from __future__ import annotations

import functools
import re
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
_STRUCT = re.compile(r"^struct\s+(\w+)\s*\{(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^([\w ]+?)\s+(\w+)(?:\[(\w+)\])?$")


@functools.cache
def read_numbers(path: Path) -> dict[str, int]:
    """Every ``#define`` of a whole number, by name."""
    return {name: int(value) for name, value in _NUMBER.findall(path.read_text())}


@functools.cache
def read_struct(path: Path, name: str) -> np.dtype:
    """The NumPy dtype of a struct, aligned as C aligns it.

    Raises
    ------
    KernelError
        If the header has no such struct, or one with a field that is not understood.
    """
    numbers = read_numbers(path)
    body = dict(_STRUCT.findall(path.read_text())).get(name)
    if body is None:
        raise KernelError(f"{path.name} has no struct {name}")
    fields: list[tuple[object, ...]] = []
    for statement in re.sub(r"//[^\n]*", "", body).split(";"):
        text = " ".join(statement.split())
        if not text:
            continue
        found = _FIELD.match(text)
        if found is None or found[1] not in _TYPES:
            raise KernelError(f"{path.name}: struct {name}: {text!r} is not understood")
        count = found[3] and (numbers[found[3]] if found[3] in numbers else int(found[3]))
        fields.append((found[2], _TYPES[found[1]], *([(count,)] if count else [])))
    return np.dtype(fields, align=True)
