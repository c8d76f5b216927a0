"""Names and types of kernel parameters, parsed from the source.

The driver reports the sizes of a kernel's parameters but not their types. The type is needed to
convert Python arguments: an int argument of a float parameter must be converted to a float and not
be passed as the bits of the int. The elements of an array must have the type to which the parameter
points. Error messages name the parameter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from graft.cudagraph.driver.dtypes import DTYPES, E4M3, numpy_dtype

POINTER = "pointer"
INT = "int"
FLOAT = "float"
OTHER = "other"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_ENTRY = re.compile(
    r'extern\s+"C"\s+(?:__forceinline__\s+)?__global__\s+'
    rf"{_BOUNDS}void\s+{_BOUNDS}([\w$]+)\s*\(([^()]*)\)"
)
_WAIT = re.compile(r"wait_for_previous_kernel\s*\(\s*\)\s*;")
_RETURN = re.compile(r"\breturn\b")
_BLOCK = re.compile(r"\{[^{}]*\}")
_LAMBDA = re.compile(r"\[[^\[\]]*\]\s*(?:\([^()]*\)\s*)?\{[^{}]*\}")
_INT_WORDS = frozenset({"unsigned", "signed", "char", "short", "int", "long"})
_INT_NAMES = re.compile(r"bool|size_t|u?int(8|16|32|64|ptr)_t|cudaGraphConditionalHandle")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__"})


#: Names of element types by the words of a C type. A vector type has the name of its elements.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "unsigned": "uint32",
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
    "size_t": "uint64",
    "uintptr_t": "uint64",
    "intptr_t": "int64",
    "cudaGraphConditionalHandle": "uint64",
    "half": "float16",
    "__half": "float16",
    "half2": "float16",
    "__half2": "float16",
    "fp16_t": "float16",
    "bf16_t": "bfloat16",
    "__nv_bfloat16": "bfloat16",
    "__nv_bfloat162": "bfloat16",
    "e4m3_t": E4M3,
    "__nv_fp8_e4m3": E4M3,
    "float2": "complex64",
    "cuComplex": "complex64",
    "cuFloatComplex": "complex64",
    **{f"{sign}int{bits}_t": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_VECTOR = re.compile(r"(u?)(char|short|int|longlong|long|float|double)([1234])")


class Parameter(NamedTuple):
    """A parameter of a kernel. `name` is "" if the source does not name the parameter.

    `kind` is ``POINTER``, ``INT``, ``FLOAT`` or ``OTHER``. ``OTHER`` means that the type is neither
    built in nor a pointer, or that the kind is unknown. `dtype` is the name of the parameter's type
    or, for a pointer, of its elements' type; "" if it is unknown. `is_const` says whether a pointer
    points to constant elements.
    """

    name: str
    kind: str
    dtype: str = ""
    is_const: bool = False


@functools.cache
def accepted_dtypes(dtype: str) -> frozenset[str] | None:
    """Return the dtypes of the arrays that a pointer to elements of type `dtype` accepts.

    Pointers to integers accept signed and unsigned integers of the same size, and bits of floats of
    8 or 16 bits. None means that arrays of all types are accepted.
    """
    if not dtype:
        return None
    if dtype == "complex64":
        return frozenset({"complex64", "float32"})  # cuComplex is another name of float2
    stored = numpy_dtype(dtype)
    if stored.kind not in "biu" or dtype in (E4M3, "bfloat16"):
        return frozenset({dtype})
    size = stored.itemsize
    return frozenset(
        name
        for name, other in DTYPES.items()
        if other.itemsize == size and (other.kind in "biu" or size < 4)
    )


# Engines load the same sources again and again.
@functools.lru_cache(maxsize=256)
def kernel_parameters(text: str) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of each kernel, by kernel name.

    Kernels are ``extern "C" __global__`` functions. Kernels that a macro defines are not found.

    The source may define several kernels with the same name, in branches of ``#if``. If the names
    of a parameter differ between them, the parameter has no name. If its kinds differ, it has the
    kind ``OTHER``. If its types differ, its ``dtype`` is "".
    """
    found: dict[str, tuple[Parameter, ...]] = {}
    for kernel, text_between, _ in _entries(text):
        parameters = parse_parameters(text_between)
        earlier = found.get(kernel, parameters)
        if len(earlier) == len(parameters):
            parameters = tuple(map(_common, earlier, parameters))
        found[kernel] = parameters
    return found


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Return the parameters of a parameter list in C, such as "float* x, int n"."""
    if text.strip() in ("", "void"):
        return ()
    return tuple(_parameter(part) for part in text.split(","))


@functools.lru_cache(maxsize=256)
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

    `body` is the source text after the kernel's parameter list. The docstring of `waiting_kernels`
    says where the kernel must make this call.
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
    """Replace each complete ``{...}`` block by ``return;`` if it contains a return, else by ``;``.

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


def _common(a: Parameter, b: Parameter) -> Parameter:
    """Return what two declarations of a parameter have in common."""
    return Parameter(
        a.name if a.name == b.name else "",
        a.kind if a.kind == b.kind else OTHER,
        a.dtype if a.dtype == b.dtype else "",
        a.is_const and b.is_const,
    )


def _parameter(text: str) -> Parameter:
    words = [word for word in text.replace("*", " ").split() if word not in _QUALIFIERS]
    name = ""
    if len(words) > 1 and words[-1] not in _INT_WORDS:
        name = words.pop()
    depth = text.count("*")
    if depth == 0:
        return Parameter(name, _kind(words), _dtype(words))
    # The elements of an array of pointers are addresses.
    dtype = _dtype(words) if depth == 1 else "uint64"
    return Parameter(name, POINTER, dtype, "const" in text.partition("*")[0].split())


def _dtype(words: list[str]) -> str:
    """Return the dtype name of a type that is given by the words of the source; "" if unknown."""
    vector = _VECTOR.fullmatch(words[0]) if len(words) == 1 else None
    if vector is not None and words[0] not in _DTYPES:
        sign, base, _ = vector.groups()
        words = [*(["unsigned"] if sign else []), "long" if base == "longlong" else base]
    # "long long" has the size of "long", and "int" after another word adds nothing.
    plain = list(dict.fromkeys(words))
    if len(plain) > 1 and "char" not in plain:
        plain = [word for word in plain if word not in ("int", "signed")]
    plain.sort(key=lambda word: word not in ("unsigned", "signed"))
    return _DTYPES.get(" ".join(plain or ["int"]), "int32" if plain == ["signed"] else "")


def _kind(words: list[str]) -> str:
    """Return INT, FLOAT or OTHER for a type that is not a pointer.

    `words` are the words of the type in the source.
    """
    if words and all(word in _INT_WORDS for word in words):
        return INT
    if words in (["float"], ["double"]):
        return FLOAT
    if len(words) == 1 and _INT_NAMES.fullmatch(words[0]):
        return INT
    return OTHER
