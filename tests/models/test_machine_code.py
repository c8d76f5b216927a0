"""Machine code of the tensor-core kernels for NVIDIA GPUs, compiled by NVRTC. No GPU is needed.

The tests check properties that affect only the speed: which loads are issued before the kernel
waits for the previous kernel, and which loads are issued together.
"""

import functools

import machine_code
import pytest
from machine_code import Variant, compile_variant

from graft.models.llm.kernels.loader import FOLDER
from graft.models.llm.kernels.tensor_cores import MULTIPROCESSORS, mma_shape

pytestmark = pytest.mark.nvrtc
FULL = pytest.mark.full
#: Architectures with programmatic dependent launch. The short run compiles only for the first one.
ARCHITECTURES = [90, *(pytest.param(arch, marks=FULL) for arch in (100, 120))]
WAIT = "ACQBULK"  # griddepcontrol.wait
#: Copies of weights that linear_many starts before it waits, by rows per tile.
EARLY_COPIES = {32: 8, 64: 12, 128: 8, 256: 6}
#: Pairs of outputs whose inputs linear_many loads together without and with split K, by rows per
#: tile.
EPILOGUE_PAIRS = {32: (8, 4), 64: (16, 8), 128: (16, 16), 256: (16, 16)}


@functools.cache
def compile_kernel(kernel: str, arch: int, **defines: object) -> list[str]:
    """Return the instructions of a kernel, which must spill no registers."""
    macros = tuple((name, str(value)) for name, value in defines.items())
    variant = Variant(FOLDER / f"{kernel}.cu", macros)
    (usage,) = compile_variant(variant, arch)
    assert usage.spilled_bytes == 0 and usage.loop["local"] == 0
    cubin, _ = machine_code.compile_cubin(variant, arch)
    return machine_code.kernel_instructions(machine_code.disassemble(cubin))[kernel]


def index_of(instructions: list[str], name: str, start: int = 0) -> int:
    """Return the index of the first instruction from `start` on whose name starts with `name`."""
    for i in range(start, len(instructions)):
        if instructions[i].startswith(name):
            return i
    raise AssertionError(f"no {name}")


def last_index_of(instructions: list[str], name: str) -> int:
    return max(i for i, text in enumerate(instructions) if text.startswith(name))


def epilogue_batches(instructions: list[str]) -> list[int]:
    """Return the numbers of loads in a batch of linear_many's epilogues without and with split K.

    A batch is a run of loads from global memory without a sum or a store among them. The order of
    both epilogues in the code depends on the architecture.
    """
    batches = [0]
    for text in instructions[last_index_of(instructions, "HMMA") :]:
        if text.startswith("LDG"):
            batches[-1] += 1
        elif text.startswith(("FADD", "FFMA", "STG")):
            batches.append(0)
    return sorted(batches)[-2:]


def count(instructions: list[str], *names: str) -> int:
    return sum(text.startswith(names) for text in instructions)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("weight8", [pytest.param(0, marks=FULL), 1])
@pytest.mark.parametrize("tiles", [1, 2])
def test_linear_few_overlaps_loads_with_other_work(arch, tiles, weight8):
    """The first weights are loaded before griddepcontrol.wait, the residual before the main loop.

    One chunk of eight loads is in flight with 16 rows, and two with eight rows; with 8-bit weights
    three and five. After the barrier at the end of the main loop nothing is loaded from global
    memory. With 16 rows and 8-bit weights, the two residuals are loaded between the main loop and
    the barrier.
    """
    code = compile_kernel("linear_few", arch, TILES=tiles, X16=1, WEIGHT8=weight8)
    wait = index_of(code, WAIT)
    assert (
        count(code[:wait], "LDG")
        == 8 * {(1, 0): 2, (2, 0): 1, (1, 1): 5, (2, 1): 3}[tiles, weight8]
    )
    end_of_loop = last_index_of(code, "HMMA")
    barrier = index_of(code, "BAR", end_of_loop)
    loads = 4  # norm weights and weight scales
    if tiles == 2 and weight8:
        loads += 2
    assert count(code[end_of_loop:barrier], "LDG") == loads
    assert count(code[barrier:], "LDG") == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_linear_few_computes_only_scales_that_exist(arch):
    """A warp reduces the sums of squares of two rows if a tile has eight rows."""
    code = compile_kernel("linear_few", arch, TILES=1, X16=1)
    # A warp sum has five shuffles, which the compiler may duplicate for empty sums. The sum over
    # eight lanes in the epilogue has three.
    assert count(code, "SHFL") <= 2 * 2 * 2 * 5 + 3


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("row_block", "weight8", "moves", "most"),
    [
        (256, 0, 20, 220),
        pytest.param(256, 1, 20, 335, marks=FULL),
        pytest.param(128, 0, 30, 350, marks=FULL),
        pytest.param(64, 0, 20, 225, marks=FULL),
    ],
)
def test_linear_many_main_loop_has_few_instructions(arch, row_block, weight8, moves, most):
    """Few of the instructions move operands to other registers.

    A stage of 256 rows has 64 mma instructions, like one of 128 rows; one of 64 rows has 32.
    """
    code = compile_kernel("linear_many", arch, ROW_BLOCK=row_block, X16=1, WEIGHT8=weight8)
    first = index_of(code, "HMMA")
    begin = max(i for i in range(first) if code[i].startswith("BAR"))
    loop = code[begin : last_index_of(code, "HMMA") + 1]
    assert count(loop, "HMMA") == (32 if row_block == 64 else 64)
    assert count(loop, "MOV", "IMAD.MOV") <= moves
    assert len(loop) <= most


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("row_block", [32, *(pytest.param(n, marks=FULL) for n in (64, 128, 256))])
def test_linear_many_issues_loads_of_epilogue_together(arch, row_block):
    """The first weights are copied before griddepcontrol.wait; no load waits for an epilogue sum.

    With split K the epilogue loads four parts of two sums and two residuals for each pair of
    outputs, and for all pairs two norm weights and two weight scales. A block usually stores at
    most half of the pairs of its tile then. Without split K the sums are in shared memory.
    """
    code = compile_kernel("linear_many", arch, ROW_BLOCK=row_block, X16=1)
    wait = index_of(code, WAIT)
    assert count(code[:wait], "LDGSTS") == EARLY_COPIES[row_block]
    pairs, pairs_with_splits = EPILOGUE_PAIRS[row_block]
    assert epilogue_batches(code) == sorted([pairs * 2 + 4, pairs_with_splits * (2 * 4 + 2) + 4])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("row_block", [32, *(pytest.param(n, marks=FULL) for n in (128, 256))])
