"""Loads the model kernels in the form that a device runs: ``thread`` or ``warp``."""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.driver.dtypes import E4M3
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.kernels.kernels import Kernel
from graft.models.cache.kv import STORAGE

FOLDER = Path(__file__).resolve().parent
FORMS = {"soft": ("thread", "warp"), "cuda": ("warp",)}

#: Share of the L1 cache, in percent, that all model kernels request as shared memory. With equal
#: shares a kernel can start while the previous one runs (programmatic dependent launch). Of the 228
#: KB of an H100, 57 % are rounded up to 132 KB: enough for two blocks of linear_many with 32 rows
#: (61 KB each) or one block with up to 128 rows (97 KB). A block with 256 rows needs 225 KB and
#: starts when the previous kernel has ended.
SHARED_PERCENT = 57

_THREAD_CHUNK = 64  # elements per thread of an elementwise kernel in form ``thread``
_ELEMENT_BLOCK = 128
_NORM_BLOCK = 256


class KernelLoader:
    """Loads the model kernels of one device. Each variant is compiled once.

    `form` selects one of two implementations: ``warp``, in which the threads of a warp cooperate,
    for GPUs and the soft device, or ``thread``, for the soft device only. None selects the device's
    default. `OptionError` is raised if the device does not run the form.
    """

    def __init__(self, device: Device, form: str | None = None) -> None:
        self.device = device
        forms = FORMS["cuda" if device.runs_gpu_code else "soft"]
        self.form = form or forms[0]
        if self.form not in forms:
            raise OptionError(
                f"kernel form {form!r}: expected one of {forms} on a {device.kind} device"
            )
        self.is_thread = self.form == "thread"
        # Keeps the compiled modules loaded. A module that no graph references would otherwise be
        # unloaded after each launch on a stream.
        self.loaded: dict[tuple, Kernel] = {}

    def load(self, file: str, name: str, **defines: object) -> Kernel:
        """Return the kernel `name` of ``file.cu``, compiled with the macros `defines`."""
        key = (file, name, *defines.items())
        found = self.loaded.get(key)
        if found is None:
            found = self.device.load(FOLDER / f"{file}.cu", defines)[name]
            found.prefer_shared(SHARED_PERCENT)
            self.loaded[key] = found
        return found

    def load_form(self, name: str, **defines: object) -> Kernel:
        """Return the kernel ``{name}_{form}`` of the file ``{name}_{form}.cu``.

        ``form`` is the form of this loader, ``thread`` or ``warp``.
        """
        name = f"{name}_{self.form}"
        return self.load(name, name, **defines)

    @property
    def chunk(self) -> int:
        """Number of elements per thread of an elementwise kernel."""
        return _THREAD_CHUNK if self.is_thread else 1

    @property
    def element_block(self) -> int:
        """Number of threads per block of a kernel whose threads work on elements of one row."""
        return 1 if self.is_thread else _ELEMENT_BLOCK

    @property
    def norm_block(self) -> int:
        """Number of threads per block of a kernel that computes the norm of a row."""
        return 1 if self.is_thread else _NORM_BLOCK

    def elementwise_launch(self, rows: int, width: int, chunk: int) -> tuple[int, int]:
        """Return grid and block size of an elementwise kernel with `chunk` elements per thread."""
        block = 8 if self.is_thread else _ELEMENT_BLOCK
        return ceil_div(rows * ceil_div(width, chunk), block), block


def ceil_div(count: int, unit: int) -> int:
    """Return `count` / `unit`, rounded up."""
    return -(-count // unit)


def storage_type(array: DeviceArray) -> str:
    """Return the C++ type of an array's elements, which selects the variant of a kernel."""
    names = {**STORAGE, E4M3: "e4m3_t"}
    if array.dtype not in names:
        raise ShapeError(f"weights are {array.dtype}, expected one of {sorted(names)}")
    return names[array.dtype]
