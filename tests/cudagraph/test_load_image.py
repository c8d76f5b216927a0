"""Kernels of other compilers, loaded as images with declared parameters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cudagraph_util import replay

from graft.cudagraph import Device, Graph, KernelError, Stream, StreamLane, load_image
from graft.native.softcuda.compile import compile_cpu

STORED = Path(__file__).resolve().parents[1] / "softcuda" / "foreign_kernels"
TEXT = """
extern "C" __global__ void add(float* y, const float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += x[i];
}
"""
DECLARED = {"add": "float* y, const float* x, int n"}


@pytest.fixture
def image(device: Device, tmp_path: Path) -> bytes:
    """The kernel ``add`` as machine code of the soft device, which takes the place of a cubin."""
    if device.kind != "soft":
        pytest.skip("the image is made for the soft device")
    return compile_cpu(TEXT, "add.cu", cache_dir=tmp_path)


def test_load_image_runs_kernel_on_stream_and_in_graph(
    device: Device, stream: Stream, image: bytes
) -> None:
    """Arguments are converted and checked as those of a compiled source."""
    add = load_image(device, image, DECLARED)["add"]
    y = device.zeros((5,), np.float32)
    x = device.from_host(np.arange(5, dtype=np.float32))
    StreamLane(stream).kernel(add, 2, 4, [y, x, 5])
    graph = Graph(device)
    graph.lane("main").kernel(add, 2, 4, [y, x, 5])
    del add
    replay(graph, stream, 2)
    assert y.to_host().tolist() == [0, 3, 6, 9, 12]
    add = load_image(device, image, DECLARED)["add"]
    with pytest.raises(KernelError, match="'n' is int32 and cannot hold 2147483648"):
        add.pack([y, x, 1 << 31])
    with pytest.raises(KernelError, match="'y' is a pointer to float32, but an array of int8"):
        add.pack([device.zeros(1, "int8"), x, 5])


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"add": "float* y, int n"}, r"'add' of add.cu has 3 parameters of \(8, 8, 4\) .* 2 are"),
        ({"add": "float* y, float* x, long n"}, "parameter 2 'n' is declared with 8 bytes, .* 4"),
        ({"add": "float* y, float x, int n"}, "parameter 1 'x' is declared with 4 bytes, .* 8"),
        ({"sub": "float* y"}, "add.cu has no extern \"C\" kernel 'sub'; it has add"),
    ],
)
def test_load_image_rejects_wrong_declarations(
    device: Device, image: bytes, declared: dict[str, str], words: str
) -> None:
    with pytest.raises(KernelError, match=words):
        load_image(device, image, declared, "add.cu")


def test_load_image_requires_declaration(device: Device, image: bytes) -> None:
    """Kernels of unknown parameters would receive unchecked arguments."""
    with pytest.raises(KernelError, match="'add' of image is not declared"):
        _ = load_image(device, image, {})["add"]


def test_load_image_reports_machine_code_of_gpus(device: Device, image: bytes) -> None:
    gpu_code = image[:18] + (190).to_bytes(2, "little") + image[20:]
    with pytest.raises(
        KernelError, match=r"gpu\.cubin cannot be loaded: .*the soft device runs PTX"
    ):
        load_image(device, gpu_code, {}, "gpu.cubin")


def ptx_of(compiler: str, name: str) -> tuple[str, str, dict]:
    kernel = json.loads((STORED / f"{compiler}.json").read_text(encoding="utf-8"))[name]
    return kernel["ptx"], kernel["entry"], kernel


@pytest.mark.ptx
def test_triton_kernel_runs_in_graph(device: Device, stream: Stream) -> None:
    """A kernel of Triton has two more pointers, to scratch that the kernel does not use."""
    ptx, entry, kernel = ptx_of("triton", "add")
    parameters = "const float* x, const float* y, float* out, int n, void* global, void* profile"
    add = load_image(device, ptx, {entry: parameters}, "triton")[entry]
    x, y = np.random.default_rng(1).standard_normal((2, 600)).astype(np.float32)
    out = device.zeros((600,), np.float32)
    graph = Graph(device, "triton")
    arguments = [device.from_host(x), device.from_host(y), out, 600, None, None]
    graph.lane("main").kernel(add, 3, kernel["threads"], arguments, shared=kernel["shared"])
    replay(graph, stream)
    np.testing.assert_array_equal(out.to_host(), x + y)


#: Parameters that numba-cuda passes for a one-dimensional array.
NUMBA_ARRAY = "void* info, void* parent, long size, long item, {}* data, long shape, long stride"


@pytest.mark.ptx
def test_numba_kernel_runs_in_graph(device: Device, stream: Stream) -> None:
    """A kernel of numba-cuda takes an array as seven parameters."""
    ptx, entry, _ = ptx_of("numba", "histogram")
    parameters = ", ".join([NUMBA_ARRAY.format("int")] * 2)
    histogram = load_image(device, ptx.encode(), {entry: parameters})[entry]
    values = np.random.default_rng(2).integers(0, 1000, 300, np.int32)
    counts = device.zeros((10,), np.int32)
    arguments: list[object] = []
    for array in (device.from_host(values), counts):
        arguments += [None, None, array.size, 4, array, array.size, 4]
    graph = Graph(device, "numba")
    graph.lane("main").kernel(histogram, 3, 128, arguments)
    replay(graph, stream)
    np.testing.assert_array_equal(counts.to_host(), np.bincount(values % 10, minlength=10))
