"""Every kernel compiles for real GPUs with NVRTC; no GPU is needed."""

from __future__ import annotations

import itertools

import pytest

from graft.models.llm.kernel_library import mma_shape
from graft.tools.bench import kernel_report, roofline
from graft.tools.bench.kernel_report import ARCHITECTURES, Variant

VARIANTS = kernel_report.all_variants()


def short(variant: Variant) -> bool:
    """Whether a text is compiled in the short form, for one architecture, all of them by turns: as
    it stands; and products of rounded rows at every size, gated or of weights of 8 bits."""
    title = variant.title
    return not variant.defines or ("X16" in title and ("GATED" in title) != ("WEIGHT8" in title))


CASES = [
    pytest.param(
        (variant, arch),
        id=f"{variant.title.replace(' ', '-')}-sm_{arch}",
        marks=[] if turn == number % len(ARCHITECTURES) and short(variant) else pytest.mark.full,
    )
    for number, variant in enumerate(VARIANTS)
    for turn, arch in enumerate(ARCHITECTURES)
]


#: By kernel, what it takes at once, and whether x has 16 bits and weights have 8: most registers
#: and shared bytes; of the main loop steps of tensor cores, and accesses of 16 bytes: loads, loads
#: of shared memory, copies to it.
GATES = {
    ("linear_few", 1, 0, 0): (128, 4128, 16, 16 + 16, 0, 0),
    ("linear_few", 1, 1, 0): (128, 4128, 16, 16 + 8, 0, 0),
    ("linear_few", 2, 0, 0): (128, 8256, 32, 16 + 32, 0, 0),
    ("linear_few", 2, 1, 0): (128, 8256, 32, 16 + 16, 0, 0),
    ("linear_many", 32, 0, 0): (176, 144, 16, 2, 12, 4),
    ("linear_many", 32, 1, 0): (176, 144, 16, 0, 12, 5),
    ("linear_many", 64, 0, 0): (192, 272, 32, 4, 16, 4),
    ("linear_many", 64, 1, 0): (192, 272, 32, 0, 16, 6),
    ("linear_many", 128, 0, 0): (248, 528, 64, 8, 24, 4),
    ("linear_many", 128, 1, 0): (240, 528, 64, 0, 24, 8),
    # Weights of 8 bits are loaded by eights, of 8 bytes; in twice as many chunks by few rows.
    ("linear_few", 1, 0, 1): (128, 4128, 32, 32, 0, 0),
    ("linear_few", 1, 1, 1): (128, 4128, 32, 16, 0, 0),
    ("linear_few", 2, 0, 1): (128, 8256, 64, 64, 0, 0),
    ("linear_few", 2, 1, 1): (128, 8256, 64, 32, 0, 0),
    ("linear_many", 32, 0, 1): (136, 144, 16, 2, 4, 2),
    ("linear_many", 64, 0, 1): (176, 272, 32, 4, 8, 2),
    ("linear_many", 32, 1, 1): (136, 144, 16, 0, 4, 3),
    ("linear_many", 64, 1, 1): (176, 272, 32, 0, 8, 4),
    ("linear_many", 128, 0, 1): (255, 528, 64, 8, 8, 2),
    ("linear_many", 128, 1, 1): (255, 528, 64, 0, 8, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles_for_real_gpus(case):
    """Each kernel text compiles to machine code of each kind as CuPy would do it; those on tensor
    cores have the main loop they were written for, spill nothing and leave room for their blocks.
    """
    variant, arch = case
    usages = kernel_report.compile_variant(variant, arch)
    assert {u.kernel for u in usages} >= set(kernel_report.entry_names(variant.path)), (
        f"{variant.title}: an entry is missing from the machine code for sm_{arch}"
    )
    block = int(dict(variant.defines).get("SAMPLE_BLOCK", "1"))
    for usage in usages:  # a block's registers come from one multiprocessor's, in eights
        assert -(-usage.registers // 8) * 8 * block <= 65536, usage
        # Local memory holds what is spilled, and no arrays; for sm_100 and later ptxas counts what
        # it spills of two kernels as their stack alone.
        if block > 1:
            assert usage.spilled_bytes <= 256, usage
            assert usage.spilled_bytes or usage.stack_bytes in (0, 80), usage
    for usage in usages:
        assert usage.loop["local"] == 0
        if usage.kernel in ("linear_few", "linear_many"):
            defines = dict(variant.defines)
            size = int(
                defines.get("TILES", 1)
                if usage.kernel == "linear_few"
                else defines.get("ROW_BLOCK", 64)
            )
            registers, shared, *loop = GATES[
                usage.kernel, size, int(defines.get("X16", 0)), int(defines.get("WEIGHT8", 0))
            ]
            assert usage.registers <= registers and usage.shared_bytes <= shared
            assert usage.spilled_bytes == 0
            assert [usage.loop[name] for name in ("mma", "load", "shared load", "copy")] == loop


def test_products_on_tensor_cores_fit_into_every_gpu_and_stand_on_paper():
    """No shape asks for more than the 99 KB of shared memory of a block on sm_120; what a head and
    a product that memory bounds take is what their bytes take, written out."""
    for rows, nbytes in itertools.product(range(1, 300), (1, 2)):
        assert mma_shape(rows, 4096, nbytes).shared + 528 <= 99 * 1024
    assert "E4M3" in roofline.roofline()
    eight, sixteen = (roofline.Product.of(1, 6144, 4096, nbytes).weights for nbytes in (1, 2))
    assert (eight, sixteen) == (6144 * (4096 + 4), 6144 * 4096 * 2)
    lines = {
        tuple(words[:2]): words[-2:]
        for words in map(str.split, roofline.roofline().splitlines()[1:])
    }
    for name, columns in (("qkv", 6144), ("head", 128256)):
        us, bound = lines[name, "1"]  # bfloat16 of 4096 inner ones, at 4.3 TB a second
        assert (us, bound) == (f"{columns * 4096 * 2 / 4.3e6:.1f}", "memory")


def test_every_kernel_file_is_compiled():
    """No .cu file of a room is left out, so a new kernel cannot escape the compiler."""
    rooms = [kernel_report.room_folder(room) for room in ("cudagraph", "sampling", "models")]
    files = {p.resolve() for room in rooms for p in room.rglob("*.cu") if "_thread" not in p.stem}
    assert files
    assert files <= {v.path.resolve() for v in VARIANTS}


def test_every_value_of_a_definition_is_a_variant(tmp_path):
    """What a text or its header leaves to the loader is compiled with each value it can take."""
    (tmp_path / "shared.cuh").write_text("#ifndef HEAD_DIM\n#define HEAD_DIM 64\n#endif\n")
    path = tmp_path / "some.cu"
    path.write_text('#include "shared.cuh"\n#ifndef CHUNK\n#define CHUNK 1\n#endif\n')
    found = {v.defines for v in kernel_report.file_variants(path)}
    assert found == {(), (("CHUNK", "64"),), (("HEAD_DIM", "32"),), (("HEAD_DIM", "128"),)}


def test_a_definition_without_values_is_refused(tmp_path):
    """A new definition cannot escape the compiler unnoticed: its values must be listed."""
    path = tmp_path / "some.cu"
    path.write_text("#ifndef NOVEL\n#define NOVEL 1\n#endif\n")
    with pytest.raises(kernel_report.CompileError, match="NOVEL"):
        kernel_report.file_variants(path)


def test_a_kernel_that_does_not_compile_is_reported(tmp_path):
    """A wrong text raises with the compiler's own words, so this test file can fail."""
    wrong = tmp_path / "wrong.cu"
    wrong.write_text('extern "C" __global__ void wrong(float* x) { x[0] = nothing; }\n')
    with pytest.raises(kernel_report.CompileError, match="nothing"):
        kernel_report.compile_variant(Variant(wrong), 80)
