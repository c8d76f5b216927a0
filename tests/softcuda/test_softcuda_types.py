"""Types, arithmetic and parameter layout of kernels on the soft device."""

from __future__ import annotations

import numpy as np
import pytest

rng = np.random.default_rng(7)

TEXT = r"""
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
#define MAKE(name, type, make, bits) \
  extern "C" __global__ void name( \
      const unsigned short* a, const unsigned short* b, const unsigned short* c, \
      unsigned short* out, float* wide, int n) { \
    all<type, make, bits>(a, b, c, out, wide, n, blockIdx.x * blockDim.x + threadIdx.x); \
  }
MAKE(f16, half, __ushort_as_half, __half_as_ushort)
MAKE(b16, __nv_bfloat16, __ushort_as_bfloat16, __bfloat16_as_ushort)
extern "C" __global__ void round_trip(const float* in, unsigned short* h, unsigned short* b,
                                      int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  h[i] = __half_as_ushort(__float2half_rn(in[i]));
  b[i] = __bfloat16_as_ushort(__float2bfloat16(in[i]));
}

extern "C" __global__ void flush(const float* in, float* out) { out[0] = in[0] * 0.5f + in[1]; }
extern "C" __global__ void separate(const float* x, float* out) {
  out[0] = x[0] * x[1] + x[2];
  out[1] = fmaf(x[0], x[1], x[2]);
}

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


@pytest.fixture
def kernels(soft):
    return soft.kernels(TEXT)


def arithmetic(soft, kernel, *operands):
    """Run a kernel that computes several 16-bit operations on the same operands.

    Return an array with one row of 16-bit results per operation, and the first operand converted to
    fp32.
    """
    n = operands[0].size
    wide = soft.alloc(4 * n)
    got = soft.results(
        (6, n),
        np.uint16,
        kernel,
        (n + 255) // 256,
        256,
        *map(soft.put, operands),
        None,
        wide,
        np.int32(n),
    )
    return got, soft.get(wide, n, np.float32)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 values to nearest even and return bfloat16 bits. NaN is not supported."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_half_arithmetic_is_correctly_rounded(soft, kernels):
    """Each half operation rounds its exact result once to nearest even, as NumPy's float16 does.

    __hfma rounds only after the addition and not after the multiplication.
    """
    a, b, c = (rng.integers(0, 0x10000, 40000, dtype=np.uint16) for _ in range(3))
    got, value = arithmetic(soft, kernels.f16, a, b, c)
    x, y, z = (v.view(np.float16) for v in (a, b, c))
    with np.errstate(all="ignore"):
        # The product and, for these exponents, the sum of the fma are exact in longdouble.
        exact = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)
        expected = [x + y, x - y, x * y, x / y, round_exact(exact)]
    for row, values in enumerate(expected):
        nan = np.isnan(got[row].view(np.float16)) & np.isnan(values)
        wrong = (got[row] != values.view(np.uint16)) & ~nan
        assert not wrong.any(), (row, a[wrong][:3], b[wrong][:3], c[wrong][:3])
    order = 1 * (x < y) + 2 * (x == y) + 4 * (x > y)
    assert np.array_equal(got[5], order)
    assert np.array_equal(np.nan_to_num(value), np.nan_to_num(x.astype(np.float32)))


def round_exact(exact: np.ndarray) -> np.ndarray:
    """Round longdouble values to float16 without the double rounding of NumPy's cast."""
    nearest = exact.astype(np.float16)
    best = nearest.copy()
    for direction in (np.inf, -np.inf):
        neighbour = np.nextafter(nearest, np.float16(direction))
        neighbour_error = np.abs(neighbour.astype(np.longdouble) - exact)
        best_error = np.abs(best.astype(np.longdouble) - exact)
        even = (neighbour.view(np.uint16) & 1) == 0
        finite = np.isfinite(neighbour) & np.isfinite(nearest)
        closer = (neighbour_error < best_error) | ((neighbour_error == best_error) & even)
        best = np.where(finite & closer, neighbour, best)
    return best


