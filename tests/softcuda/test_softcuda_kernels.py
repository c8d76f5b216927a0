"""Kernels on the soft device: warp operations, barriers, shared memory, atomics, compilation."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import check

from graft.native.softcuda import compile as kernel_compiler
from graft.native.softcuda.compile import KernelCompileError, build_portable, compile_cpu

rng = np.random.default_rng(7)

WARP = r"""
extern "C" __global__ void shuffle(const unsigned* value, const unsigned* mask, const int* arg,
                                   int op, int width, unsigned* out) {
  const int lane = threadIdx.x & 31;
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned m = mask[at];
  if (!((m >> lane) & 1u)) return;
  unsigned r = 0;
  if (op == 0) r = __shfl_sync(m, value[at], arg[at], width);
  if (op == 1) r = __shfl_up_sync(m, value[at], (unsigned)arg[at], width);
  if (op == 2) r = __shfl_down_sync(m, value[at], (unsigned)arg[at], width);
  if (op == 3) r = __shfl_xor_sync(m, value[at], arg[at], width);
  if (op == 4) r = __ballot_sync(m, value[at] & 1u);
  if (op == 5) r = __any_sync(m, value[at] & 1u);
  if (op == 6) r = __all_sync(m, value[at] & 1u);
  if (op == 7) r = __match_any_sync(m, value[at] & 3u);
  out[at] = r;
}
extern "C" __global__ void sums(const float* x, float* butterfly, float* collective) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  float v = x[at];
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  butterfly[at] = v;
  collective[at] = softcuda_warp_sum(x[at]);
}
extern "C" __global__ void wide(const double* x, double* out) {
  out[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], 31 - (int)threadIdx.x);
}
extern "C" __global__ void groups(unsigned* out) {
  // Two halves of one warp run loops of different length and never synchronize.
  const unsigned lane = threadIdx.x;
  const unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  unsigned v = lane;
  const int rounds = lane < 16 ? 3 : 5;
  for (int i = 0; i < rounds; ++i) {
    v = __shfl_sync(mask, v, (int)((lane & 16) + ((lane + 1) & 15)));
    __syncwarp(mask);
  }
  out[lane] = v;
}
"""


@pytest.fixture
def kernels(soft):
    return soft.kernels(WARP + BLOCK)


def shuffle_oracle(op: int, value, mask: int, arg, width: int) -> dict[int, int]:
    """Return the result of each lane for a warp operation as the CUDA programming guide defines it.

    The result of a lane whose source lane is not in the mask is undefined. Such lanes are not in
    the returned dictionary.
    """
    out = {}
    value = [int(v) for v in value]
    arg = [int(a) for a in arg]
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    votes = sum(1 << lane for lane in lanes if value[lane] & 1)
    for lane in lanes:
        first = lane // width * width
        if op <= 3:
            source = (
                first + arg[lane] % width,
                lane - arg[lane],
                lane + arg[lane],
                lane ^ arg[lane],
            )[op]
            if (source < first and op == 1) or source >= first + width:
                source = lane
            if mask >> source & 1:
                out[lane] = value[source]
        elif op == 7:
            same = [i for i in lanes if value[i] & 3 == value[lane] & 3]
            out[lane] = sum(1 << i for i in same)
        else:
            out[lane] = (votes, int(votes != 0), int(votes == mask))[op - 4]
    return out


@pytest.mark.parametrize(
    ("op", "width"),
    [
        *((op, width) for op in range(4) for width in (32, 16, 4, 1)),
        *((op, 32) for op in range(4, 8)),
    ],
)
def test_warp_shuffles_and_votes_follow_cuda_guide(soft, kernels, op, width):
    """Warp operations on random masks, values and source lanes agree with ``shuffle_oracle``."""
    warps = 24
    value = rng.integers(0, 2**32, (warps, 32), dtype=np.uint32)
    masks = rng.integers(1, 2**32, warps, dtype=np.uint64).astype(np.uint32)
    masks[:2] = 0xFFFFFFFF, 1 << 31
    arg = rng.integers(0, 32, (warps, 32), dtype=np.int32)
    pointers = [soft.put(value), soft.put(np.repeat(masks, 32)), soft.put(arg)]
    # Each block has two warps with different masks. The masks must not affect each other.
    got = soft.results(
        (warps, 32),
        np.uint32,
        kernels.shuffle,
        warps // 2,
        64,
        *pointers,
        np.int32(op),
        np.int32(width),
        None,
    )
    checked = 0
    for w, mask in enumerate(map(int, masks)):
        expected = shuffle_oracle(op, value[w], mask, arg[w], width)
        expected |= {lane: 0xABABABAB for lane in range(32) if not mask >> lane & 1}
        assert {lane: got[w, lane] for lane in expected} == expected, (w, hex(mask))
        checked += sum(mask >> lane & 1 for lane in expected)
    assert checked > 100


def test_warp_groups_with_disjoint_masks_are_independent(soft, kernels):
    """Two groups of lanes of one warp can execute different numbers of shuffles."""
    lane = np.arange(32)
    rounds = np.repeat([3, 5], 16)
    got = soft.results(32, np.uint32, kernels.groups, 1, 32, None)
    assert np.array_equal(got, (lane & 16) + ((lane & 15) + rounds) % 16)


def test_warp_sum_has_the_bits_of_five_xor_shuffles(soft, kernels):
    scale = 10.0 ** rng.integers(-6, 6, (8, 32))
    x = (rng.standard_normal((8, 32)) * scale).astype(np.float32)
    a = soft.alloc(x.nbytes)
    collective = soft.results(x.shape, np.uint32, kernels.sums, 4, 64, soft.put(x), a, None)
    butterfly = soft.get(a, x.shape, np.uint32)
    expected = x.copy()
    for offset in (16, 8, 4, 2, 1):
        expected = expected + expected[:, np.arange(32) ^ offset]
    assert np.array_equal(butterfly, expected.view(np.uint32))
    assert np.array_equal(collective, butterfly)


def test_warp_shuffle_exchanges_64_bit_values(soft, kernels):
    x = rng.standard_normal(32)
    reversed_lanes = soft.results(32, float, kernels.wide, 1, 32, soft.put(x), None)
    assert np.array_equal(reversed_lanes, x[::-1])


BLOCK = r"""
template <class T, int N>
__device__ T* tile() {
  __shared__ T memory[N];
  return memory;
}
// Each block fills its tile, waits, and checks that no other block has written to it.
template <class T>
__device__ void exclusive(int* bad, int rounds) {
  T* mine = tile<T, 256>();
  for (int r = 0; r < rounds; ++r) {
    const T token = (T)(blockIdx.x * 1000 + r);
    mine[threadIdx.x] = token;
    __syncthreads();
    for (int i = 0; i < 256; ++i)
      if (mine[i] != token) atomicAdd(bad, 1);
    __syncthreads();
  }
}
extern "C" __global__ void tiles_f32(int* bad, int rounds) { exclusive<float>(bad, rounds); }
extern "C" __global__ void tiles_i32(int* bad, int rounds) { exclusive<int>(bad, rounds); }

