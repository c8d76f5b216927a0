"""Kernel library of the decoder models.

An operation checks its operands and adds kernels to a `Lane`, an in-order sequence of work that
becomes a part of a CUDA graph or runs on a stream. It selects the kernels itself.

Matrix and attention kernels exist in two forms; norm kernels have one block size for each form:

``thread``
    For the soft device, which runs kernels on the CPU. Each thread computes many outputs in loops
    without barriers, which a C++ compiler can vectorize.
``warp``
    For GPUs. The soft device runs this form in tests only.

A process uses one form. The results of the two forms differ in rounding. Every kernel is row
invariant: within a form, the bits of an output row depend only on its input row and, for attention,
on the KV cache of its slot, but not on the other rows of the batch.
"""

from __future__ import annotations

from graft.cudagraph.device import Device
from graft.models.llm.kernels.attention import Attention
from graft.models.llm.kernels.elementwise import Elementwise
from graft.models.llm.kernels.loader import KernelLoader
from graft.models.llm.kernels.norms import Norms
from graft.models.llm.kernels.products import Products


class ModelKernels:
    """The operations of the decoder models on one device, in one kernel form.

    All calls use the same workspace, so the work of one object must run in order.

    Parameters
    ----------
    device
        Device that the kernels are compiled for.
    form
        ``thread`` (soft device only) or ``warp``. None selects the device's default.
    activations
        Precision of the activations on tensor cores, ``rounded`` or ``float32``.

    Raises
    ------
    OptionError
        If the device does not support the form, or `activations` is unknown.
    """

    def __init__(
        self, device: Device, form: str | None = None, activations: str = "rounded"
    ) -> None:
        loader = KernelLoader(device, form)
        self.device = device
        self.loader = loader
        self.form = loader.form
        self.activations = activations
        self.norms = Norms(loader)
        self.elementwise = Elementwise(loader, self.norms)
        self.products = Products(loader, activations, self.norms, self.elementwise)
        self.attention = Attention(loader, self.products, self.norms)
