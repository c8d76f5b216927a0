"""Kernels: text to module, and Python arguments to the bytes a launch needs."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.compiler import compile_text
from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, check, cu, enter
from graft.cudagraph.errors import DeviceError, KernelError
from graft.cudagraph.memory import DeviceArray, PinnedArray
from graft.cudagraph.pinned import PinnedField
from graft.cudagraph.signature import FLOAT, INT, OTHER, POINTER, kernel_kinds, waiting_kernels

INVALID_VALUE = 1
NOT_FOUND = 500
#: Dynamic shared memory that every kernel may use without asking.
SHARED_LIMIT = 48 * 1024
_POINTERS = (DeviceArray, PinnedArray, PinnedField)
_ADDRESS = struct.Struct("<Q")
_FLOATS = {4: ("float32", struct.Struct("<f")), 8: ("float64", struct.Struct("<d"))}
#: Kinds of NumPy dtypes that each kind of parameter takes.
_NUMPY = {INT: "biu", FLOAT: "f", POINTER: "u", OTHER: "biufV"}
#: Bytes -> layouts of an int that is not negative, and of a negative one.
_INTS = {
    size: (struct.Struct(f"<{unsigned}"), struct.Struct(f"<{signed}"))
    for size, unsigned, signed in ((1, "B", "b"), (2, "H", "h"), (4, "I", "i"), (8, "Q", "q"))
}


class PackedArgs:
    """Arguments in the layout of one kernel, and what must live while the addresses are used.

    The driver copies the values during a launch or node call; this object must live until then.
    ``owners`` must live for as long as the kernel can run.
    """

    __slots__ = ("_pointers", "_values", "owners")

    def __init__(self, data: bytes, offsets: Sequence[int], owners: tuple[object, ...]) -> None:
        self._values = ctypes.create_string_buffer(data, max(len(data), 1))
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + o for o in offsets))
        self.owners = owners

    @property
    def address(self) -> int:
        """Address of the ``void**`` that the driver wants."""
        return ctypes.addressof(self._pointers)


class Kernel:
    """One entry of a module, loaded; ``param_sizes`` are the bytes of its parameters.

    ``waits`` says that its text calls ``wait_for_kernel_before()``.
    """

    def __init__(self, module: KernelModule, name: str, function: Any) -> None:
        self.module = module
        self.name = name
        self.function = function
        self._layout = _parameters(function)
        self.param_sizes = tuple(size for _, size in self._layout)
        self.waits = name in module.waiting
        kinds = module.kinds.get(name, ())
        self._kinds = kinds if len(kinds) == len(self._layout) else (OTHER,) * len(self._layout)
        self._offsets = tuple(offset for offset, _ in self._layout)
        self._bytes = max((offset + size for offset, size in self._layout), default=0)
        self._shared = SHARED_LIMIT

    def pack(self, args: Iterable[object]) -> PackedArgs:
        """Check arguments against the kernel's parameters and pack them.

        Parameters
        ----------
        args : iterable
            Arrays and pinned fields become device pointers, None the NULL pointer. A Python int or
            float becomes what the parameter is, int for float too. NumPy scalars keep their dtype,
            which must be of the parameter's kind. A struct passed by value is given as bytes, a
            structured NumPy scalar or a ctypes.Structure of exactly its size; the soft device
            translates no pointers in it.

        Raises
        ------
        KernelError
            Wrong count, size, kind or range, by kernel and parameter number.
        """
        values = tuple(args)
        if len(values) != len(self.param_sizes):
            raise KernelError(
                f"kernel {self.name!r} takes {len(self.param_sizes)} arguments, not {len(values)}"
            )
        data = bytearray(self._bytes)
        owners: list[object] = [self.module]
        for i, (value, (offset, size)) in enumerate(zip(values, self._layout, strict=True)):
            if isinstance(value, _POINTERS):
                if size != 8 or self._kinds[i] not in (POINTER, OTHER):
                    raise self._bad(i, f"is {self._what(i)}, but a pointer was given")
                address, owner = value.argument()
                owners.append(owner)
                _ADDRESS.pack_into(data, offset, address)
            else:
                data[offset : offset + size] = self._encode(i, value, size, self._kinds[i])
        return PackedArgs(bytes(data), self._offsets, tuple(owners))

    def _encode(self, i: int, value: object, size: int, kind: str) -> bytes:
        """Encode anything but an array."""
        if isinstance(value, int):
            if kind == FLOAT:
                return self._encode_float(i, value, size)
            if kind == OTHER or size not in _INTS:
                raise self._bad(i, f"is {self._what(i)} and takes no int")
            try:
                return _INTS[size][value < 0].pack(value)
            except struct.error:
                raise self._bad(i, f"is {self._what(i)} and cannot hold {_said(value)}") from None
        if isinstance(value, np.generic):
            if value.itemsize != size or value.dtype.kind not in _NUMPY[kind]:
                raise self._bad(i, f"is {self._what(i)}, but {value.dtype} was given")
            return value.tobytes()
        if isinstance(value, float):
            if kind != FLOAT:
                raise self._bad(i, f"is {self._what(i)} and takes no float")
            return self._encode_float(i, value, size)
        if value is None:
            if size != 8 or kind not in (POINTER, OTHER):
                raise self._bad(i, f"is {self._what(i)}, but a pointer was given")
            return bytes(8)
        if isinstance(value, bytes | ctypes.Structure):
            given = bytes(value)
            if kind != OTHER or len(given) != size:
                raise self._bad(i, f"is {self._what(i)}, but {len(given)} plain bytes were given")
            return given
        raise self._bad(i, f"cannot be a {type(value).__name__}")

    def _encode_float(self, i: int, value: float, size: int) -> bytes:
        name, layout = _FLOATS[size]
        try:
            return layout.pack(float(value))
        except OverflowError:
            raise self._bad(i, f"is {name} and cannot hold {_said(value)}") from None

    def _what(self, i: int) -> str:
        kind = self._kinds[i]
        size = self.param_sizes[i]
        if kind == OTHER:
            return f"of a type that is not built in ({size} bytes; NumPy scalars keep theirs)"
        return f"{'an' if kind == INT else 'a'} {kind} of {size} bytes"

    def _bad(self, i: int, what: str) -> KernelError:
        return KernelError(f"kernel {self.name!r}: argument {i} {what}")

    def allow_shared(self, nbytes: int) -> None:
        """Ask for more dynamic shared memory than every kernel gets, when that is needed."""
        if nbytes > self._shared:
            which = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute, self.function, which, nbytes)
            self._shared = nbytes

    def __repr__(self) -> str:
        return f"<Kernel {self.name!r}, {len(self.param_sizes)} parameters>"


def _said(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return str(value)


class KernelModule:
    """A loaded kernel text; ``module[name]`` gives an ``extern "C" __global__`` entry.

    A module stays loaded for as long as one of its kernels is held, by Python or by a graph.
    """

    def __init__(
        self,
        name: str,
        handle: Any,
        keep: object,
        kinds: Mapping[str, tuple[str, ...]],
        waiting: frozenset[str],
    ) -> None:
        self.name = name
        self.kinds = kinds
        self.waiting = waiting
        self._handle = handle
        self._keep = keep
        # Weak: a kernel holds its module, and both should go when nobody uses them.
        self._kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> Kernel:
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = Kernel(self, name, self._function(name))
        return found

    def _function(self, name: str) -> Any:
        try:
            function = call(cu.cuModuleGetFunction, self._handle, name.encode())
        except DeviceError as error:
            if error.code != NOT_FOUND:
                raise
            raise KernelError(f'{self.name} has no extern "C" kernel {name!r}') from error
        # A CUfunction is no proof of loading, and lazy loading may wait for the whole device in
        # the middle of a replay.
        call(cu.cuFuncLoad, function)
        loaded = call(cu.cuFuncIsLoaded, function)
        if loaded != cu.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED:
            raise KernelError(f"kernel {name!r} of {self.name} is not loaded after cuFuncLoad")
        return function

    def __repr__(self) -> str:
        return f"<KernelModule {self.name!r}>"


# Weak: what nobody's kernels use is unloaded. A process has one device.
_modules: weakref.WeakValueDictionary[tuple, KernelModule] = weakref.WeakValueDictionary()
_modules_lock = threading.Lock()


def load(
    context: Context, path: str | Path, defines: Mapping[str, object] | None = None
) -> KernelModule:
    """Compile and load a kernel text, once per path and defines in this process."""
    macros = tuple(sorted((key, str(value)) for key, value in (defines or {}).items()))
    # Not resolved: that takes longer than a launch.
    source = Path(os.path.abspath(path))
    with _modules_lock:
        found = _modules.get((source, macros))
    if found is None:
        try:
            text = source.read_text()
        except OSError as error:
            raise KernelError(f"kernel text {source} cannot be read: {error}") from error
        found = load_text(context, text, source.name, dict(macros), source.parent)
    with _modules_lock:
        return _modules.setdefault((source, macros), found)


def load_text(
    context: Context,
    text: str,
    name: str,
    defines: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> KernelModule:
    """Compile and load kernel text.

    Parameters
    ----------
    context : Context
        The device.
    text : str
        CUDA C++ with ``extern "C" __global__`` entries; it includes no CUDA header.
    name : str
        Names the text in errors.
    defines : mapping, optional
        Macros.
    folder : Path, optional
        Where ``#include "..."`` looks besides graft's own kernels.

    Raises
    ------
    KernelError
        The text does not compile; the compiler's words follow.
    """
    enter("cuModuleLoadData")
    handle, keep = compile_text(context, text, name, defines or {}, folder)
    return KernelModule(name, handle, keep, kernel_kinds(text), waiting_kernels(text))


def _parameters(function: Any) -> list[tuple[int, int]]:
    """Return (offset, size) of each parameter."""
    out: list[tuple[int, int]] = []
    while True:
        results = cu.cuFuncGetParamInfo(function, len(out))
        if int(results[0]) == INVALID_VALUE:
            return out
        offset, size = check("cuFuncGetParamInfo", results)
        out.append((int(offset), int(size)))
