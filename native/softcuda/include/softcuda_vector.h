// CUDA's vector types with their documented alignments, and the functions make_<type>.
#pragma once

typedef softcuda_dim3 uint3;
typedef softcuda_dim3 dim3;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

// The types have the attribute may_alias, because kernels access arrays of float through float4
// pointers.
#define SOFTCUDA_VECTOR2(name, type)                                  \
  struct __attribute__((may_alias, aligned(2 * sizeof(type)))) name { \
    type x, y;                                                        \
  };                                                                  \
  static inline name make_##name(type x, type y) { return name{x, y}; }
#define SOFTCUDA_VECTOR3(name, type)       \
  struct __attribute__((may_alias)) name { \
    type x, y, z;                          \
  };                                       \
  static inline name make_##name(type x, type y, type z) { return name{x, y, z}; }
#define SOFTCUDA_VECTOR4(name, type, align)                \
  struct __attribute__((may_alias, aligned(align))) name { \
    type x, y, z, w;                                       \
  };                                                       \
  static inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }

SOFTCUDA_VECTOR2(char2, signed char)
SOFTCUDA_VECTOR2(uchar2, unsigned char)
SOFTCUDA_VECTOR2(short2, short)
SOFTCUDA_VECTOR2(ushort2, unsigned short)
SOFTCUDA_VECTOR2(int2, int)
SOFTCUDA_VECTOR2(uint2, unsigned int)
SOFTCUDA_VECTOR2(longlong2, long long)
SOFTCUDA_VECTOR2(ulonglong2, unsigned long long)
SOFTCUDA_VECTOR2(float2, float)
SOFTCUDA_VECTOR2(double2, double)
SOFTCUDA_VECTOR3(int3, int)
SOFTCUDA_VECTOR3(float3, float)
SOFTCUDA_VECTOR4(char4, signed char, 4)
SOFTCUDA_VECTOR4(uchar4, unsigned char, 4)
SOFTCUDA_VECTOR4(short4, short, 8)
SOFTCUDA_VECTOR4(ushort4, unsigned short, 8)
SOFTCUDA_VECTOR4(int4, int, 16)
SOFTCUDA_VECTOR4(uint4, unsigned int, 16)
SOFTCUDA_VECTOR4(float4, float, 16)

static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return uint3{x, y, z}; }
