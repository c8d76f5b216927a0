"""Compiling kernel texts for the soft device: refusals, includes, the cache."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import softcuda_util as util

from graft.native.softcuda.compile import KernelCompileError, compile_cpu


def error(source: str) -> str:
    with pytest.raises(KernelCompileError) as caught:
        util.compile_kernel(source, "bad.cu")
    assert caught.value.name == "bad.cu"
    return str(caught.value)


ENTRY = '\nextern "C" __global__ void f(int* p) { %s }\n'


@pytest.mark.parametrize(("text", "words"), [
    # A syntax error carries the kernel text's name and its own line number.
    (ENTRY % "*p = missing;", "bad.cu:2"),
    # Device globals, constants and statics would exist once per worker.
    ("__device__ int state;" + ENTRY % "*p = 1;", "state"),
    ("__constant__ float table[4];" + ENTRY % "*p = 1;", "constant_memory"),
    ("__device__ int bump() { static int n = 0; return ++n; }" + ENTRY % "*p = 1;", "static"),
    ("extern __shared__ float s[];" + ENTRY % "*p = 1;", "inside a function"),
    # More than 48 KiB of declared shared memory is refused, as GPU compilers do.
    (ENTRY % "__shared__ float s[12289]; s[p[0]] = 1; __syncthreads(); p[1] = (int)s[p[2]];",
     "'f' declares 49156 bytes"),
    # A text that exports no kernel is an error, not an empty module.
    ("__device__ int f() { return 1; }", "__global__"),
])
def test_what_is_no_kernel_text_of_the_soft_device_is_refused(text, words):
    """The error says what and where."""
    assert words in error(text)


def test_defines_includes_and_macro_made_kernels(soft, tmp_path):
    """Defines and include folders work, and kernels that macros make are found."""
    (tmp_path / "deep.cuh").write_text("#define FACTOR 3\n")
    (tmp_path / "shared.cuh").write_text('#pragma once\n#include "deep.cuh"\n')
    source = """
    #include "shared.cuh"
    #define MAKE(name, T) extern "C" __global__ void name(T* p) { *p = T(VALUE * FACTOR); }
    MAKE(make_int, int)
    MAKE(make_float, float)
    """
    options = {"defines": {"VALUE": "7"}, "include_dirs": [tmp_path]}
    out = soft.alloc(4)
    soft.run(soft.kernels(source, **options).make_float, 1, 1, out)
    assert soft.get(out, 1, np.float32)[0] == 21.0
    (tmp_path / "deep.cuh").write_text("#define FACTOR 5\n")
    soft.run(soft.kernels(source, **options).make_int, 1, 1, out)
    assert soft.value(out) == 35, "the cache missed a changed include"


def _compile_in(folder: str) -> int:
    text = 'extern "C" __global__ void f(int* p) { *p = 1; }'
    return len(compile_cpu(text, "p.cu", cache_dir=Path(folder)))


def test_concurrent_processes_share_the_cache(tmp_path):
    """Processes that compile one text at once all get a whole image."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sizes = pool.map(_compile_in, [str(tmp_path)] * 6)
    assert len(set(sizes)) == 1
    assert [p.suffix for p in tmp_path.iterdir()] == [".so"]
