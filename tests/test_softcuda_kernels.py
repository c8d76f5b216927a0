"""What a kernel text means on the soft device: warps, barriers, atomics, types, compilation."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import softcuda_util as util

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
  // Two halves of one warp, each in a loop of its own length, never meeting.
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


def shuffle_oracle(op: int, value, mask: int, arg, width: int) -> dict[int, int]:
    """The CUDA guide's definition, lane by lane; sources outside the mask are left out."""
    out = {}
    value, arg = [int(v) for v in value], [int(a) for a in arg]
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    votes = sum(1 << lane for lane in lanes if value[lane] & 1)
    for lane in lanes:
        first = lane // width * width
        if op == 0:
            source = first + arg[lane] % width
        elif op == 1:
            source = lane - arg[lane] if lane - arg[lane] >= first else lane
        elif op == 2:
            source = lane + arg[lane] if lane + arg[lane] < first + width else lane
        elif op == 3:
            source = lane ^ arg[lane] if lane ^ arg[lane] < first + width else lane
        if op <= 3:
            if mask >> source & 1:
                out[lane] = value[source]
        elif op == 4:
            out[lane] = votes
        elif op == 5:
            out[lane] = int(votes != 0)
        elif op == 6:
            out[lane] = int(votes == mask)
        else:
            out[lane] = sum(1 << i for i in lanes if (value[i] ^ value[lane]) & 3 == 0)
    return out


@pytest.fixture(scope="module")
def soft():
    return util.device()


@pytest.fixture(scope="module")
def warp(soft):
    module = soft.module(WARP)
    yield module
    soft.ok(soft.d.cuModuleUnload(module))


