"""Names and kinds (pointer, int, float or other) of kernel parameters, parsed from the source.

The driver reports the sizes of a kernel's parameters but not their types. The type is needed to
convert Python arguments: an int argument of a float parameter must be converted to a float and not
be passed as the bits of the int. Error messages name the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
_WAIT = re.compile(r"wait_for_previous_kernel\s*\(\s*\)\s*;")
_RETURN = re.compile(r"\breturn\b")
_BLOCK = re.compile(r"\{[^{}]*\}")
_LAMBDA = re.compile(r"\[[^\[\]]*\]\s*(?:\([^()]*\)\s*)?\{[^{}]*\}")
_INT_WORDS = frozenset({"unsigned", "signed", "char", "short", "int", "long"})
_INT_NAMES = re.compile(r"bool|size_t|u?int(8|16|32|64|ptr)_t|cudaGraphConditionalHandle")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__"})


class Parameter(NamedTuple):
    """A parameter of a kernel. Its name is "" if the source does not name it.

    `kind` is ``POINTER``, ``INT``, ``FLOAT`` or ``OTHER``. ``OTHER`` means that the type is neither
    built in nor a pointer, or that the kind is unknown.
    """

    name: str
    kind: str


def kernel_parameters(text: str) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of each kernel, by kernel name.

    Kernels are ``extern "C" __global__`` functions. Kernels that a macro defines are not found.

    The source may define several kernels with the same name, in branches of ``#if``. If the names
    of a parameter differ between them, the parameter has no name. If its kinds differ, it has the
    kind ``OTHER``.
    """
    found: dict[str, tuple[Parameter, ...]] = {}
    for kernel, text_between, _ in _entries(text):
        parameters: tuple[Parameter, ...] = ()
        if text_between.strip() not in ("", "void"):
            parameters = tuple(_parameter(part) for part in text_between.split(","))
        earlier = found.get(kernel, parameters)
        if len(earlier) == len(parameters):
            pairs = zip(earlier, parameters, strict=True)
            parameters = tuple(
                Parameter(a.name if a.name == b.name else "", a.kind if a.kind == b.kind else OTHER)
                for a, b in pairs
            )
        found[kernel] = parameters
    return found


def waiting_kernels(text: str) -> frozenset[str]:
    """Return the names of the kernels in which every thread calls ``wait_for_previous_kernel()``.

    The call must be a statement of the kernel's outermost block, not of a loop or a condition, and
    no ``return`` may come before it, except in a lambda. If the source defines several kernels with
    the same name, each of them must contain the call.
    """
    waiting = set()
    others = set()
    for name, _, body in _entries(text):
        if _always_waits(body):
            waiting.add(name)
        else:
            others.add(name)
    return frozenset(waiting - others)


def _always_waits(body: str) -> bool:
    """Return whether every thread of a kernel calls ``wait_for_previous_kernel()``.

    `body` is the text after the kernel's parameter list. `waiting_kernels` says where in this text
    the call must be.
    """
    for call in _WAIT.finditer(body):
        before = _without_blocks(body[: call.start()].strip())
        # At the call of wait_for_previous_kernel(), the brace of the kernel must be the only open
        # one. The text before the call must end in `{` or `;`; it ends in another character if the
        # call belongs to an `if` or loop without braces.
        is_inside = before.startswith("{") and before.count("{") == 1
        if is_inside and before.rstrip()[-1] in "{;" and not _RETURN.search(before):
            return True
    return False


def _without_blocks(text: str) -> str:
    """Replace each complete block of `text` with ``return;`` if it contains a return, else ``;``.

    A ``return`` in a lambda does not count, because it does not leave the kernel.
    """
    while block := _LAMBDA.search(text) or _BLOCK.search(text):
        is_lambda = _LAMBDA.fullmatch(block[0]) is not None
        returns = not is_lambda and _RETURN.search(block[0])
        text = text[: block.start()] + (" return;" if returns else ";") + text[block.end() :]
    return text


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Iterate over the kernels of a source as (name, parameter list, text after the list)."""
    # split() returns the text before the first kernel. Three items follow for each kernel: its
    # name, its parameter list and the text up to the next kernel.
    parts = _ENTRY.split(_COMMENT.sub(" ", text))
    names = parts[1::3]
    parameters = parts[2::3]
    following = parts[3::3]
    return zip(names, parameters, following, strict=True)


def _parameter(text: str) -> Parameter:
    words = [word for word in text.replace("*", " ").split() if word not in _QUALIFIERS]
    name = ""
    if len(words) > 1 and words[-1] not in _INT_WORDS:
        name = words.pop()
    return Parameter(name, POINTER if "*" in text else _kind(words))


def _kind(words: list[str]) -> str:
    """Return the kind (``INT``, ``FLOAT`` or ``OTHER``) of a type that is not a pointer.

    `words` are the words of the type in the source.
    """
    if words and all(word in _INT_WORDS for word in words):
        return INT
    if words in (["float"], ["double"]):
        return FLOAT
    if len(words) == 1 and _INT_NAMES.fullmatch(words[0]):
        return INT
    return OTHER
