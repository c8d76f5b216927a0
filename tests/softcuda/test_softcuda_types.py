"""What types and arithmetic of a kernel text mean on the soft device."""

from __future__ import annotations

import numpy as np

rng = np.random.default_rng(7)


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
    kernels = soft.kernels(HALF)
    n = 40000
    a, b, c = (rng.integers(0, 0x10000, n, dtype=np.uint16) for _ in range(3))
    pointers = [soft.put(v) for v in (a, b, c)]
    out, wide = soft.alloc(12 * n), soft.alloc(4 * n)
    soft.run(kernels.f16, (n + 255) // 256, 256, *pointers, out, wide, np.int32(n))
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


def round_exact(exact: np.ndarray) -> np.ndarray:
    """Round longdouble values to float16, skipping the double rounding of NumPy's own cast."""
    near = exact.astype(np.float16)
    up = np.nextafter(near, np.float16(np.inf))
    down = np.nextafter(near, np.float16(-np.inf))
    best = near.copy()
    for other in (up, down):
        there, here = (np.abs(v.astype(np.longdouble) - exact) for v in (other, best))
        even = (other.view(np.uint16) & 1) == 0
        usable = np.isfinite(other) & np.isfinite(near)
        best = np.where(usable & ((there < here) | ((there == here) & even)), other, best)
    return best


def test_bfloat16_arithmetic_rounds_once(soft):
    """bfloat16 sums and products equal the fp32 result rounded to nearest even."""
    kernels = soft.kernels(HALF)
    n = 20000
    values = [rng.standard_normal(n).astype(np.float32) for _ in range(3)]
    a, b, c = (round_to_bf16(v) for v in values)
    pointers = [soft.put(v) for v in (a, b, c)]
    out, wide = soft.alloc(12 * n), soft.alloc(4 * n)
    soft.run(kernels.b16, (n + 255) // 256, 256, *pointers, out, wide, np.int32(n))
    got = soft.get(out, (6, n), np.uint16)
    x, y, z = ((v.astype(np.uint32) << 16).view(np.float32) for v in (a, b, c))
    for row, want in enumerate((x + y, x - y, x * y, x / y)):
        assert np.array_equal(got[row], round_to_bf16(want)), row
    exact = x.astype(np.float64) * y + z  # 16 bits of product, close exponents: exact in double
    fused = exact.astype(np.float32)
    assert (got[4] == round_to_bf16(fused)).mean() > 0.9999


def test_float_to_half_conversions(soft):
    """fp32 to fp16 and bf16 rounds to nearest even over the whole range, subnormal halves too."""
    kernels = soft.kernels(HALF)
    bits = rng.integers(0, 2**32, 60000, dtype=np.uint64).astype(np.uint32)
    bits[:30000] = (bits[:30000] & 0x807FFFFF) | (
        (100 + rng.integers(0, 50, 30000)).astype(np.uint32) << 23
    )
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) > 1e-37), x, np.float32(1.5)).astype(np.float32)
    source, h, b = soft.put(x), soft.alloc(2 * x.size), soft.alloc(2 * x.size)
    soft.run(kernels.round_trip, (x.size + 255) // 256, 256, source, h, b, np.int32(x.size))
    with np.errstate(over="ignore"):
        assert np.array_equal(soft.get(h, x.size, np.uint16), x.astype(np.float16).view(np.uint16))
    assert np.array_equal(soft.get(b, x.size, np.uint16), round_to_bf16(x))


FLOATS = r"""
extern "C" __global__ void flush(const float* in, float* out) { out[0] = in[0] * 0.5f + in[1]; }
extern "C" __global__ void separate(const float* x, float* out) {
  out[0] = x[0] * x[1] + x[2];
  out[1] = fmaf(x[0], x[1], x[2]);
}
"""


def test_denormals_are_flushed_and_products_not_contracted(soft):
    """Workers flush denormals; only a written fmaf fuses."""
    kernels = soft.kernels(FLOATS)
    tiny = np.array([1.2e-38, 0.0], np.float32)
    out = soft.alloc(8)
    source = soft.put(tiny)
    soft.run(kernels.flush, 1, 1, source, out)
    assert soft.get(out, 1, np.float32)[0] == 0.0
    x = np.array([1 + 2**-13, 1 - 2**-13, -1.0], np.float32)
    operands = soft.put(x)
    soft.run(kernels.separate, 1, 1, operands, out)
    plain, fused = soft.get(out, 2, np.float32)
    assert plain == np.float32(x[0] * x[1]) + x[2]
    assert fused == np.float32(float(x[0]) * float(x[1]) - 1.0)
    assert plain != fused


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
    kernels = soft.kernels(VECTORS)
    data = rng.standard_normal((8, 4)).astype(np.float32)
    source, out, sizes = soft.put(data), soft.alloc(data.nbytes), soft.alloc(20)
    soft.run(kernels.vectors, 1, 8, source, out, sizes)
    assert np.array_equal(soft.get(out, data.shape, np.float32), data[:, ::-1])
    assert soft.get(sizes, 5, np.int32).tolist() == [808, 1616, 1204, 1616, 404]
    mixed = kernels.mixed
    layout = [soft.cuFuncGetParamInfo(mixed, i) for i in range(6)]
    assert [tuple(map(int, item)) for item in layout] == [
        (0, 1), (8, 8), (16, 2), (32, 16), (48, 16), (64, 8)]  # fmt: skip
    assert int(soft.cuFuncGetParamCount(mixed)) == 6
    pair = np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [0, 8]}))
    pair["b"] = 2.25
    four = np.array([1, 2, 3, 4], np.int32)
    soft.run(mixed, 1, 1, np.int8(-3), np.float64(0.5), np.int16(-7), four, pair, out)
    assert soft.get(out, 5, np.float32).tolist() == [-3.0, 0.5, -7.0, 4.0, 2.25]


def test_integer_intrinsics(soft):
    """Bit intrinsics and saturating conversions answer as CUDA documents them."""
    kernels = soft.kernels(VECTORS)
    words = np.array([0xF0F00001, 0x40, 0x1000, 0x80000001, 0xFFFFFFFF, 0x10], np.uint32)
    source, out = soft.put(words), soft.alloc(36)
    soft.run(kernels.bits, 1, 1, source, out)
    assert soft.get(out, 9, np.uint32).tolist() == [
        9, 7, 19, 0x80000001, 0xF, 32, 2, 0x80000000, 0x000100F0]  # fmt: skip
