"""Machine code of the sampling kernels for NVIDIA GPUs, compiled with NVRTC. No GPU is needed."""

from __future__ import annotations

import machine_code
import pytest
from machine_code import ARCHITECTURES, Variant

from graft.sampling.kernels.loader import KERNELS

pytestmark = pytest.mark.nvrtc


def load_runs(instructions: list[str]) -> list[tuple[int, str]]:
    """Return the number of global loads before each shared atomic, store or barrier."""
    runs = []
    loads = 0
    for instruction in instructions:
        name = instruction.split(".")[0].split()[0]
        if name == "LDG":
            loads += 1
        elif name in ("ATOMS", "BAR", "STG"):
            runs.append((loads, name))
            loads = 0
    return runs


@pytest.mark.full  # compilation takes 15 s per architecture
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_filters_load_eight_columns_before_first_use(arch):
    """A thread loads eight weights and eight logits at once.

    There are three such passes: the lists of top-k and top-p, which append with a shared atomic,
    and min-p, which stores zeros.
    """
    variant = Variant(KERNELS / "sample.cu", (("SAMPLE_BLOCK", "512"),))
    cubin = machine_code.compile_cubin(variant, arch, ())[0]
    kernels = machine_code.kernel_instructions(machine_code.disassemble(cubin))
    runs = load_runs(kernels["sample_target"])
    lists = [i for i, run in enumerate(runs) if run == (16, "ATOMS")]
    assert len(lists) >= 2
    assert (16, "STG") in runs[lists[-1] :]