@pytest.mark.parametrize(
    ("op", "width"),
    [(op, width) for op in range(4) for width in (32, 16, 4, 1)] + [(op, 32) for op in range(4, 8)],
)
def test_warp_operations_with_partial_masks(soft, warp, op, width):
    """Shuffles and votes follow the CUDA guide for any mask, width and source lane."""
    warps = 24
    value = rng.integers(0, 2**32, (warps, 32), dtype=np.uint32)
    masks = rng.integers(1, 2**32, warps, dtype=np.uint64).astype(np.uint32)
    masks[0] = 0xFFFFFFFF
    masks[1] = 1 << 31
    arg = rng.integers(0, 32, (warps, 32), dtype=np.int32)
    pointers = [soft.put(value), soft.put(np.repeat(masks, 32)), soft.put(arg)]
    out = soft.put(np.full((warps, 32), 0xABCD, np.uint32))
    function = soft.function(warp, "shuffle")
    # Two warps a block: neighbours with other masks must not disturb each other.
    soft.run(function, warps // 2, 64, *pointers, np.int32(op), np.int32(width), out)
    got = soft.get(out, (warps, 32), np.uint32)
    checked = 0
    for w in range(warps):
        expected = shuffle_oracle(op, value[w], int(masks[w]), arg[w], width)
        for lane, word in expected.items():
            assert got[w, lane] == word, (w, lane, hex(masks[w]))
            checked += 1
        for lane in range(32):
            if not masks[w] >> lane & 1:
                assert got[w, lane] == 0xABCD
    assert checked > 100
    soft.free(*pointers, out)


def test_disjoint_masks_progress_independently(soft, warp):
    """Two groups of one warp rendezvous with their own masks, however often each does."""
    out = soft.put(np.zeros(32, np.uint32))
    soft.run(soft.function(warp, "groups"), 1, 32, out)
    lane = np.arange(32)
    rounds = np.where(lane < 16, 3, 5)
    assert np.array_equal(soft.get(out, 32, np.uint32), (lane & 16) + ((lane & 15) + rounds) % 16)
    soft.free(out)


def test_collective_sum_is_bitwise_the_butterfly(soft, warp):
    """softcuda_warp_sum gives the bits of five xor shuffles."""
    x = (rng.standard_normal((8, 32)) * 10.0 ** rng.integers(-6, 6, (8, 32))).astype(np.float32)
    source, a, b = soft.put(x), soft.alloc(x.nbytes), soft.alloc(x.nbytes)
    soft.run(soft.function(warp, "sums"), 4, 64, source, a, b)
    butterfly, collective = soft.get(a, x.shape, np.uint32), soft.get(b, x.shape, np.uint32)
    expected = x.copy()
    for offset in (16, 8, 4, 2, 1):
        expected = expected + expected[:, np.arange(32) ^ offset]
    assert np.array_equal(butterfly, expected.view(np.uint32))
    assert np.array_equal(collective, butterfly)
    soft.free(source, a, b)


def test_shuffle_of_eight_bytes(soft, warp):
    """64-bit values cross the warp whole."""
    x = rng.standard_normal(32)
    source, out = soft.put(x), soft.alloc(x.nbytes)
    soft.run(soft.function(warp, "wide"), 1, 32, source, out)
    assert np.array_equal(soft.get(out, 32, np.float64), x[::-1])
    soft.free(source, out)


BLOCK = r"""
template <class T, int N>
__device__ T* tile() {
  __shared__ T memory[N];
  return memory;
}
// Each block fills its tile, waits, and checks that nobody else wrote to it meanwhile.
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
// Threads leave at different times; those that stay must still meet.
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


@pytest.fixture(scope="module")
def block(soft):
    module = soft.module(BLOCK)
    yield module
    soft.ok(soft.d.cuModuleUnload(module))


@pytest.mark.parametrize("name", ["tiles_f32", "tiles_i32"])
def test_shared_memory_of_templates_belongs_to_one_block(name):
    """On two and more workers, shared memory declared in a template is never shared by blocks."""
    done = util.run_child(
        f"""
        m = s.module({BLOCK!r})
        bad = s.put(np.zeros(1, np.int32))
        s.run(s.function(m, {name!r}), 64, 256, bad, np.int32(40))
        print(int(s.get(bad, 1, np.int32)[0]))
        """,
        SOFTCUDA_WORKERS="4",
    )
    assert done.stdout.strip() == "0", done.stderr


def test_barrier_votes(soft, block):
    """__syncthreads_count, _and and _or combine the predicates of the whole block."""
    inputs = rng.integers(0, 2, (6, 96), dtype=np.int32)
    inputs[0], inputs[1] = 0, 1
    source = soft.put(inputs)
    outs = [soft.alloc(24) for _ in range(3)]
    soft.run(soft.function(block, "votes"), 6, 96, source, *outs)
    count, every, some = (soft.get(p, 6, np.int32) for p in outs)
    assert np.array_equal(count, inputs.sum(1))
    assert np.array_equal(every, inputs.all(1))
    assert np.array_equal(some, inputs.any(1))
    soft.free(source, *outs)


def test_exited_threads_count_as_arrived(soft, block):
    """A barrier waits for the threads that have not exited."""
    out = soft.put(np.zeros(1, np.int32))
    soft.run(soft.function(block, "leavers"), 1, 128, out)
    assert soft.get(out, 1, np.int32)[0] == 100 + 80 + 60 + 40
    soft.free(out)


@pytest.mark.parametrize("n", [1, 33, 1000, 12288])
def test_dynamic_shared_memory(soft, block, n):
    """Dynamic shared memory has the launch's size, up to the default 48 KiB."""
    data = rng.integers(0, 1 << 30, (5, n), dtype=np.int32)
    source, out = soft.put(data), soft.alloc(data.nbytes)
    soft.run(soft.function(block, "reverse"), 5, 64, source, out, np.int32(n), shared=4 * n)
    assert np.array_equal(soft.get(out, data.shape, np.int32), data[:, ::-1])
    soft.free(source, out)


def test_three_dimensional_indices(soft, block):
    """Every thread of a 3-d grid of 3-d blocks runs once with its own indices."""
    grid, size = (3, 4, 5), (4, 3, 2)
    blocks, threads = 60, 24
    out = soft.put(np.full(blocks * threads, -1, np.int32))
    soft.run(soft.function(block, "indices"), grid, size, out)
    expected = np.arange(blocks)[:, None] * 10000 + np.arange(threads)
    assert np.array_equal(soft.get(out, (blocks, threads), np.int32), expected)
    soft.free(out)


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
  // A lock by compare-and-swap around a plain increment.
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


def test_atomics_between_blocks_on_several_workers():
    """No update is lost between workers, for every type and operation."""
    done = util.run_child(
        f"""
        m = s.module({ATOMICS!r})
        n = 200 * 128
        i = s.put(np.array([0, 1 << 30, -(1 << 30), 0], np.int32))
        u = s.put(np.array([0xFFFFFFFF, 0, 0, 0, 0, 0, 0], np.uint32))
        q = s.put(np.array([0, 2**64 - 1], np.uint64))
        f = s.put(np.zeros(2, np.float32))
        order = s.put(np.zeros(n, np.uint32))
        s.run(s.function(m, "atomics"), 200, 128, i, u, q, f, order)
        at = np.arange(n)
        assert s.get(i, 4, np.int32).tolist() == [
            int(at.sum()) & 0x7FFFFFFF, 500 - (n - 1), n - 1 - 500, -n], s.get(i, 4, np.int32)
        got = s.get(u, 7, np.uint32).tolist()
        product = (at.astype(np.uint64) * 2654435761 % 2**32).max()
        assert got == [0, 0xFFFFFFFF, int(np.bitwise_xor.reduce(at)), int(product), 0, n, n], got
        assert s.get(q, 2, np.uint64).tolist() == [n << 33, 1 << 32]
        assert s.get(f, 2, np.float32).tolist() == [n / 2, n]
        assert np.array_equal(np.sort(s.get(order, n, np.uint32)), at)
        print("ok")
        """,
        SOFTCUDA_WORKERS="4",
    )
    assert done.stdout.strip() == "ok", done.stderr


HALF = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <class T, T (*Make)(unsigned short), unsigned short (*Bits)(T)>
__device__ void all(const unsigned short* a, const unsigned short* b, const unsigned short* c,
                    unsigned short* out, float* wide, int n, int i) {
  if (i >= n) return;
  const T x = Make(a[i]), y = Make(b[i]), z = Make(c[i]);
  out[0 * n + i] = Bits(x + y);
  out[1 * n + i] = Bits(__hsub(x, y));
  out[2 * n + i] = Bits(x * y);
  out[3 * n + i] = Bits(__hdiv(x, y));
  out[4 * n + i] = Bits(__hfma(x, y, z));
  out[5 * n + i] = (unsigned short)(__hlt(x, y) | (x == y) << 1 | __hgt(x, y) << 2);
  wide[i] = (float)x;
}
extern "C" __global__ void f16(const unsigned short* a, const unsigned short* b,
                               const unsigned short* c, unsigned short* out, float* wide, int n) {
  all<half, __ushort_as_half, __half_as_ushort>(a, b, c, out, wide, n,
                                                blockIdx.x * blockDim.x + threadIdx.x);
}
extern "C" __global__ void b16(const unsigned short* a, const unsigned short* b,
                               const unsigned short* c, unsigned short* out, float* wide, int n) {
  all<__nv_bfloat16, __ushort_as_bfloat16, __bfloat16_as_ushort>(
      a, b, c, out, wide, n, blockIdx.x * blockDim.x + threadIdx.x);
}
extern "C" __global__ void round_trip(const float* in, unsigned short* h, unsigned short* b,
                                      int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  h[i] = __half_as_ushort(__float2half_rn(in[i]));
  b[i] = __bfloat16_as_ushort(__float2bfloat16(in[i]));
}
"""


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bits, to nearest even; NaN excluded."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_half_arithmetic_is_correctly_rounded(soft):
    """half operations round once to nearest even, as NumPy's float16 does; fma is exact first."""
    module = soft.module(HALF)
    n = 40000
    a, b, c = (rng.integers(0, 0x10000, n, dtype=np.uint16) for _ in range(3))
    pointers = [soft.put(v) for v in (a, b, c)]
    out, wide = soft.alloc(12 * n), soft.alloc(4 * n)
    soft.run(soft.function(module, "f16"), (n + 255) // 256, 256, *pointers, out, wide, np.int32(n))
    got = soft.get(out, (6, n), np.uint16)
    x, y, z = (v.view(np.float16) for v in (a, b, c))
    with np.errstate(all="ignore"):
        # Longdouble holds the exact product and, for these exponents, the exact sum of the fma.
        exact = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)
        expected = [x + y, x - y, x * y, x / y, round_exact(exact)]
    for row, want in enumerate(expected):
        same = (got[row] == want.view(np.uint16)) | (
            np.isnan(got[row].view(np.float16)) & np.isnan(want)
        )
        assert same.all(), (row, a[~same][:3], b[~same][:3], c[~same][:3])
    order = (x < y).astype(int) | (x == y).astype(int) << 1 | (x > y).astype(int) << 2
    assert np.array_equal(got[5], order)
    value = soft.get(wide, n, np.float32)
    assert np.array_equal(np.nan_to_num(value), np.nan_to_num(x.astype(np.float32)))
    soft.free(*pointers, out, wide)
    soft.ok(soft.d.cuModuleUnload(module))


def round_exact(exact: np.ndarray) -> np.ndarray:
    """Round longdouble values to float16, skipping the double rounding of NumPy's own cast."""
    near = exact.astype(np.float16)
    up = np.nextafter(near, np.float16(np.inf))
    down = np.nextafter(near, np.float16(-np.inf))
    best = near.copy()
    for other in (up, down):
        closer = np.abs(other.astype(np.longdouble) - exact) < np.abs(
            best.astype(np.longdouble) - exact
        )
        tie = np.abs(other.astype(np.longdouble) - exact) == np.abs(
            best.astype(np.longdouble) - exact
        )
        even = (other.view(np.uint16) & 1) == 0
        usable = np.isfinite(other) & np.isfinite(near)
        best = np.where(usable & (closer | (tie & even)), other, best)
    return best


def test_bfloat16_arithmetic_rounds_once(soft):
    """bfloat16 sums and products equal the fp32 result rounded to nearest even."""
    module = soft.module(HALF)
    n = 20000
    values = [rng.standard_normal(n).astype(np.float32) for _ in range(3)]
    a, b, c = (round_to_bf16(v) for v in values)
    pointers = [soft.put(v) for v in (a, b, c)]
    out, wide = soft.alloc(12 * n), soft.alloc(4 * n)
    soft.run(soft.function(module, "b16"), (n + 255) // 256, 256, *pointers, out, wide, np.int32(n))
    got = soft.get(out, (6, n), np.uint16)
    x, y, z = ((v.astype(np.uint32) << 16).view(np.float32) for v in (a, b, c))
    for row, want in enumerate((x + y, x - y, x * y, x / y)):
        assert np.array_equal(got[row], round_to_bf16(want)), row
    exact = x.astype(np.float64) * y + z  # 16 bits of product, close exponents: exact in double
    fused = exact.astype(np.float32)
    assert (got[4] == round_to_bf16(fused)).mean() > 0.9999
    soft.free(*pointers, out, wide)
    soft.ok(soft.d.cuModuleUnload(module))


def test_float_to_half_conversions(soft):
    """fp32 to fp16 and bf16 rounds to nearest even over the whole range, subnormal halves too."""
    module = soft.module(HALF)
    bits = rng.integers(0, 2**32, 60000, dtype=np.uint64).astype(np.uint32)
    bits[:30000] = (bits[:30000] & 0x807FFFFF) | (
        (100 + rng.integers(0, 50, 30000)).astype(np.uint32) << 23
    )
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) > 1e-37), x, np.float32(1.5)).astype(np.float32)
    source, h, b = soft.put(x), soft.alloc(2 * x.size), soft.alloc(2 * x.size)
    soft.run(
        soft.function(module, "round_trip"),
        (x.size + 255) // 256,
        256,
        source,
        h,
        b,
        np.int32(x.size),
    )
    with np.errstate(over="ignore"):
        assert np.array_equal(soft.get(h, x.size, np.uint16), x.astype(np.float16).view(np.uint16))
    assert np.array_equal(soft.get(b, x.size, np.uint16), round_to_bf16(x))
    soft.free(source, h, b)
    soft.ok(soft.d.cuModuleUnload(module))


