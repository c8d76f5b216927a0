// RMSNorm of rows, y_i = x_i / sqrt(mean(x^2) + eps) * weight_i (Zhang and Sennrich, 2019). A row
// is computed by one block of NORM_THREADS threads; on the soft device NORM_THREADS is 1.
#include "model.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#ifndef OUT
#define OUT float
#endif
#ifndef NORM_THREADS
#define NORM_THREADS 256
#endif
#define NORM_LANES 32

// inverse_rms returns 1 / sqrt(mean(x^2) + eps) of a row, with the same bits in all threads of the
// block.
#if NORM_THREADS == 1
// Reduction order: partial sum i adds indices i, i + NORM_LANES, ...; the partial sums are then
// added as a tree.
template <typename T>
__device__ __forceinline__ float inverse_rms(const T* x, int width, float eps) {
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
#else
// Reduction order: thread i adds indices i, i + NORM_THREADS, ...; then the sums of the lanes of
// each warp are added, and then the sums of the warps.
template <typename T>
__device__ __forceinline__ float inverse_rms(const T* x, int width, float eps) {
  __shared__ float of_warp[NORM_THREADS / 32];
  float sum = 0.0f;
  for (int k = threadIdx.x; k < width; k += NORM_THREADS) {
    const float v = to_float(x[k]);
    sum = fmaf(v, v, sum);
  }
  sum = warp_sum(sum);
  __syncthreads();  // other threads may still read of_warp for the previous row
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < NORM_THREADS / 32; ++w) total += of_warp[w];
  return 1.0f / sqrtf(total / static_cast<float>(width) + eps);
}
#endif

// Computes the RMSNorm of one row with all threads of the block.
template <typename T, typename Y>
__device__ __forceinline__ void norm_row(const T* x, const float* weight, Y* y, int width,
                                         float eps) {
  const float inverse = inverse_rms(x, width, eps);
  for (int k = threadIdx.x; k < width; k += NORM_THREADS) {
    from_float(to_float(x[k]) * inverse * weight[k], y + k);
  }
}

// Computes the RMSNorm of every row; one block per row.
extern "C" __global__ void norm_rows(const float* x, const float* weight, OUT* y, int rows,
                                     int width, float eps) {
  wait_for_previous_kernel();
  const int row = blockIdx.x;
  const long long at = static_cast<long long>(row) * width;
  if (row < rows) norm_row(x + at, weight, y + at, width, eps);
}

// Computes out[r] = x[index[r]] and y = norm(out). An index out of range gives zeros.
extern "C" __global__ void gather_norm(const WEIGHT* x, const int* index, float* out,
                                       const float* weight, OUT* y, int rows, int width,
                                       float eps) {
  wait_for_previous_kernel();
  const int from = index[blockIdx.x];
  const bool known = from >= 0 && from < rows;
  const WEIGHT* row = x + static_cast<long long>(known ? from : 0) * width;
  const long long at = static_cast<long long>(blockIdx.x) * width;
  for (int k = threadIdx.x; k < width; k += NORM_THREADS) {
    out[at + k] = known ? to_float(row[k]) : 0.0f;
  }
  norm_row(out + at, weight, y + at, width, eps);  // no barrier: threads read only their own data
}

// Computes the norm of every query head and key head of `qkv` in place, with one block per head.
extern "C" __global__ void head_norm(float* qkv, const float* query_weight, const float* key_weight,
                                     int rows, int heads, int kv_heads, int head_dim, float eps) {
  wait_for_previous_kernel();
  const int row = blockIdx.x / (heads + kv_heads);
  const int head = blockIdx.x % (heads + kv_heads);
  if (row >= rows) return;
  float* x = qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * head_dim;
  norm_row(x, head < heads ? query_weight : key_weight, x, head_dim, eps);
}

// Computes the input of an EAGLE head, x = [norm(table[token]), norm(hidden)] for each row. A token
// out of range gives zeros instead of its embedding. Sets `residual` to `hidden`, or to
// norm(hidden) if norm_before_residual is not 0. `hidden` and `residual` may be the same array.
extern "C" __global__ void eagle_input(const WEIGHT* table, const int* token, const float* hidden,
                                       const float* embedding_norm, const float* hidden_norm,
                                       float* x, float* residual, int rows, int vocab, int width,
                                       float eps, int norm_before_residual) {
  wait_for_previous_kernel();
  const int row = blockIdx.x;
  if (row >= rows) return;
  const int id = token[row];
  float* embedded = x + static_cast<long long>(row) * 2 * width;
  float* normed = embedded + width;
  if (id >= 0 && id < vocab) {
    norm_row(table + static_cast<long long>(id) * width, embedding_norm, embedded, width, eps);
  } else {
    for (int k = threadIdx.x; k < width; k += NORM_THREADS) embedded[k] = 0.0f;
  }
  const long long at = static_cast<long long>(row) * width;
  norm_row(hidden + at, hidden_norm, normed, width, eps);
  for (int k = threadIdx.x; k < width; k += NORM_THREADS) {
    residual[at + k] = norm_before_residual ? normed[k] : hidden[at + k];
  }
}