extern "C" __global__ void votes(const int* in, int* count, int* all, int* any) {
  const int p = in[blockIdx.x * blockDim.x + threadIdx.x];
  const int c = __syncthreads_count(p);
  const int a = __syncthreads_and(p);
  const int o = __syncthreads_or(p);
  if (threadIdx.x == 0) { count[blockIdx.x] = c; all[blockIdx.x] = a; any[blockIdx.x] = o; }
}
// Threads exit at different times. The barriers of the remaining threads must complete.
extern "C" __global__ void leavers(int* out) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (int r = 0; r < 4; ++r) {
    if ((int)threadIdx.x >= 100 - 20 * r) return;
    atomicAdd(&total, 1);
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = total;
}
// Half of the lanes exit: those that run before the others reach the warp operation, or after.
extern "C" __global__ void half_warp_leaves(int* out, int first) {
  if (((int)threadIdx.x < 16) == (first != 0)) return;
  __syncwarp();
  out[threadIdx.x % 16] = __popc(__ballot_sync(0xffffffffu, 1));
}
extern "C" __global__ void reverse(const int* in, int* out, int n) {
  extern __shared__ __align__(16) unsigned char raw[];
  int* tile = reinterpret_cast<int*>(raw);
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = in[blockIdx.x * n + i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[blockIdx.x * n + i] = tile[n - 1 - i];
}
extern "C" __global__ void indices(int* out) {
  const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = b * 10000 + t;
}
"""


@pytest.mark.parametrize("name", ["tiles_f32", "tiles_i32"])
def test_shared_memory_in_templates_is_separate_for_each_block(name):
    """Blocks on four workers do not share the ``__shared__`` arrays of templates."""
    check(
        f"""
        bad = s.ints(0)
        s.run(kernels.{name}, 64, 256, bad, np.int32(40))
        assert s.value(bad) == 0
        """,
        BLOCK,
        SOFTCUDA_WORKERS="4",
    )


def test_barrier_count_and_or_combine_predicates_of_block(soft, kernels):
    inputs = rng.integers(0, 2, (6, 96), dtype=np.int32)
    inputs[0] = 0
    inputs[1] = 1
    source = soft.put(inputs)
    outs = [soft.alloc(24) for _ in range(3)]
    soft.run(kernels.votes, 6, 96, source, *outs)
    combined = (inputs.sum(1), inputs.all(1), inputs.any(1))
    for pointer, expected in zip(outs, combined, strict=True):
        assert np.array_equal(soft.get(pointer, 6, np.int32), expected)


@pytest.mark.parametrize("first", [1, 0], ids=["exit-first", "exit-later"])
def test_warp_operation_does_not_wait_for_exited_lanes(soft, kernels, first):
    votes = soft.results(16, np.int32, kernels.half_warp_leaves, 1, 32, None, first)
    assert (votes == 16).all()


def test_barrier_does_not_wait_for_exited_threads(soft, kernels):
    assert soft.results(1, np.int32, kernels.leavers, 1, 128, None) == [100 + 80 + 60 + 40]


@pytest.mark.parametrize("n", [1, 33, 1000, 12288])
def test_dynamic_shared_memory_has_size_of_launch(soft, kernels, n):
    """Each launch gets the dynamic shared memory that it requests, up to 48 KiB by default."""
    data = rng.integers(0, 1 << 30, (5, n), dtype=np.int32)
    got = soft.results(
        data.shape,
        np.int32,
        kernels.reverse,
        5,
        64,
        soft.put(data),
        None,
        np.int32(n),
        shared=4 * n,
    )
    assert np.array_equal(got, data[:, ::-1])


def test_three_dimensional_launch_runs_each_thread_once(soft, kernels):
    got = soft.results((60, 24), np.int32, kernels.indices, (3, 4, 5), (4, 3, 2), None)
    assert np.array_equal(got, np.arange(60)[:, None] * 10000 + np.arange(24))


ATOMICS = r"""
extern "C" __global__ void atomics(int* i, unsigned* u, unsigned long long* q, float* f,
                                   unsigned* order) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&i[0], at);
  atomicMin(&i[1], 500 - at);
  atomicMax(&i[2], at - 500);
  atomicSub(&i[3], 1);
  atomicAnd(&u[0], ~(1u << (at & 31)));
  atomicOr(&u[1], 1u << (at & 31));
  atomicXor(&u[2], (unsigned)at);
  atomicMax(&u[3], (unsigned)at * 2654435761u);
  atomicAdd(&q[0], 1ull << 33);
  atomicMin(&q[1], 1ull << (63 - (at & 31)));
  atomicAdd(&f[0], 0.5f);
  atomicAdd_system(&f[1], 1.0f);
  // A spin lock that guards a plain increment.
  bool done = false;
  while (!done) {
    if (atomicCAS(&u[4], 0u, 1u) == 0u) {
      volatile unsigned* plain = &u[5];
      *plain = *plain + 1u;
      __threadfence();
      atomicExch(&u[4], 0u);
      done = true;
    }
  }
  order[atomicInc(&u[6], 0xffffffffu)] = at;
}
"""


def test_atomics_lose_no_updates_on_several_workers():
    """Atomic operations of every type are correct when four workers update the same words."""
    check(
        """
        n = 200 * 128
        i = s.put(np.array([0, 1 << 30, -(1 << 30), 0], np.int32))
        u = s.put(np.array([0xFFFFFFFF, 0, 0, 0, 0, 0, 0], np.uint32))
        q = s.put(np.array([0, 2**64 - 1], np.uint64))
        f = s.put(np.zeros(2, np.float32))
        order = s.put(np.zeros(n, np.uint32))
        s.run(kernels.atomics, 200, 128, i, u, q, f, order)
        at = np.arange(n)
        assert s.get(i, 4, np.int32).tolist() == [
            int(at.sum()) & 0x7FFFFFFF, 500 - (n - 1), n - 1 - 500, -n], s.get(i, 4, np.int32)
        got = s.get(u, 7, np.uint32).tolist()
        product = (at.astype(np.uint64) * 2654435761 % 2**32).max()
        assert got == [0, 0xFFFFFFFF, int(np.bitwise_xor.reduce(at)), int(product), 0, n, n], got
        assert s.get(q, 2, np.uint64).tolist() == [n << 33, 1 << 32]
        assert s.get(f, 2, np.float32).tolist() == [n / 2, n]
        assert np.array_equal(np.sort(s.get(order, n, np.uint32)), at)
        """,
        ATOMICS,
        SOFTCUDA_WORKERS="4",
    )


ENTRY = '\nextern "C" __global__ void f(int* p) { %s }\n'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # A syntax error is reported with the source's name and line number.
        (ENTRY % "*p = missing;", "bad.cu:2"),
        # Writable state is rejected, because it would exist once per worker.
        ("__device__ int state;" + ENTRY % "*p = 1;", "state"),
        ("__constant__ float table[4];" + ENTRY % "*p = 1;", "constant_memory"),
        ("__device__ int bump() { static int n = 0; return ++n; }" + ENTRY % "*p = 1;", "static"),
        ("extern __shared__ float s[];" + ENTRY % "*p = 1;", "inside a function"),
        # More than 48 KiB of static shared memory is rejected, as by the compiler for GPUs.
        (
            ENTRY % "__shared__ float s[12289]; s[p[0]] = 1; __syncthreads(); p[1] = (int)s[p[2]];",
            "'f' declares 49156 bytes",
        ),
        # A source without kernels is an error.
        ("__device__ int f() { return 1; }", "__global__"),
    ],
)
def test_compile_rejects_unsupported_sources(source, text):
    with pytest.raises(KernelCompileError) as caught:
        util.compile_kernel(source, "bad.cu")
    assert caught.value.name == "bad.cu"
    assert text in str(caught.value)


def test_compile_supports_defines_includes_and_kernels_in_macros(soft, tmp_path):
    """Sources can use macros and includes; changing an indirectly included file recompiles them."""
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
    assert soft.value(out) == 35, "the cache did not detect the changed include file"


def _compile_in(folder: str) -> int:
    source = 'extern "C" __global__ void f(int* p) { *p = 1; }'
    return len(compile_cpu(source, "p.cu", cache_dir=Path(folder)))


def test_compile_cache_is_shared_by_concurrent_processes(tmp_path):
    """Processes that compile the same source at the same time all get a complete image.

    No temporary file remains in the cache directory.
    """
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sizes = pool.map(_compile_in, [str(tmp_path)] * 4)
    assert len(set(sizes)) == 1
    assert [p.suffix for p in tmp_path.iterdir()] == [".so"]


def test_compile_cache_is_shared_by_copies_of_the_sources(tmp_path):
    """The image of a source is found again if the source and its headers are in another folder."""
    source = '#include "factor.h"\nextern "C" __global__ void scale(float* x) { *x *= FACTOR; }'
    images = []
    for folder, factor in (("first", "2"), ("second", "2"), ("third", "3")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "factor.h").write_text(f"#define FACTOR {factor}")
        options = {"include_dirs": [tmp_path / folder], "cache_dir": tmp_path / "cache"}
        images.append(compile_cpu(source, "scale.cu", **options))
    assert images[0] == images[1] != images[2]
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_prebuilt_image_needs_no_compiler(tmp_path, monkeypatch):
    """A prebuilt image is used wherever the sources are, if the processor can run it."""
    source = '#include "factor.h"\nextern "C" __global__ void scale(float* x) { *x *= FACTOR; }'
    for name in ("built", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "factor.h").write_text("")
    name, image = build_portable(
        source, "scale.cu", defines={"FACTOR": "2"}, include_dirs=[tmp_path / "built"]
    )
    (tmp_path / name).write_bytes(image)

    def fail():
        raise KernelCompileError("scale.cu", "no compiler")

    def load(factor="2"):
        return compile_cpu(
            source,
            "scale.cu",
            defines={"FACTOR": factor},
            include_dirs=[tmp_path / "installed"],
            cache_dir=tmp_path / "cache",
            prebuilt_dir=tmp_path,
        )

    monkeypatch.setattr(kernel_compiler, "_toolchain", fail)
    assert load() == image
    with pytest.raises(KernelCompileError):
        load("3")
    with monkeypatch.context() as context, pytest.raises(KernelCompileError):
        context.setenv("SOFTCUDA_ALIGNMENT", "1")
        load()
    with monkeypatch.context() as context, pytest.raises(KernelCompileError):
        context.setattr(kernel_compiler, "_runs_portable_images", lambda: False)
        load()
    (tmp_path / "installed" / "factor.h").write_text("// changed")
    with pytest.raises(KernelCompileError):
        load()
