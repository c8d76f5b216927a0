// Input of an EAGLE-3 layer, one thread per row.
#include "eagle_input.cuh"

extern "C" __global__ void eagle_input_thread(const WEIGHT* table, const int* token, const float* g,
                                              const float* embedding_norm, const float* hidden_norm,
                                              float* x, float* stream, int rows, int vocab,
                                              int width, float eps, int norm_before_residual) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const EagleInput to = {table, embedding_norm,      hidden_norm, x, stream, vocab, width,
                         eps,   norm_before_residual};
  const WEIGHT* embedding = embedding_of(to, token[row]);
  const float* hidden = g + static_cast<long long>(row) * width;
  const float of_embedding =
      embedding != nullptr ? inverse_rms_thread(embedding, width, eps) : 0.0f;
  const float of_hidden = inverse_rms_thread(hidden, width, eps);
  write_eagle_row(to, embedding, hidden, of_embedding, of_hidden, row, 0, 1);
}
