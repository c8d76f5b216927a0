"""Loading of the sampling kernels, and their launch shapes by device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.cudagraph.device import Device
from graft.cudagraph.driver.cstruct import read_numbers

__all__ = ["KERNELS", "MAX_SELECTED", "load", "row_block", "row_parts", "step_ranges"]

KERNELS = Path(__file__).resolve().parent

#: Maximum number of ids per row of logits that the token selector of DFlash2 scores (selector.cu).
MAX_SELECTED: int = read_numbers(KERNELS / "selector.cu")["MAX_SELECTED"]

#: Threads per row block, a thread block that processes one row of logits or a part of it. Results
#: do not depend on the number. When kernels run as CPU code, one thread processes the row in
#: vectorized loops without barriers.
_GPU_ROW_BLOCK = 512
_CPU_ROW_BLOCK = 1


def row_block(device: Device) -> int:
    """Return the number of threads of a block that processes a row of logits or a part of it."""
    return _GPU_ROW_BLOCK if device.runs_gpu_code else _CPU_ROW_BLOCK


def row_parts(device: Device, columns: int) -> int:
    """Return the number of blocks that share a row; each processes a few thousand columns."""
    if not device.runs_gpu_code:
        return 1
    parts = columns // 4096
    return min(max(parts, 1), 32)


def step_ranges(parts: int) -> list[tuple[int, int]]:
    """Return the first and the last step (STEP_* in row.cuh) of each launch that samples rows.

    A single block per row runs all three steps in one launch. If several blocks (`parts`) share a
    row, each step gets its own launch: if one launch ran several steps, the blocks would share only
    the first of them, and the last block to finish it would run the others alone.
    """
    return [(0, 2)] if parts == 1 else [(step, step) for step in range(3)]


def load(device: Device, name: str, block: int) -> Any:
    """Load ``<name>.cu`` for blocks of ``block`` threads (1 or a multiple of 32)."""
    path = KERNELS / f"{name}.cu"
    return device.load(path, defines={"SAMPLE_BLOCK": str(block)})
