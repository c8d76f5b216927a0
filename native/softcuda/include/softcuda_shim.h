// Included before each kernel source that is compiled for the soft device. Declares the CUDA C++
// keywords, types and functions that kernels use. It includes no standard header, so that a kernel
// compiles in well under 1 s.
#pragma once

#define SOFTCUDA_SHIM 1
#include "softcuda_abi.h"

#ifndef __SOFTCUDA__
#error "compile kernels with softcuda/compile.py, which defines __SOFTCUDA__"
#endif

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
// Each worker has its own copy of the image and runs one block at a time, so a static variable is
// shared by exactly the threads of a block (INVARIANTS.md K1).
#define __shared__ static
#define __align__(n) alignas(n)
#define __grid_constant__
#define __launch_bounds__(...)
// Not supported, because such a variable would exist once per worker (INVARIANTS.md K4). The
// compiler's message contains the name below.
#define __constant__ SOFTCUDA_ERROR_constant_memory_is_not_supported_pass_it_as_a_parameter
#define __managed__ SOFTCUDA_ERROR_managed_memory_is_not_supported

static softcuda_block softcuda_self;
static const softcuda_hooks* softcuda_hook;

#define threadIdx (softcuda_self.thread_idx)
#define blockIdx (softcuda_self.block_idx)
#define blockDim (softcuda_self.block_dim)
#define gridDim (softcuda_self.grid_dim)
#define warpSize 32

typedef decltype(sizeof(0)) size_t;

// The order matters: each header uses the ones before it.
// clang-format off
#include "softcuda_vector.h"
#include "softcuda_math.h"
#include "softcuda_atomic.h"
#include "softcuda_warp.h"
#include "softcuda_conditional.h"
#include "softcuda_entry.h"
// clang-format on
