// Input of an EAGLE-3 layer: x = [norm(embedding of the token), norm(g)], and the residual stream,
// which is g, or norm(g) where the head says so. `g` may be the stream itself.
#pragma once
#include "norm.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif

struct EagleInput {
  const WEIGHT* table;
  const float* embedding_norm;
  const float* hidden_norm;
  float* x;
  float* stream;
  int vocab;
  int width;
  float eps;
  int norm_before_residual;
};

// Writes elements first, first + step, ... of a row; `embedding` is null for a token out of range.
__device__ __forceinline__ void write_eagle_row(const EagleInput& to, const WEIGHT* embedding,
                                                const float* g, float embedding_inverse,
                                                float hidden_inverse, long long row, int first,
                                                int step) {
  float* x = to.x + row * 2 * to.width;
  float* stream = to.stream + row * to.width;
  if (embedding != nullptr) {
    scale_row(embedding, to.embedding_norm, x, to.width, embedding_inverse, first, step);
  } else {
    for (int k = first; k < to.width; k += step) x[k] = 0.0f;
  }
  for (int k = first; k < to.width; k += step) {
    const float value = g[k];
    const float normed = value * hidden_inverse * to.hidden_norm[k];
    x[to.width + k] = normed;
    stream[k] = to.norm_before_residual ? normed : value;
  }
}

__device__ __forceinline__ const WEIGHT* embedding_of(const EagleInput& to, int token) {
  if (token < 0 || token >= to.vocab) return nullptr;
  return to.table + static_cast<long long>(token) * to.width;
}