def test_linear_many_issues_loads_of_rotations_together(arch, row_block):
    """Cosines, sines and pages of a batch are loaded before the first sum is rotated.

    Positions, slots and ancestors are loaded before the main loop. Only tiles of 256 rows, which
    have no shared memory left for them, load them in the epilogue.
    """
    code = compile_kernel("linear_many", arch, ROW_BLOCK=row_block, X16=1, ROPE_HEAD_DIM=128)
    pairs, pairs_with_splits = EPILOGUE_PAIRS[row_block]
    if row_block == 256:
        pairs_with_splits //= 2  # there are no registers for more
    loads, loads_with_splits = epilogue_batches(code)
    own_loads = 6 if row_block == 256 else 3
    assert loads >= pairs * own_loads
    assert loads_with_splits >= pairs_with_splits * (2 * 4 + own_loads)
    assert row_block == 256 or loads < pairs * 4


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_linear_many_loads_totals_of_tall_tiles_together(arch):
    """The totals of 32 sums are loaded from shared memory before the first is added and stored."""
    code = compile_kernel("linear_many", arch, ROW_BLOCK=256, X16=1)
    after = code[last_index_of(code, "HMMA") :]
    assert count(after[: index_of(after, "FADD")], "LDS") == 32


@pytest.mark.parametrize("tiles", [1, pytest.param(2, marks=FULL)])
def test_linear_few_loads_rotation_before_main_loop(tiles):
    code = compile_kernel("linear_few", 90, TILES=tiles, X16=1, ROPE_HEAD_DIM=128)
    barrier = index_of(code, "BAR", last_index_of(code, "HMMA"))
    assert count(code[barrier:], "LDG") == 0


@FULL
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("nbytes", [1, 2])
def test_linear_many_with_tall_tiles_fits_into_multiprocessor(arch, nbytes):
    """A thread has at most 255 registers without spills, and a block at most 227 KB."""
    defines = {"ROW_BLOCK": "256", "X16": "1", "ROPE_HEAD_DIM": "128", "WEIGHT8": str(2 - nbytes)}
    variant = Variant(FOLDER / "linear_many.cu", tuple(defines.items()))
    (usage,) = compile_variant(variant, arch)
    shape = mma_shape(256, 28672, nbytes, allow_tall=True)
    assert shape.defines["ROW_BLOCK"] == 256
    assert usage.registers <= 255 and usage.spilled_bytes == 0
    assert shape.shared + usage.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("arch", [pytest.param(80, marks=FULL), *ARCHITECTURES])
@pytest.mark.parametrize("x16", [pytest.param(0, marks=FULL), 1])
def test_linear_many_runs_two_blocks_per_multiprocessor_for_32_rows(arch, x16):
    variant = Variant(FOLDER / "linear_many.cu", (("ROW_BLOCK", "32"), ("X16", str(x16))))
    (usage,) = compile_variant(variant, arch)
    assert usage.registers <= 128 and usage.spilled_bytes == 0
    assert mma_shape(32, 4096).blocks_per_multiprocessor == 2
    assert 2 * (mma_shape(32, 4096).shared + usage.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("rows", [17, 32, 33, 64, 65, 128, 256, 1000])
@pytest.mark.parametrize("columns", [16, 320, 4096, 6144, 28672, 128256])
def test_mma_shape_chooses_splits_by_waves(rows, columns):
    """Splits are chosen only if they shorten the product by more than adding the parts costs."""
    shape = mma_shape(rows, columns)
    splits = shape.grid[0]
    tiles = shape.grid[1] * shape.grid[2]
    concurrent = MULTIPROCESSORS * shape.blocks_per_multiprocessor
    waves_without_splits = -(-tiles // concurrent)
    assert splits in (1, 2, 4, 8)
    assert shape.waves == -(-tiles * splits // concurrent)
    if splits > 1:
        assert shape.waves / splits < waves_without_splits
    if splits == 1 and tiles * 8 <= concurrent:
        pytest.fail("eight splits would use idle multiprocessors in the same wave")