FLOATS = r"""
extern "C" __global__ void flush(const float* in, float* out) { out[0] = in[0] * 0.5f + in[1]; }
extern "C" __global__ void separate(const float* x, float* out) {
  out[0] = x[0] * x[1] + x[2];
  out[1] = fmaf(x[0], x[1], x[2]);
}
"""


def test_denormals_are_flushed_and_products_not_contracted(soft):
    """Workers flush denormals; only a written fmaf fuses."""
    module = soft.module(FLOATS)
    tiny = np.array([1.2e-38, 0.0], np.float32)
    out = soft.alloc(8)
    source = soft.put(tiny)
    soft.run(soft.function(module, "flush"), 1, 1, source, out)
    assert soft.get(out, 1, np.float32)[0] == 0.0
    x = np.array([1 + 2**-13, 1 - 2**-13, -1.0], np.float32)
    operands = soft.put(x)
    soft.run(soft.function(module, "separate"), 1, 1, operands, out)
    plain, fused = soft.get(out, 2, np.float32)
    assert plain == np.float32(x[0] * x[1]) + x[2]
    assert fused == np.float32(float(x[0]) * float(x[1]) - 1.0)
    assert plain != fused
    soft.free(out, source, operands)
    soft.ok(soft.d.cuModuleUnload(module))


