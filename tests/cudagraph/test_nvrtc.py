"""Compile every kernel for NVIDIA GPUs with NVRTC and check its resource usage.

No GPU is needed.
"""

from __future__ import annotations

import itertools
import re

import machine_code
import pytest
from machine_code import ARCHITECTURES, Usage, Variant

from graft.models.llm.kernels.tensor_cores import mma_shape

VARIANTS = machine_code.all_variants()

#: Maximum shared memory of a thread block on sm_120, in bytes.
MAX_SHARED_BYTES = 99 * 1024
#: Number of registers of a multiprocessor. A thread is allocated a multiple of eight registers.
MAX_REGISTERS = 65536


def in_short_run(variant: Variant) -> bool:
    """Return whether the short test run compiles a variant.

    The short run compiles every file with default macros. It also compiles the matrix products with
    16-bit inputs (macro X16) and one of the macros GATED, WEIGHT8 and BIAS. It compiles linear_many
    only in the smallest size, because the other sizes take longer.
    """
    if not variant.defines:
        return True
    title = variant.title
    has_one_macro = sum(macro in title for macro in ("GATED", "WEIGHT8", "BIAS")) == 1
    is_smallest = "ROW_BLOCK" not in title or "ROW_BLOCK=32" in title
    return "X16" in title and has_one_macro and is_smallest


def make_cases() -> list:
    """Return all variants for all architectures.

    The short run compiles each variant for only one architecture. Successive variants use
    successive architectures, so that every architecture is covered.
    """
    cases = []
    for number, variant in enumerate(VARIANTS):
        short_arch = ARCHITECTURES[number % len(ARCHITECTURES)]
        for arch in ARCHITECTURES:
            is_short = arch == short_arch and in_short_run(variant)
            name = f"{variant.title.replace(' ', '-')}-sm_{arch}"
            marks = [] if is_short else pytest.mark.full
            cases.append(pytest.param(variant, arch, id=name, marks=marks))
    return cases


#: Kernels whose source text has a product and a sum that NVRTC may contract to one fused
#: multiply-add, and the architectures for which it does so unless --fmad=false is given. In
#: linear_warp, NVRTC contracts them for 2, 4 and 8 rows but not for one row, so the bits of a row
#: would depend on the number of rows.
CONTRACTED = {"linear_warp": (100, 120)}


def contraction_cases() -> list:
    """Return all variants for all architectures.

    The short run compiles some files of model kernels, without macros, for one architecture.
    """
    cases = []
    for variant in VARIANTS:
        for arch in ARCHITECTURES:
            has_cases = variant.path.stem in ("linear_warp", "linear_few", "norm")
            is_short = has_cases and arch == 100 and not variant.defines
            name = f"{variant.title.replace(' ', '-')}-sm_{arch}"
            marks = [] if is_short else pytest.mark.full
            cases.append(pytest.param(variant, arch, id=name, marks=marks))
    return cases


def count_fused_multiply_adds(cubin: bytes) -> dict[str, int]:
    """Return the number of fused multiply-add instructions of each kernel."""
    counts = {}
    text = machine_code.disassemble(cubin)
    for kernel, instructions in machine_code.kernel_instructions(text).items():
        counts[kernel] = sum(name.startswith("FFMA") for name in instructions)
    return counts


