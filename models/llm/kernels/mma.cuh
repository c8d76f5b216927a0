// Wrappers of the tensor-core instruction mma.m16n8k16 and of the loads around it. Each has a
// portable implementation for the soft device.
#pragma once
#include "graft.cuh"

#ifdef __SOFTCUDA__
#pragma softcuda quick  // compile faster: on the soft device, only tests run these kernels
#endif

template <typename T>
struct IsBf16 {
  static constexpr bool value = false;
};
template <>
struct IsBf16<bf16_t> {
  static constexpr bool value = true;
};

struct alignas(16) Pack16 {
  unsigned int u[4];  // eight 16-bit floats
};

struct alignas(8) Pack8 {
  unsigned int u[2];  // eight 8-bit floats or four 16-bit floats
};

struct alignas(16) Floats4 {
  float f[4];
};

// Rounds two floats to the 16-bit type T (nearest even) and packs them, `low` in the lower 16 bits.
template <typename T>
__device__ __forceinline__ unsigned int pack_pair(float low, float high) {
#ifdef __CUDA_ARCH__
  unsigned int pair;
  if constexpr (IsBf16<T>::value) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  T a, b;
  from_float(low, &a);
  from_float(high, &b);
  return a.bits | static_cast<unsigned int>(b.bits) << 16;
#endif
}

// Returns the low (0) or high (1) value of a packed pair.
template <typename T>
__device__ __forceinline__ float half_of(unsigned int pair, int which) {
  T value;
  value.bits = static_cast<unsigned short>(pair >> (16 * which));
  return to_float(value);
}

// The overloads of widen convert eight weights to the 16-bit type in which they are multiplied. All
// E4M3 values except NaN are exact in bfloat16.
__device__ __forceinline__ Pack16 widen(const Pack16& pack) { return pack; }

__device__ __forceinline__ Pack16 widen(const Pack8& pack) {
  Pack16 wide;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#ifdef __CUDA_ARCH__
    // The 4-bit exponent is placed in an 8-bit field, which scales the value by 2^-120. This holds
    // for subnormal values too. The multiplication by 2^120 is exact.
    const unsigned int two = __byte_perm(pack.u[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(wide.u[i])
        : "r"((two & 0x80008000u) | (two >> 4 & 0x07f007f0u)), "r"(0x7b807b80u), "r"(0x80008000u));
#else
    const unsigned int two = pack.u[i / 2] >> i % 2 * 16;
    const e4m3_t low = {static_cast<unsigned char>(two)};
    const e4m3_t high = {static_cast<unsigned char>(two >> 8)};
    wide.u[i] = pack_pair<bf16_t>(to_float(low), to_float(high));
#endif
  }
  return wide;
}

#ifndef __CUDA_ARCH__
#define MMA_WARPS 32
// The parts of the mma operands A and B that each lane of a warp holds.
struct MmaLanes {
  unsigned int a[32][4];
  unsigned int b[32][2];
};

template <typename T>
__device__ __noinline__ void mma_portable(float* d, const unsigned int* a, const unsigned int* b) {
  __shared__ MmaLanes of_warp[MMA_WARPS];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  MmaLanes& fragments = of_warp[threadIdx.x / 32];
  __syncwarp();  // other threads may still read the fragments of the previous step
  for (int i = 0; i < 4; ++i) fragments.a[lane][i] = a[i];
  for (int i = 0; i < 2; ++i) fragments.b[lane][i] = b[i];
  __syncwarp();
  for (int k = 0; k < 16; ++k) {
    const int from = k / 2 % 4, high = k / 8;
    for (int i = 0; i < 4; ++i) {
      const float x = half_of<T>(fragments.a[g * 4 + from][2 * high + i / 2], k % 2);
      const float y = half_of<T>(fragments.b[(2 * t + i % 2) * 4 + from][high], k % 2);
      d[i] = fmaf(x, y, d[i]);
    }
  }
}
#endif

// d += A B with A 16 x 16 and B 16 x 8 of type T. Lane 4 g + t holds these fragments, two values of
// A or B per register:
//
// - A: rows g, g + 8 of columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3])
// - B: rows 2t, 2t + 1 (b[0]) and 2t + 8, 2t + 9 (b[1]) of column g
// - d: columns 2t, 2t + 1 of rows g (d[0], d[1]) and g + 8 (d[2], d[3])
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float* d, const unsigned int* a,
                                             const unsigned int* b) {
#ifdef __CUDA_ARCH__
#define MMA_M16N8K16(TYPE)                                                  \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (IsBf16<T>::value) {
    MMA_M16N8K16("bf16");
  } else {
    MMA_M16N8K16("f16");
  }
#undef MMA_M16N8K16
#else
  mma_portable<T>(d, a, b);
#endif
}

// Loads eight weights. The load bypasses L1, because each weight is read once. It is not a .nc
// load, because ptxas may move such loads after griddepcontrol.wait.
template <typename T>
__device__ __forceinline__ Pack16 load_weight(const T* from) {
#ifdef __CUDA_ARCH__
  Pack16 p;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(p.u[0]), "=r"(p.u[1]), "=r"(p.u[2]), "=r"(p.u[3])
               : "l"(from));
  return p;
#else
  return *reinterpret_cast<const Pack16*>(from);
#endif
}

__device__ __forceinline__ Pack8 load_weight(const e4m3_t* from) {
#ifdef __CUDA_ARCH__
  Pack8 p;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];"
               : "=r"(p.u[0]), "=r"(p.u[1])
               : "l"(from));
  return p;
#else
  return *reinterpret_cast<const Pack8*>(from);
#endif
}

// Starts an asynchronous copy of 16 bytes from global to shared memory, bypassing L1 and registers.
// The data is visible after wait_copies and a barrier.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  const unsigned int at = static_cast<unsigned int>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(from)
               : "memory");
#else
  *static_cast<Pack16*>(to) = *static_cast<const Pack16*>(from);
#endif
}

// Commits the copies started since the last call as a group, which may be empty.
__device__ __forceinline__ void commit_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the COUNT most recent groups of copies of the thread are in flight.
template <int COUNT>
__device__ __forceinline__ void wait_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
#endif
}

// Loads four 8 x 8 matrices of 16-bit values from shared memory and transposes them. Lane 8 m + r
// passes the address of row r of matrix m, a Pack16. u[m], in lane 4 g + t, has the values in
// column g of rows 2t and 2t + 1 of matrix m.
__device__ __forceinline__ Pack16 load_transposed(const Pack16* row) {
  Pack16 columns;
#ifdef __CUDA_ARCH__
  const unsigned int at = static_cast<unsigned int>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(columns.u[0]), "=r"(columns.u[1]), "=r"(columns.u[2]), "=r"(columns.u[3])
               : "r"(at)
               : "memory");
#else
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int m = 0; m < 4; ++m) {
    const Pack16* const low = __shfl_sync(FULL_WARP, row, 8 * m + 2 * t);
    const Pack16* const high = __shfl_sync(FULL_WARP, row, 8 * m + 2 * t + 1);
    const int shift = g % 2 * 16;
    columns.u[m] = (low->u[g / 2] >> shift & 0xffffu) | (high->u[g / 2] >> shift & 0xffffu) << 16;
  }
#endif
  return columns;
}