VECTORS = r"""
extern "C" __global__ void vectors(const float* in, float* out, int* sizes) {
  const float4 v = reinterpret_cast<const float4*>(in)[threadIdx.x];
  reinterpret_cast<float4*>(out)[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
  if (threadIdx.x == 0) {
    sizes[0] = sizeof(float2) * 100 + alignof(float2);
    sizes[1] = sizeof(int4) * 100 + alignof(int4);
    sizes[2] = sizeof(uint3) * 100 + alignof(uint3);
    sizes[3] = sizeof(ulonglong2) * 100 + alignof(ulonglong2);
    sizes[4] = sizeof(uchar4) * 100 + alignof(uchar4);
  }
}
struct Pair { int a; double b; };
extern "C" __global__ void mixed(char a, double b, short c, int4 d, Pair e, float* out) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d.w; out[4] = e.b;
}
extern "C" __global__ void bits(const unsigned* in, unsigned* out) {
  out[0] = __popc(in[0]); out[1] = __ffs(in[1]); out[2] = __clz(in[2]); out[3] = __brev(in[3]);
  out[4] = __umulhi(in[4], in[5]); out[5] = __clz(0); out[6] = __float2int_rn(2.5f);
  out[7] = __float2int_rz(-3e10f); out[8] = __byte_perm(in[0], in[1], 0x7052);
}
"""