#: Expected resource usage of the tensor-core kernels.
#:
#: A key consists of the kernel's name, its TILES or ROW_BLOCK, whether the input has 16 bits, and
#: whether the weights have 8 bits. A value consists of the maximum number of registers, the maximum
#: number of bytes of static shared memory, and the number of instructions in the main loop: MMA
#: instructions, 16-byte loads, 16-byte loads from shared memory, and 16-byte asynchronous copies.
EXPECTED_USAGE = {
    ("linear_few", 1, 0, 0): (168, 2080, 24, 24 + 24, 0, 0),
    ("linear_few", 1, 1, 0): (168, 2080, 24, 24 + 12, 0, 0),
    ("linear_few", 2, 0, 0): (128, 8256, 32, 16 + 32, 0, 0),
    ("linear_few", 2, 1, 0): (128, 8256, 32, 16 + 16, 0, 0),
    ("linear_many", 32, 0, 0): (128, 144, 16, 2, 12, 4),
    ("linear_many", 32, 1, 0): (128, 144, 16, 0, 12, 5),
    ("linear_many", 64, 0, 0): (255, 272, 32, 4, 16, 4),
    ("linear_many", 64, 1, 0): (255, 272, 32, 0, 16, 6),
    ("linear_many", 128, 0, 0): (255, 528, 64, 8, 24, 4),
    ("linear_many", 128, 1, 0): (255, 528, 64, 0, 24, 8),
    ("linear_many", 256, 1, 0): (255, 1040, 64, 0, 16, 6),
    # With 8-bit weights, linear_few loads eight weights (8 bytes) at a time, in twice as many
    # chunks.
    ("linear_few", 1, 0, 1): (168, 2080, 48, 48, 0, 0),
    ("linear_few", 1, 1, 1): (168, 2080, 48, 24, 0, 0),
    ("linear_few", 2, 0, 1): (128, 8256, 64, 64, 0, 0),
    ("linear_few", 2, 1, 1): (128, 8256, 64, 32, 0, 0),
    ("linear_many", 32, 0, 1): (128, 144, 16, 2, 4, 2),
    ("linear_many", 64, 0, 1): (255, 272, 32, 4, 8, 2),
    ("linear_many", 32, 1, 1): (128, 144, 16, 0, 4, 3),
    ("linear_many", 64, 1, 1): (255, 272, 32, 0, 8, 4),
    ("linear_many", 128, 0, 1): (255, 528, 64, 8, 8, 2),
    ("linear_many", 128, 1, 1): (255, 528, 64, 0, 8, 6),
    ("linear_many", 256, 1, 1): (255, 1040, 64, 0, 8, 5),
}


