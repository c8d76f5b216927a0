"""Kernels: loading of compiled source, and conversion of Python arguments to kernel parameters."""

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

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, check, cu, prepare_driver_call
from graft.cudagraph.driver.dtypes import itemsize
from graft.cudagraph.driver.foreign import read_foreign
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray, check_shape
from graft.cudagraph.driver.pinned import PinnedField
from graft.cudagraph.errors import DeviceError, KernelError, ShapeError
from graft.cudagraph.kernels.compiler import (
    KernelSource,
    LoadedModule,
    cache_folder,
    compile_source,
    load_binary,
)
from graft.cudagraph.kernels.ptx import provide_ptx_library
from graft.cudagraph.kernels.signature import (
    FLOAT,
    INT,
    OTHER,
    POINTER,
    Parameter,
    accepted_dtypes,
    kernel_parameters,
    parse_parameters,
    waiting_kernels,
)
from graft.native import _native

#: First bytes of a cubin; other images are PTX text or a fatbin.
ELF = b"\x7fELF"
INVALID_VALUE = 1
NOT_FOUND = 500
#: If an integer has more bits than this, error messages show its size instead of its value.
MAX_PRINTED_BITS = 128
_POINTER_TYPES = (DeviceArray, PinnedArray, PinnedField)
_SCALAR_TYPES = (int, float, np.generic, bytes, ctypes.Structure)
_ADDRESS = struct.Struct("<Q")
#: Name and layout of a float, by its size in bytes.
_FLOATS = {4: ("float32", struct.Struct("<f")), 8: ("float64", struct.Struct("<d"))}
#: NumPy dtype kinds (`dtype.kind`) of the scalars that a parameter accepts, by the kind of the
#: parameter.
_NUMPY_KINDS = {INT: "biu", FLOAT: "f", POINTER: "u", OTHER: "biufV"}
#: Layouts of a non-negative and of a negative int, by size in bytes.
_INTS = {
    1: (struct.Struct("<B"), struct.Struct("<b")),
    2: (struct.Struct("<H"), struct.Struct("<h")),
    4: (struct.Struct("<I"), struct.Struct("<i")),
    8: (struct.Struct("<Q"), struct.Struct("<q")),
}


class PackedArgs:
    """Arguments in the memory layout of one kernel.

    The driver copies the values during the call that launches the kernel or adds the node. This
    object must live until that call has returned. The objects in `owners`, which are the module and
    the arrays, must live as long as the kernel can run.

    Parameters
    ----------
    data
        The values of the arguments, followed from `table` on by space for a pointer to each value.
    offsets
        Offset of each value in `data`.
    """

    __slots__ = ("_memory", "address", "owners")

    def __init__(
        self, data: bytearray, offsets: Sequence[int], table: int, owners: tuple[object, ...]
    ) -> None:
        self._memory = (ctypes.c_char * len(data)).from_buffer(data)
        base = ctypes.addressof(self._memory)
        struct.pack_into(f"<{len(offsets)}Q", data, table, *[base + offset for offset in offsets])
        #: Address of the pointers to the arguments, which the driver receives as ``void**``.
        self.address = base + table
        self.owners = owners


