"""Counts of the PTX kernels of a program: ``graft soft --count`` and ``SOFTCUDA_COUNT``.

The kernels are written by hand, so that all counts are known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ptx_util import module

from graft.cudagraph.driver.chooser import soft_library
from graft.tools.soft import write_counts

pytestmark = pytest.mark.ptx

#: Launches kernels k(device memory, pinned memory), each with a grid and a block.
PROGRAM = """
import ctypes, json, sys
import numpy as np
from cuda.bindings import driver as d
d.cuInit(0)
d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
memory = int(d.cuMemAlloc(65536)[1])
d.cuMemsetD8(memory, 0, 65536)
pinned = int(d.cuMemHostAlloc(4096, 0)[1])
ctypes.memset(pinned, 0, 4096)
pointers = np.array([memory, pinned], np.uint64)
table = np.array([pointers.ctypes.data, pointers.ctypes.data + 8], np.uint64)
for text, grid, block in json.loads(sys.stdin.read()):
    function = d.cuModuleGetFunction(d.cuModuleLoadData(text.encode() + b"\\0")[1], b"k")[1]
    d.cuLaunchKernel(function, *grid, *block, 0, 0, table.ctypes.data, 0)
    assert int(d.cuCtxSynchronize()[0]) == 0
"""


def run_launches(launches, path, **environment):
    """Run (module, grid, block) launches in a child process. Return their counts."""
    variables = {
        **os.environ,
        "LD_PRELOAD": str(soft_library()),
        "SOFTCUDA_COUNT": str(path),
        **environment,
    }
    text = json.dumps(launches)
    subprocess.run(
        [sys.executable, "-c", PROGRAM], input=text, text=True, env=variables, check=True
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


def launch(body, grid=1, block=32, declarations=""):
    """Return the launch of a kernel with the given body."""
    return module(body, 2, declarations), (grid, 1, 1), (block, 1, 1)


def test_count_matches_hand_count_of_each_class(tmp_path):
    """Three blocks of two warps execute a known number of instructions of each class.

    module() adds two loads of parameters and two moves of special registers before the body, and
    a return after it.
    """
    body = """
    setp.lt.u32 %p1, %r0, 32;
    mad.wide.u32 %rd2, %r0, 16, %rd0;
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2];
    mul.wide.u32 %rd3, %r0, 4;
    mov.u64 %rd4, buffer;
    add.s64 %rd4, %rd4, %rd3;
    add.f32 %f1, %f1, %f2;
    st.shared.f32 [%rd4], %f1;
    bar.sync 0;
    @%p1 ld.shared.f32 %f5, [%rd4];
    ex2.approx.f32 %f6, %f5;
    cvt.rn.bf16.f32 %h1, %f6;
    st.global.b16 [%rd0], %h1;
    @%p1 atom.global.add.u32 %r2, [%rd0], 1;
    shfl.sync.idx.b32 %r3, %r2, 0, 31, -1;
    membar.gl;
"""
    shared = ".shared .align 4 .b8 buffer[256];"
    (counts,) = run_launches([launch(body, 3, 64, shared)], tmp_path / "counts")
    warps = 3 * 2
    per_warp = {
        "integer": 3,
        "float": 1,
        "special": 1,
        "convert": 1,
        "compare": 1,
        "move": 5,
        "load": 2,
        "store": 2,
        "atomic": 1,
        "warp": 1,
        "barrier": 1,
        "fence": 1,
        "control": 1,
    }
    assert counts["instructions"] == {name: warps * n for name, n in per_warp.items()}
    assert counts["kernel"] == "k" and counts["grid"] == [3, 1, 1] and counts["block"] == [64, 1, 1]
    assert counts["blocks"] == 3
    assert counts["loaded"] == {"global": 3 * 64 * 16, "shared": 3 * 32 * 4}
    assert counts["loaded_by_parameter"] == {"0": 3 * 64 * 16}
    assert counts["distinct_loaded"] == {"global": 64 * 16}
    assert counts["stored"] == {"global": 3 * 64 * 2, "shared": 3 * 64 * 4}
    assert counts["distinct_stored"] == {"global": 2}
    assert counts["atomics"] == 3 * 32
    assert counts["longest_block_instructions"] == 2 * sum(per_warp.values())
    assert counts["longest_block_loaded"] == 64 * 16
    assert counts["dependent_host_loads"] == 0


def test_count_has_tensor_core_operations_and_asynchronous_copies(tmp_path):
    """Two warps execute one mma.sync each, and copy 16 bytes per thread to shared memory."""
    body = """
    mov.b32 %r2, 0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r2,%r2,%r2,%r2},
        {%r2,%r2}, {%f1,%f2,%f3,%f4};
    mul.lo.u32 %r3, %r0, 16;
    cvt.u64.u32 %rd3, %r3;
    add.s64 %rd3, %rd3, %rd0;
    mov.u32 %r4, buffer;
    add.u32 %r4, %r4, %r3;
    cp.async.cg.shared.global [%r4], [%rd3], 16;
    cp.async.wait_all;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r6}, [%r4];