#: The same for tiles of 256 columns.
EXPECTED_WIDE_USAGE = {
    ("linear_many", 64, 1, 0): (255, 272, 64, 0, 24, 10),
    ("linear_many", 64, 1, 1): (255, 272, 64, 0, 8, 6),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize(("variant", "arch"), make_cases())
def test_nvrtc_compiles_kernel_within_resource_limits(variant, arch):
    """Every kernel is in the machine code, fits into a multiprocessor and uses no local memory.

    Tensor-core kernels have the instructions of EXPECTED_USAGE in their main loop and spill no
    registers.
    """
    usages = machine_code.compile_variant(variant, arch)
    compiled = {usage.kernel for usage in usages}
    missing = set(machine_code.entry_names(variant.path)) - compiled
    assert not missing, f"{variant.title}: {missing} not in the machine code for sm_{arch}"
    defines = dict(variant.defines)
    block_size = int(defines.get("SAMPLE_BLOCK", "1"))
    for usage in usages:
        allocated_registers = -(-usage.registers // 8) * 8
        assert allocated_registers * block_size <= MAX_REGISTERS, usage
        if block_size > 1:
            # The kernel must not keep arrays in local memory. For two kernels on sm_100 and later,
            # ptxas reports spilled registers only as their stack frame.
            # With 64 registers per thread, draft_candidates spills most: 272 bytes on sm_90.
            assert usage.spilled_bytes <= 272, usage
            assert usage.spilled_bytes or usage.stack_bytes in (0, 80), usage
        assert usage.loop["local"] == 0
        if usage.kernel in ("linear_few", "linear_many"):
            check_tensor_core_usage(usage, defines)


def check_tensor_core_usage(usage: Usage, defines: dict[str, str]) -> None:
    """Check that the usage of a tensor-core kernel is the one in `EXPECTED_USAGE`.

    `defines` are the macros with which the kernel was compiled.
    """
    if usage.kernel == "linear_few":
        size = int(defines.get("TILES", 1))
    else:
        size = int(defines.get("ROW_BLOCK", 64))
    x16 = int(defines.get("X16", 0))
    weight8 = int(defines.get("WEIGHT8", 0))
    expected = EXPECTED_WIDE_USAGE if defines.get("OUTPUTS") == "256" else EXPECTED_USAGE
    registers, shared_bytes, *loop = expected[usage.kernel, size, x16, weight8]
    assert usage.registers <= registers
    if usage.kernel == "linear_many" and size < 256 and int(defines.get("ROPE_HEAD_DIM", 0)):
        shared_bytes += 16 * size  # positions of the rows
    assert usage.shared_bytes <= shared_bytes + 16
    assert usage.spilled_bytes == 0
    assert [usage.loop[name] for name in ("mma", "load", "shared load", "copy")] == loop


@pytest.mark.nvrtc
@pytest.mark.parametrize(("variant", "arch"), contraction_cases())
def test_nvrtc_options_prevent_contraction(variant, arch):
    """With graft's options, NVRTC contracts no product and sum; other kernels do not change.

    All other kernels call fmaf where they fuse, so the option --fmad does not change the number of
    their fused multiply-adds.
    """
    counts, contracted = (
        count_fused_multiply_adds(machine_code.compile_cubin(variant, arch, options)[0])
        for options in ((), ("--fmad=true",))
    )
    assert set(counts) == set(machine_code.entry_names(variant.path))
    for kernel, count in counts.items():
        if arch in CONTRACTED.get(kernel, ()):
            assert count < contracted[kernel]
        else:
            assert count == contracted[kernel]


@pytest.mark.parametrize("nbytes", [1, 2])
def test_mma_shape_fits_into_shared_memory_of_every_gpu(nbytes):
    for rows in range(1, 300):
        assert mma_shape(rows, 4096, nbytes).shared + 528 <= MAX_SHARED_BYTES


def test_variants_include_every_kernel_file():
    packages = ("cudagraph", "sampling", "models")
    files = itertools.chain.from_iterable(
        machine_code.package_folder(package).rglob("*.cu") for package in packages
    )
    device_files = {path.resolve() for path in files if "_thread" not in path.stem}
    assert device_files
    assert device_files <= {variant.path.resolve() for variant in VARIANTS}


def test_variants_have_every_macro_value(tmp_path):
    """Macros of a file and of its includes are compiled with each of their values."""
    (tmp_path / "shared.cuh").write_text("#ifndef HEAD_DIM\n#define HEAD_DIM 64\n#endif\n")
    path = tmp_path / "some.cu"
    path.write_text('#include "shared.cuh"\n#ifndef CHUNK\n#define CHUNK 1\n#endif\n')
    found = {variant.defines for variant in machine_code.file_variants(path)}
    assert found == {(), (("CHUNK", "64"),), (("HEAD_DIM", "32"),), (("HEAD_DIM", "128"),)}


def test_variants_reject_macro_without_values(tmp_path):
    path = tmp_path / "some.cu"
    path.write_text("#ifndef NOVEL\n#define NOVEL 1\n#endif\n")
    with pytest.raises(machine_code.CompileError, match="NOVEL"):
        machine_code.file_variants(path)


@pytest.mark.nvrtc
def test_compile_variant_raises_nvrtc_log_on_compile_error(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text('extern "C" __global__ void wrong(float* x) { x[0] = nothing; }\n')
    with pytest.raises(machine_code.CompileError, match="nothing"):
        machine_code.compile_variant(Variant(path), 80)


def test_kernels_do_not_request_non_coherent_loads():
    """NVRTC generates ld.nc for ``__ldg`` and for pointers that are const and ``__restrict__``.

    A programmatic edge lets a kernel run at the same time as the previous one. Non-coherent loads
    may then return old values of memory that the previous kernel writes.
    """
    asks = re.compile(r"__ldg|__restrict__|\.nc\.")
    comment = re.compile(r"//[^\n]*")
    folders = [machine_code.package_folder(name) for name in machine_code.PACKAGES]
    files = [path for folder in folders for path in folder.rglob("*.cu*")]
    assert len(files) > 30
    found = {path.name for path in files if asks.search(comment.sub("", path.read_text()))}
    assert not found