class Kernel:
    """A loaded ``extern "C" __global__`` function of a module.

    `param_sizes` are the sizes of the parameters in bytes. `waits_for_previous` is set if the
    source calls ``wait_for_previous_kernel()``.
    """

    def __init__(self, module: KernelModule, name: str, function: Any) -> None:
        self.module = module
        self.name = name
        self.function = function
        self._layout = _parameter_layout(function)
        self.param_sizes = tuple(size for _, size in self._layout)
        self.waits_for_previous = name in module.waiting
        parameters = module.parameters.get(name, ())
        if len(parameters) != len(self._layout):
            parameters = (Parameter("", OTHER),) * len(self._layout)
        self._names = tuple(parameter.name for parameter in parameters)
        self._kinds = tuple(parameter.kind for parameter in parameters)
        self._parameters = parameters
        self._accepted = tuple(
            accepted_dtypes(parameter.dtype) if parameter.kind == POINTER else None
            for parameter in parameters
        )
        self._offsets = tuple(offset for offset, _ in self._layout)
        nbytes = max((offset + size for offset, size in self._layout), default=0)
        self._table = -(-nbytes // 8) * 8  # offset of the pointers in the memory of PackedArgs
        self._nbytes = self._table + 8 * max(len(self._layout), 1)
        # Layouts of the parameters of known integer types; None for other parameters.
        self._int_layouts = tuple(
            _INTS[size][parameter.dtype.startswith("int")]
            if parameter.kind == INT and parameter.dtype and size in _INTS
            else None
            for parameter, (_, size) in zip(parameters, self._layout, strict=True)
        )
        self._shared_limit = 0  # bytes of dynamic shared memory that were requested so far

    def pack(self, args: Iterable[object], stream: int | None = None) -> PackedArgs:
        """Check arguments against the kernel's parameters and pack them.

        Arrays and fields of `PinnedSlots` become device pointers, None becomes NULL. So do arrays
        of other libraries in device memory or pinned memory; `stream` is the CUstream on which the
        kernel is launched, see :func:`~graft.cudagraph.driver.foreign.read_foreign`. If the source
        says to which type a parameter points, the elements of the array must have this type.

        A Python int or float is converted to the parameter's type; an int is accepted for a float.
        A NumPy scalar is not converted, so its dtype must match the parameter's kind and size. For
        a struct that is passed by value, pass bytes, a structured NumPy scalar or a
        ctypes.Structure of the same size. The soft device does not translate device pointers inside
        such a struct.

        KernelError is raised if the number of arguments is wrong, or an argument has the wrong
        size, type or range.
        """
        values = tuple(args)
        if len(values) != len(self.param_sizes):
            names = ", ".join(filter(None, self._names))
            raise KernelError(
                f"kernel {self.name!r} takes {len(self.param_sizes)} arguments"
                f"{f' ({names})' if names else ''}, not {len(values)}"
            )
        data = bytearray(self._nbytes)
        owners: list[object] = [self.module]
        for i, (value, (offset, size)) in enumerate(zip(values, self._layout, strict=True)):
            layout = self._int_layouts[i]
            if layout is not None and type(value) is int:
                try:
                    layout.pack_into(data, offset, value)
                except struct.error:
                    self._encode(i, value)  # raises an error with a message
                continue
            if isinstance(value, _POINTER_TYPES):
                self._check_array(i, value.dtype)
                address, owner = value.argument()
            elif value is None or isinstance(value, _SCALAR_TYPES):
                data[offset : offset + size] = self._encode(i, value)
                continue
            else:
                address, owner = self._foreign_argument(i, value, stream)
            owners.append(owner)
            _ADDRESS.pack_into(data, offset, address)
        return PackedArgs(data, self._offsets, self._table, tuple(owners))

    def _check_array(self, i: int, dtype: str) -> None:
        """Raise KernelError unless parameter ``i`` is a pointer that accepts arrays of `dtype`."""
        if self.param_sizes[i] != 8 or self._kinds[i] not in (POINTER, OTHER):
            raise self._error(i, f"is {self._describe(i)}, but a pointer was given")
        accepted = self._accepted[i]
        if accepted is not None and dtype not in accepted:
            raise self._error(
                i, f"is a pointer to {self._parameters[i].dtype}, but an array of {dtype} was given"
            )

    def _foreign_argument(self, i: int, value: object, stream: int | None) -> tuple[int, object]:
        """Return the device address of an array of another library, and the owner of its memory."""
        user = f"argument {i} of kernel {self.name!r}"
        try:
            found = read_foreign(value, user, stream)
            if found is None:
                raise self._error(i, f"cannot be a {type(value).__name__}")
            found.check_contiguous(user)
            check_shape(found.shape, user)
        except ShapeError as error:
            raise KernelError(str(error)) from error
        self._check_array(i, found.dtype)
        if found.device_address is None:
            raise self._error(
                i,
                f"is a {type(value).__name__} in pageable host memory, which kernels cannot use: "
                "copy it with from_host(), or to an array of pinned()",
            )
        parameter = self._parameters[i]
        if not found.writable and not parameter.is_const:
            raise self._error(i, "is a read-only array, but the parameter is no const pointer")
        return found.device_address, found.memory

    def _encode(self, i: int, value: object) -> bytes:
        """Return the bytes of argument ``i``, which is not an array."""
        size = self.param_sizes[i]
        kind = self._kinds[i]
        if isinstance(value, int):
            return self._encode_int(i, value)
        if isinstance(value, np.generic):
            if value.itemsize != size or value.dtype.kind not in _NUMPY_KINDS[kind]:
                raise self._error(i, f"is {self._describe(i)}, but {value.dtype} was given")
            if kind == INT:
                return self._encode_int(i, int(value))
            return value.tobytes()
        if isinstance(value, float):
            if kind != FLOAT:
                raise self._error(i, f"is {self._describe(i)}, but a float was given")
            return self._encode_float(i, value)
        if value is None:
            if size != 8 or kind not in (POINTER, OTHER):
                raise self._error(i, f"is {self._describe(i)}, but a pointer was given")
            return bytes(8)
        if isinstance(value, bytes | ctypes.Structure):
            data = bytes(value)
            if kind != OTHER or len(data) != size:
                raise self._error(
                    i, f"is {self._describe(i)}, but {len(data)} plain bytes were given"
                )
            return data
        raise self._error(i, f"cannot be a {type(value).__name__}")

    def _encode_int(self, i: int, value: int) -> bytes:
        size = self.param_sizes[i]
        kind = self._kinds[i]
        if kind == FLOAT:
            return self._encode_float(i, value)
        if kind == OTHER or size not in _INTS:
            raise self._error(i, f"is {self._describe(i)}, but an int was given")
        unsigned, signed = _INTS[size]
        dtype = self._parameters[i].dtype
        layout = signed if value < 0 else unsigned
        if dtype and kind == INT:
            layout = signed if dtype.startswith("int") else unsigned
        try:
            return layout.pack(value)
        except struct.error:
            raise self._error(
                i, f"is {dtype or self._describe(i)} and cannot hold {_describe_number(value)}"
            ) from None

    def _encode_float(self, i: int, value: float) -> bytes:
        name, layout = _FLOATS[self.param_sizes[i]]
        try:
            return layout.pack(float(value))
        except OverflowError:
            raise self._error(i, f"is {name} and cannot hold {_describe_number(value)}") from None

    def _describe(self, i: int) -> str:
        kind = self._kinds[i]
        size = self.param_sizes[i]
        if kind == OTHER:
            return (
                f"of a type that is not built in ({size} bytes; pass bytes, a NumPy scalar or a "
                "ctypes.Structure)"
            )
        article = "an" if kind == INT else "a"
        return f"{article} {kind} of {size} bytes"

    def _error(self, i: int, problem: str) -> KernelError:
        name = f" {self._names[i]!r}" if self._names[i] else ""
        return KernelError(f"kernel {self.name!r}: argument {i}{name} {problem}")

    def allow_shared(self, nbytes: int) -> None:
        """Raise the kernel's limit of dynamic shared memory to ``nbytes`` if necessary.

        Without this call, the limit is 48 KiB less the kernel's static shared memory.
        """
        if nbytes > self._shared_limit:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute, self.function, attribute, nbytes)
            self._shared_limit = nbytes

    def prefer_shared(self, percent: int) -> None:
        """Request that `percent` of a multiprocessor's L1 memory is used as shared memory.

        The rest is the L1 cache. Two kernels can run on a multiprocessor at the same time only if
        they use the same percentage. If the kernel needs more shared memory, the driver chooses a
        higher percentage.
        """
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        call(cu.cuFuncSetAttribute, self.function, attribute, percent)

    def __repr__(self) -> str:
        return f"<Kernel {self.name!r}, {len(self.param_sizes)} parameters>"