def test_vector_types_and_parameter_layout(soft):
    """Vector types have CUDA's sizes and alignments; parameters lie where the driver says."""
    module = soft.module(VECTORS)
    data = rng.standard_normal((8, 4)).astype(np.float32)
    source, out, sizes = soft.put(data), soft.alloc(data.nbytes), soft.alloc(20)
    soft.run(soft.function(module, "vectors"), 1, 8, source, out, sizes)
    assert np.array_equal(soft.get(out, data.shape, np.float32), data[:, ::-1])
    assert soft.get(sizes, 5, np.int32).tolist() == [808, 1616, 1204, 1616, 404]
    mixed = soft.function(module, "mixed")
    layout = [soft.ok(soft.d.cuFuncGetParamInfo(mixed, i)) for i in range(6)]
    assert [tuple(map(int, item)) for item in layout] == [
        (0, 1),
        (8, 8),
        (16, 2),
        (32, 16),
        (48, 16),
        (64, 8),
    ]
    assert int(soft.ok(soft.d.cuFuncGetParamCount(mixed))) == 6
    pair = np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [0, 8]}))
    pair["b"] = 2.25
    soft.run(
        mixed,
        1,
        1,
        np.int8(-3),
        np.float64(0.5),
        np.int16(-7),
        np.array([1, 2, 3, 4], np.int32),
        pair,
        out,
    )
    assert soft.get(out, 5, np.float32).tolist() == [-3.0, 0.5, -7.0, 4.0, 2.25]
    soft.free(source, out, sizes)
    soft.ok(soft.d.cuModuleUnload(module))