"""
    shared = ".shared .align 16 .b8 buffer[1024];"
    (counts,) = run_launches([launch(body, 1, 64, shared)], tmp_path / "counts")
    assert counts["instructions"]["mma"] == 2
    assert counts["instructions"]["copy"] == 4
    assert counts["loaded"] == {"global": 64 * 16, "shared": 2 * 2 * 8 * 16}
    assert counts["stored"] == {"shared": 64 * 16}


#: Kernels of one thread, which load pinned memory (all zeros), with the number of such loads on
#: the longest path of dependent instructions.
CHAINS = {
    "independent": ("ld.u32 %r2, [%rd1]; ld.u32 %r3, [%rd1+4]; ld.u32 %r4, [%rd1+8];", 1),
    "address": (
        "ld.u64 %rd2, [%rd1]; add.s64 %rd3, %rd1, %rd2; ld.u64 %rd4, [%rd3+8];"
        "add.s64 %rd3, %rd4, %rd1; ld.u64 %rd5, [%rd3+16];",
        3,
    ),
    "device memory": ("ld.global.u32 %r2, [%rd0]; ld.global.u32 %r2, [%rd0+4];", 0),
    "branch": (
        "ld.u32 %r2, [%rd1]; setp.ne.u32 %p1, %r2, 0; @%p1 bra DONE; ld.u32 %r3, [%rd1+4]; DONE:",
        2,
    ),
    "acquire": ("ld.acquire.sys.u32 %r2, [%rd1]; ld.u32 %r3, [%rd1+4];", 2),
    "fence": ("ld.u32 %r2, [%rd1]; fence.acq_rel.sys; ld.u32 %r3, [%rd1+4];", 2),
    "polling": (
        "mov.u32 %r3, 5; AGAIN: ld.volatile.u32 %r2, [%rd1]; sub.u32 %r3, %r3, 1;"
        "add.u32 %r3, %r3, %r2; setp.ne.u32 %p1, %r3, 0; @%p1 bra AGAIN;",
        1,
    ),
}


def test_count_finds_dependent_loads_of_pinned_memory(tmp_path):
    launches = [launch(body, block=1) for body, _ in CHAINS.values()]
    found = run_launches(launches, tmp_path / "counts")
    wanted = {name: depth for name, (_, depth) in CHAINS.items()}
    depths = [counts["dependent_host_loads"] for counts in found]
    assert dict(zip(CHAINS, depths, strict=True)) == wanted
    assert found[0]["loaded"] == {"host": 12}
    assert found[0]["loaded_by_parameter"] == {"1": 12}


def test_count_follows_dependences_through_barriers(tmp_path):
    """A load after a barrier depends on a load whose value another warp stored before it."""
    load_first = """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra WAIT;
    ld.u32 %r2, [%rd1];
    {store}
WAIT:
    bar.sync 0;
    @!%p1 bra DONE;
    ld.u32 %r3, [%rd1+4];
DONE:
"""
    shared = ".shared .align 4 .b8 buffer[4];"
    stores = ("st.shared.u32 [buffer], %r2;", "")
    launches = [launch(load_first.format(store=s), 1, 64, shared) for s in stores]
    found = run_launches(launches, tmp_path / "counts")
    assert [counts["dependent_host_loads"] for counts in found] == [2, 1]


#: The block that arrives last at a counter adds 2,000 iterations of a loop; the other blocks add
#: as many as their index.
LAST_BLOCK = """
    atom.global.add.u32 %r2, [%rd0], 1;
    shfl.sync.idx.b32 %r2, %r2, 31, 31, -1;
    mov.u32 %r3, %nctaid.x;
    mul.lo.u32 %r3, %r3, 32;
    sub.u32 %r3, %r3, 1;
    setp.eq.u32 %p1, %r2, %r3;
    mov.u32 %r4, %r1;
    @%p1 mov.u32 %r4, 2000;
AGAIN:
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra DONE;
    sub.u32 %r4, %r4, 1;
    bra AGAIN;
DONE:
"""


def test_count_does_not_depend_on_number_of_workers(tmp_path):
    """The longest block is the last one, also if several workers run the blocks."""
    launches = [launch(LAST_BLOCK, 1024)]
    results = []
    for workers in (1, 4):
        (counts,) = run_launches(launches, tmp_path / str(workers), SOFTCUDA_WORKERS=str(workers))
        results.append(counts)
    assert results[0] == results[1]
    assert results[0]["longest_block_instructions"] == 15 + 4 * 2000
    total = 1024 * 15 + 4 * (2000 + sum(range(1023)))
    assert sum(results[0]["instructions"].values()) == total


def test_soft_count_writes_one_object_per_kernel_and_grid(tmp_path):
    """Launches with the same grid are added; the longest block is the maximum over all launches."""
    path = tmp_path / "counts.json"
    text = json.dumps([launch("st.global.u32 [%rd0], %r1;", grid) for grid in (2, 5, 2)])
    command = [sys.executable, "-m", "graft.tools.cli", "soft", "--count", str(path), "--"]
    subprocess.run([*command, "-c", PROGRAM], input=text, text=True, check=True)
    small, large = json.loads(path.read_text())
    assert (small["launches"], small["blocks"], small["grid"]) == (2, 4, [2, 1, 1])
    assert (large["launches"], large["blocks"], large["grid"]) == (1, 5, [5, 1, 1])
    assert small["instructions"]["store"] == 4
    assert small["stored"] == {"global": 2 * 2 * 128}
    assert small["longest_block_instructions"] == large["longest_block_instructions"] == 6


def test_soft_count_of_program_without_kernels_is_empty(tmp_path):
    path = tmp_path / "counts.json"
    write_counts([], path)
    assert json.loads(path.read_text()) == []
