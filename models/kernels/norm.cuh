// RMSNorm of one row: y_i = x_i / sqrt(mean(x^2) + eps) * weight_i (Zhang and Sennrich, 2019).
#pragma once
#include "vector_math.cuh"

#define NORM_LANES 32
#define NORM_THREADS 256

// 1 / rms of a row, by one thread; partial i takes indices i, i + NORM_LANES, ... in order.
template <typename T>
__device__ __forceinline__ float inverse_rms_thread(const T* x, int width, float eps) {
  float partial[NORM_LANES] = {};
  int k = 0;
  for (; k + NORM_LANES <= width; k += NORM_LANES) {
#pragma unroll
    for (int i = 0; i < NORM_LANES; ++i) {
      const float v = to_float(x[k + i]);
      partial[i] = fmaf(v, v, partial[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < NORM_LANES; ++i) {
    if (k + i < width) {
      const float v = to_float(x[k + i]);
      partial[i] = fmaf(v, v, partial[i]);
    }
  }
  return 1.0f / sqrtf(tree_sum<NORM_LANES>(partial) / static_cast<float>(width) + eps);
}

// 1 / rms of a row, by a block of NORM_THREADS; every thread receives the same bits.
template <typename T>
__device__ __forceinline__ float inverse_rms_block(const T* x, int width, float eps) {
  __shared__ float of_warp[NORM_THREADS / 32];
  float sum = 0.0f;
  for (int k = threadIdx.x; k < width; k += NORM_THREADS) {
    const float v = to_float(x[k]);
    sum = fmaf(v, v, sum);
  }
  sum = warp_sum(sum);
  __syncthreads();  // the row before may still be read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < NORM_THREADS / 32; ++w) total += of_warp[w];
  return 1.0f / sqrtf(total / static_cast<float>(width) + eps);
}

// Normalises elements first, first + step, ... of a row.
template <typename T>
__device__ __forceinline__ void scale_row(const T* x, const float* weight, float* y, int width,
                                          float inverse, int first, int step) {
  for (int k = first; k < width; k += step) y[k] = to_float(x[k]) * inverse * weight[k];
}