def test_integer_intrinsics(soft):
    """Bit intrinsics and saturating conversions answer as CUDA documents them."""
    module = soft.module(VECTORS)
    words = np.array([0xF0F00001, 0x40, 0x1000, 0x80000001, 0xFFFFFFFF, 0x10], np.uint32)
    source, out = soft.put(words), soft.alloc(36)
    soft.run(soft.function(module, "bits"), 1, 1, source, out)
    assert soft.get(out, 9, np.uint32).tolist() == [
        9,
        7,
        19,
        0x80000001,
        0xF,
        32,
        2,
        0x80000000,
        0x000100F0,
    ]
    soft.free(source, out)
    soft.ok(soft.d.cuModuleUnload(module))


# ---- compilation ------------------------------------------------------------------------------
def error(source: str) -> str:
    with pytest.raises(util.compile_module().KernelCompileError) as caught:
        util.compile_kernel(source, "bad.cu")
    assert caught.value.name == "bad.cu"
    return str(caught.value)


def test_compile_errors_name_the_text_and_line():
    """A syntax error carries the kernel text's name and its own line number."""
    assert "bad.cu:2" in error('extern "C" __global__ void f(int* p) {\n  *p = missing;\n}\n')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__device__ int state;", "state"),
        ("__constant__ float table[4];", "constant_memory"),
        ("__device__ int bump() { static int n = 0; return ++n; }", "static"),
        ("extern __shared__ float s[];", "inside a function"),
    ],
)
def test_state_outside_parameters_is_refused(text, words):
    """Device globals, constants and statics would exist once per worker, so they are refused."""
    assert words in error(text + '\nextern "C" __global__ void f(int* p) { *p = 1; }\n')


def test_static_shared_memory_is_limited():
    """More than 48 KiB of declared shared memory is refused, as GPU compilers do."""
    body = "__shared__ float s[12289]; s[p[0]] = 1; __syncthreads(); p[1] = (int)s[p[2]];"
    message = error('extern "C" __global__ void big(int* p) {' + body + "}")
    assert "'big' declares 49156 bytes" in message


def test_text_without_an_entry_is_refused():
    """A text that exports no kernel is an error, not an empty module."""
    assert "__global__" in error("__device__ int f() { return 1; }")


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
    module = soft.module(source, **options)
    out = soft.alloc(4)
    soft.run(soft.function(module, "make_float"), 1, 1, out)
    assert soft.get(out, 1, np.float32)[0] == 21.0
    (tmp_path / "deep.cuh").write_text("#define FACTOR 5\n")
    again = soft.module(source, **options)
    soft.run(soft.function(again, "make_int"), 1, 1, out)
    assert soft.get(out, 1, np.int32)[0] == 35, "the cache missed a changed include"
    soft.free(out)
    for item in (module, again):
        soft.ok(soft.d.cuModuleUnload(item))


def _compile_in(folder: str) -> int:
    text = 'extern "C" __global__ void f(int* p) { *p = 1; }'
    return len(util.compile_module().compile_cpu(text, "p.cu", cache_dir=Path(folder)))


def test_concurrent_processes_share_the_cache(tmp_path):
    """Processes that compile one text at once all get a whole image."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sizes = pool.map(_compile_in, [str(tmp_path)] * 6)
    assert len(set(sizes)) == 1
    assert [p.suffix for p in tmp_path.iterdir()] == [".so"]