def test_bfloat16_arithmetic_rounds_fp32_results_once(soft, kernels):
    a, b, c = (round_to_bf16(rng.standard_normal(20000).astype(np.float32)) for _ in range(3))
    got, _ = arithmetic(soft, kernels.b16, a, b, c)
    x, y, z = ((v.astype(np.uint32) << 16).view(np.float32) for v in (a, b, c))
    for row, values in enumerate((x + y, x - y, x * y, x / y)):
        assert np.array_equal(got[row], round_to_bf16(values)), row
    # The sum is exact in double, because the product has 16 bits and the exponents are close.
    exact = x.astype(np.float64) * y + z
    fused = exact.astype(np.float32)
    assert (got[4] == round_to_bf16(fused)).mean() > 0.9999


def test_float_to_16_bit_conversions_round_to_nearest_even(soft, kernels):
    """Conversions of fp32 to half and bfloat16 round to nearest even.

    The inputs cover the whole range of exponents, including values that become subnormal halves.
    """
    bits = rng.integers(0, 2**32, 60000, dtype=np.uint64).astype(np.uint32)
    exponents = (100 + rng.integers(0, 50, 30000)).astype(np.uint32)
    bits[:30000] = (bits[:30000] & 0x807FFFFF) | exponents << 23
    x = bits.view(np.float32)
    normal = np.isfinite(x) & (np.abs(x) > 1e-37)  # the device flushes denormal floats
    x = np.where(normal, x, np.float32(1.5)).astype(np.float32)
    h = soft.alloc(2 * x.size)
    b = soft.results(
        x.size,
        np.uint16,
        kernels.round_trip,
        (x.size + 255) // 256,
        256,
        soft.put(x),
        h,
        None,
        np.int32(x.size),
    )
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(soft.get(h, x.size, np.uint16), expected)
    assert np.array_equal(b, round_to_bf16(x))


def test_float_arithmetic_flushes_denormals_and_does_not_contract(soft, kernels):
    """Denormals are flushed to zero. A multiplication and an addition are fused only by fmaf."""
    tiny = soft.put([1.2e-38, 0.0], np.float32)
    assert soft.results(1, np.float32, kernels.flush, 1, 1, tiny, None) == [0.0]
    x = np.array([1 + 2**-13, 1 - 2**-13, -1.0], np.float32)
    plain, fused = soft.results(2, np.float32, kernels.separate, 1, 1, soft.put(x), None)
    assert plain == np.float32(x[0] * x[1]) + x[2] != fused
    assert fused == np.float32(float(x[0]) * float(x[1]) - 1.0)


def test_vector_types_and_parameters_have_cuda_layout(soft, kernels):
    """Vector types and kernel parameters have the sizes and alignments that CUDA defines."""
    data = rng.standard_normal((8, 4)).astype(np.float32)
    sizes = soft.alloc(20)
    out = soft.results((8, 4), np.float32, kernels.vectors, 1, 8, soft.put(data), None, sizes)
    assert np.array_equal(out, data[:, ::-1])
    assert soft.get(sizes, 5, np.int32).tolist() == [808, 1616, 1204, 1616, 404]
    mixed = kernels.mixed
    layout = [soft.cuFuncGetParamInfo(mixed, i) for i in range(6)]
    assert [tuple(map(int, item)) for item in layout] == [
        (0, 1),
        (8, 8),
        (16, 2),
        (32, 16),
        (48, 16),
        (64, 8),
    ]
    assert int(soft.cuFuncGetParamCount(mixed)) == 6
    pair = np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [0, 8]}))
    pair["b"] = 2.25
    four = np.array([1, 2, 3, 4], np.int32)
    out = soft.results(
        5, np.float32, mixed, 1, 1, np.int8(-3), np.float64(0.5), np.int16(-7), four, pair, None
    )
    assert out.tolist() == [-3.0, 0.5, -7.0, 4.0, 2.25]


def test_integer_intrinsics_and_conversions_match_documentation(soft, kernels):
    words = soft.put([0xF0F00001, 0x40, 0x1000, 0x80000001, 0xFFFFFFFF, 0x10], np.uint32)
    assert soft.results(9, np.uint32, kernels.bits, 1, 1, words, None).tolist() == [
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
