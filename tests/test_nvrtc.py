"""Every kernel compiles for real GPUs with NVRTC; no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.tools import kernel_report
from graft.tools.kernel_report import ARCHITECTURES, Variant

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = kernel_report.all_variants()
REPORT: list[kernel_report.Usage] = []


@pytest.fixture(scope="module", autouse=True)
def write_report():
    """Leave the registers, shared memory and spills of the run in build/kernels.json."""
    yield
    if REPORT:
        kernel_report.write_json(ROOT / "build" / "kernels.json", REPORT)
        print("\n" + kernel_report.table(REPORT))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.title.replace(" ", "-"))
def test_every_kernel_compiles_for_real_gpus(variant):
    """Each kernel text compiles to machine code for sm_80, sm_90 and sm_100 as CuPy would do it."""
    for arch in ARCHITECTURES:
        usages = kernel_report.compile_variant(variant, arch)
        assert {u.kernel for u in usages} >= set(kernel_report.entry_names(variant.path)), (
            f"{variant.title}: an entry is missing from the machine code for sm_{arch}")
        REPORT.extend(usages)


def test_every_kernel_file_is_compiled():
    """No .cu file of a room is left out, so a new kernel cannot escape the compiler."""
    rooms = [kernel_report.room_folder(room) for room in ("cudagraph", "sampling", "models")]
    files = {p.resolve() for room in rooms for p in room.rglob("*.cu")}
    assert files
    assert files <= {v.path.resolve() for v in VARIANTS}


def test_listed_variants_name_files_that_exist():
    """A variant list that names a missing file fails here, not on hardware."""
    missing = [v.title for v in VARIANTS if not v.path.is_file()]
    assert missing == []


def test_a_kernel_that_does_not_compile_is_reported(tmp_path):
    """A wrong text raises with the compiler's own words, so this test file can fail."""
    wrong = tmp_path / "wrong.cu"
    wrong.write_text('extern "C" __global__ void wrong(float* x) { x[0] = nothing; }\n')
    with pytest.raises(kernel_report.CompileError, match="nothing"):
        kernel_report.compile_variant(Variant(wrong), 80)


def test_definitions_reach_the_compiler(tmp_path):
    """The definitions of a variant change the machine code that is reported."""
    text = ('extern "C" __global__ void fill(float* x) {\n'
            "  __shared__ float row[WIDTH];\n  row[threadIdx.x] = x[threadIdx.x];\n"
            "  __syncthreads();\n  x[threadIdx.x] = row[WIDTH - 1 - threadIdx.x];\n}\n")
    path = tmp_path / "fill.cu"
    path.write_text(text)
    sizes = [
        kernel_report.compile_variant(Variant(path, (("WIDTH", width),)), 90)[0].shared_bytes
        for width in ("64", "256")
    ]
    assert sizes[1] - sizes[0] == 4 * (256 - 64)
