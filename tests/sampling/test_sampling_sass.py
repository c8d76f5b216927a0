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
def test_sample_target_loads_eight_columns_before_first_use(arch):
    """A thread loads eight columns at once, so that the latencies of the loads overlap.

    The first pass loads mask words and logits and stores legal logits. Three passes load weights
    and logits and end with a shared atomic: the histogram, and the lists of top-k and top-p. Two
    passes store zeros: that of min-p, and the one that applies the cut.
    """
    variant = Variant(KERNELS / "sample.cu", (("SAMPLE_BLOCK", "512"),))
    cubin = machine_code.compile_cubin(variant, arch, ())[0]
    kernels = machine_code.kernel_instructions(machine_code.disassemble(cubin))
    runs = [run for run in load_runs(kernels["sample_target"]) if run[0] >= 16]
    assert runs[0][1] == "STG"
    assert [name for _, name in runs].count("ATOMS") >= 3
    last_list = max(i for i, run in enumerate(runs) if run == (16, "ATOMS"))
    assert [name for _, name in runs[last_list:]].count("STG") >= 2


@pytest.mark.full  # as above
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_two_sampling_blocks_fit_on_multiprocessor(arch):
    """A multiprocessor of each architecture has 65,536 registers and at least 99 KB of memory."""
    variant = Variant(KERNELS / "sample.cu", (("SAMPLE_BLOCK", "512"),))
    for usage in machine_code.compile_variant(variant, arch):
        assert 2 * 512 * usage.registers <= 65536 and usage.spilled_bytes == 0
        assert 2 * usage.shared_bytes <= 99 * 1024