def _describe_number(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > MAX_PRINTED_BITS:
        return f"an int of {value.bit_length()} bits"
    return str(value)


class KernelModule:
    """A loaded kernel source; ``module[name]`` returns the :class:`Kernel` with this name.

    A module stays loaded as long as Python or a graph holds one of its kernels. `parameters`
    contains the parameters by kernel name (see :mod:`graft.cudagraph.kernels.signature`). `waiting`
    contains the names of the kernels that call ``wait_for_previous_kernel()``. With `must_declare`,
    kernels without an entry in `parameters` are refused.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedModule,
        parameters: Mapping[str, tuple[Parameter, ...]],
        waiting: frozenset[str],
        *,
        must_declare: bool = False,
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.waiting = waiting
        self._loaded = loaded
        self._must_declare = must_declare
        # The references are weak, because a kernel holds its module and strong references would
        # form a cycle.
        self._kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> Kernel:
        """Return a kernel. KernelError is raised if the module has no kernel of this name."""
        kernel = self._kernels.get(name)
        if kernel is None:
            if self._must_declare and name not in self.parameters:
                raise KernelError(
                    f"kernel {name!r} of {self.name} is not declared; the declared kernels are "
                    f"{', '.join(self.parameters) or 'none'}"
                )
            kernel = Kernel(self, name, self._function(name))
            self._kernels[name] = kernel
        return kernel

    def _function(self, name: str) -> Any:
        try:
            function = call(cu.cuModuleGetFunction, self._loaded.handle, name.encode())
        except DeviceError as error:
            if error.code != NOT_FOUND:
                raise
            raise KernelError(
                f'{self.name} has no extern "C" kernel {name!r}{self._names_of_kernels()}'
            ) from error
        # With lazy loading the driver may not have loaded the function yet. Load it now, because
        # loading it during a replay could wait for the whole device.
        call(cu.cuFuncLoad, function)
        state = call(cu.cuFuncIsLoaded, function)
        if state != cu.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED:
            raise KernelError(f"kernel {name!r} of {self.name} is not loaded after cuFuncLoad")
        return function

    def _names_of_kernels(self) -> str:
        """Return the module's kernel names for an error message; empty if they are unknown."""
        if not hasattr(cu, "cuModuleEnumerateFunctions"):
            return ""
        count = call(cu.cuModuleGetFunctionCount, self._loaded.handle)
        functions = call(cu.cuModuleEnumerateFunctions, count, self._loaded.handle)
        names = [call(cu.cuFuncGetName, function).decode() for function in functions]
        return f"; it has {', '.join(names)}" if names else ""

    def __repr__(self) -> str:
        return f"<KernelModule {self.name!r}>"


# Loaded modules by source file and macros. The references are weak, so that a module is unloaded
# when its kernels are no longer used. The key does not name the device, of which there is only one.
_modules: weakref.WeakValueDictionary[tuple, KernelModule] = weakref.WeakValueDictionary()
_modules_lock = threading.Lock()


def load(
    context: Context, path: str | Path, defines: Mapping[str, object] | None = None
) -> KernelModule:
    """Compile and load a kernel source file with the macros `defines`.

    If the file is already loaded with the same macros, return the loaded module.
    """
    values = {name: str(value) for name, value in (defines or {}).items()}
    macros = tuple(sorted(values.items()))
    # Path.resolve() would take longer than a kernel launch.
    source = Path(os.path.abspath(path))
    with _modules_lock:
        module = _modules.get((source, macros))
    if module is None:
        try:
            text = source.read_text()
        except OSError as error:
            raise KernelError(f"kernel source {source} cannot be read: {error}") from error
        module = load_text(context, text, source.name, values, source.parent)
    with _modules_lock:
        return _modules.setdefault((source, macros), module)


def load_text(
    context: Context,
    text: str,
    name: str,
    defines: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
) -> KernelModule:
    """Compile and load kernel source with the macros `defines`.

    Parameters
    ----------
    text
        CUDA C++ with ``extern "C" __global__`` functions. It must not include CUDA headers.
    name
        Name of the source in error messages.
    folder
        Additional folder in which ``#include "..."`` searches for headers, or None.

    Raises
    ------
    KernelError
        The source does not compile; the message contains the compiler's output.
    """
    prepare_driver_call("cuModuleLoadData")
    # Include paths are cached by folder, and the working directory may change.
    include = None if folder is None else Path(os.path.abspath(folder))
    loaded = compile_source(context, KernelSource(text, name, defines or {}, include))
    return KernelModule(name, loaded, kernel_parameters(text), waiting_kernels(text))


def load_image(
    context: Context, image: str | bytes, declarations: Mapping[str, str], name: str = "image"
) -> KernelModule:
    """Load kernels that another compiler has compiled, such as Triton, numba-cuda or CuPy.

    Parameters
    ----------
    image
        PTX text, or the bytes of PTX, a cubin or a fatbin. The soft device runs PTX only.
    declarations
        Parameters in C by kernel name, such as ``{"add": "float* x, const float* y, int n"}``. The
        kernel name is the name of the entry in the image.
    name
        Name of the image in error messages.

    Raises
    ------
    KernelError
        The driver cannot load the image, the image has no kernel of a name, or the number or sizes
        of the kernel's parameters differ from the declaration.
    """
    prepare_driver_call("cuModuleLoadData")
    data = image.encode() if isinstance(image, str) else bytes(image)
    is_text = not data.startswith(ELF)
    if context.kind == "soft" and is_text:
        provide_ptx_library(cache_folder() / "soft")
    try:
        loaded = load_binary(data + b"\0" if is_text else data)
    except DeviceError as error:
        if _native.is_context_fault(error.code):
            raise
        hint = ""
        if context.kind == "soft":
            hint = "; the soft device runs PTX, not machine code of GPUs"
        raise KernelError(f"{name} cannot be loaded: {error}{hint}") from error
    parameters = {kernel: parse_parameters(text) for kernel, text in declarations.items()}
    module = KernelModule(name, loaded, parameters, frozenset(), must_declare=True)
    for kernel in parameters:
        _check_declaration(module[kernel])
    return module


def _check_declaration(kernel: Kernel) -> None:
    """Raise KernelError if the declared parameters differ from those that the driver reports."""
    declared = kernel.module.parameters[kernel.name]
    if len(declared) != len(kernel.param_sizes):
        raise KernelError(
            f"kernel {kernel.name!r} of {kernel.module.name} has {len(kernel.param_sizes)} "
            f"parameters of {kernel.param_sizes} bytes, but {len(declared)} are declared"
        )
    for i, (parameter, size) in enumerate(zip(declared, kernel.param_sizes, strict=True)):
        expected = size
        if parameter.kind == POINTER:
            expected = 8
        elif parameter.dtype:
            expected = itemsize(parameter.dtype)
        if expected != size:
            raise KernelError(
                f"kernel {kernel.name!r} of {kernel.module.name}: parameter {i} "
                f"{parameter.name!r} is declared with {expected} bytes, but has {size}"
            )


def _parameter_layout(function: Any) -> list[tuple[int, int]]:
    """Return (offset, size) in bytes of each parameter of a CUfunction."""
    layout: list[tuple[int, int]] = []
    while True:
        results = cu.cuFuncGetParamInfo(function, len(layout))
        if int(results[0]) == INVALID_VALUE:
            return layout
        offset, size = check("cuFuncGetParamInfo", results)
        layout.append((int(offset), int(size)))
