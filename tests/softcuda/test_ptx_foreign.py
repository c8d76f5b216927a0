"""Kernels of numba-cuda and Triton on the soft device, compared with NumPy.

The PTX of the kernels is stored next to this file. If ``$GRAFT_FOREIGN_PYTHON`` names an
interpreter that has numba-cuda and Triton, it compiles the kernels again instead.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.ptx

SCRIPT = Path(__file__).resolve().parent / "foreign_kernels.py"
STORED = SCRIPT.with_suffix("")
RNG = np.random.default_rng(5)


@functools.cache
def kernels_of(compiler: str) -> dict[str, dict]:
    """Return the kernels that a compiler has made."""
    kernels: dict[str, dict]
    python = os.environ.get("GRAFT_FOREIGN_PYTHON")
    if not python:
        kernels = json.loads((STORED / f"{compiler}.json").read_text(encoding="utf-8"))
        return kernels
    done = subprocess.run(
        [python, str(SCRIPT), compiler], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout)
    return kernels


def numba_array(pointer: int, *shape: int) -> list:
    """Return the parameters that numba passes for a contiguous array of 32-bit elements."""
    strides = [4 * int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    sizes = [np.int64(n) for n in (int(np.prod(shape)), 4)]
    return [0, 0, *sizes, pointer, *map(np.int64, (*shape, *strides))]


def run(soft, kernel: dict, grid, block, *arguments, shared: int = 0) -> None:
    loaded = soft.cuModuleLoadData(kernel["ptx"].encode() + b"\0")
    function = soft.cuModuleGetFunction(loaded, kernel["entry"].encode())
    soft.run(function, grid, block, *arguments, shared=shared)
    soft.cuModuleUnload(loaded)


def run_triton(soft, name: str, grid, *arguments) -> None:
    """Run a kernel of Triton, whose last two parameters are pointers to unused scratch."""
    kernel = kernels_of("triton")[name]
    run(soft, kernel, grid, kernel["threads"], *arguments, 0, 0, shared=kernel["shared"])


def test_numba_reduction_equals_numpy(soft):
    x = RNG.standard_normal(400).astype(np.float32)
    out = soft.put(np.zeros(4, np.float32))
    arrays = [*numba_array(soft.put(x), 400), *numba_array(out, 4)]
    run(soft, kernels_of("numba")["block_sums"], 4, 128, *arrays)
    wanted = np.pad(x, (0, 112)).reshape(4, 128).sum(1)
    np.testing.assert_allclose(soft.get(out, 4, np.float32), wanted, rtol=1e-4, atol=1e-5)


def test_numba_matrix_product_equals_numpy(soft):
    a, b = RNG.standard_normal((2, 16, 16)).astype(np.float32)
    out = soft.put(np.zeros((16, 16), np.float32))
    arrays = [
        value
        for pointer in (soft.put(a), soft.put(b), out)
        for value in numba_array(pointer, 16, 16)
    ]
    run(soft, kernels_of("numba")["product"], (2, 2, 1), (8, 8, 1), *arrays)
    np.testing.assert_allclose(soft.get(out, (16, 16), np.float32), a @ b, rtol=1e-4, atol=1e-5)


def test_numba_histogram_equals_numpy(soft):
    values = RNG.integers(0, 1000, 300, np.int32)
    counts = soft.put(np.zeros(10, np.int32))
    arrays = [*numba_array(soft.put(values), 300), *numba_array(counts, 10)]
    run(soft, kernels_of("numba")["histogram"], 3, 128, *arrays)
    wanted = np.bincount(values % 10, minlength=10)
    np.testing.assert_array_equal(soft.get(counts, 10, np.int32), wanted)


def test_numba_scan_equals_numpy(soft):
    x = RNG.integers(0, 100, 128).astype(np.float32)
    out = soft.put(np.zeros(128, np.float32))
    arrays = [*numba_array(soft.put(x), 128), *numba_array(out, 128)]
    run(soft, kernels_of("numba")["scan"], 1, 128, *arrays)
    np.testing.assert_array_equal(soft.get(out, 128, np.float32), np.cumsum(x))


def test_triton_masked_addition_equals_numpy(soft):
    x, y = RNG.standard_normal((2, 600)).astype(np.float32)
    out = soft.put(np.zeros(600, np.float32))
    run_triton(soft, "add", 3, soft.put(x), soft.put(y), out, np.int32(600))
    np.testing.assert_array_equal(soft.get(out, 600, np.float32), x + y)


def test_triton_softmax_equals_numpy(soft):
    x = RNG.standard_normal((5, 200)).astype(np.float32)
    out = soft.put(np.zeros((5, 200), np.float32))
    run_triton(soft, "softmax", 5, soft.put(x), out, np.int32(200))
    weights = np.exp(x.astype(np.float64))
    wanted = weights / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(soft.get(out, (5, 200), np.float32), wanted, rtol=1e-5)


def test_triton_scan_equals_numpy(soft):
    x = RNG.integers(0, 100, 256).astype(np.float32)
    out = soft.put(np.zeros(256, np.float32))
    run_triton(soft, "scan", 1, soft.put(x), out)
    np.testing.assert_array_equal(soft.get(out, 256, np.float32), np.cumsum(x))


def test_triton_histogram_equals_numpy(soft):
    values = RNG.integers(0, 1000, 600, np.int32)
    counts = soft.put(np.zeros(16, np.int32))
    run_triton(soft, "histogram", 3, soft.put(values), counts, np.int32(600))
    wanted = np.bincount(values % 16, minlength=16)
    np.testing.assert_array_equal(soft.get(counts, 16, np.int32), wanted)


def test_triton_matrix_product_equals_numpy(soft):
    """For sm_80, Triton generates cp.async, ldmatrix and mma.sync."""
    a = RNG.standard_normal((64, 128)).astype(np.float16)
    b = RNG.standard_normal((128, 64)).astype(np.float16)
    out = soft.put(np.zeros((64, 64), np.float32))
    assert "ldmatrix" in kernels_of("triton")["product_80"]["ptx"]
    run_triton(soft, "product_80", (2, 2, 1), soft.put(a), soft.put(b), out, np.int32(128))
    wanted = a.astype(np.float64) @ b
    np.testing.assert_allclose(soft.get(out, (64, 64), np.float32), wanted, atol=2e-4)


def test_triton_wgmma_is_refused(soft):
    text = kernels_of("triton")["product_90"]["ptx"]
    assert "wgmma" in text
    result = soft.d.cuModuleLoadData(text.encode() + b"\0")
    assert result[0].name == "CUDA_ERROR_NOT_SUPPORTED"
    assert "PTX line" in soft.refusal() and "is not supported" in soft.refusal()
