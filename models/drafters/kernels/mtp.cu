// Passes hidden states from one multi-token prediction (MTP) module to the next.
#include "graft.cuh"

// Replaces the hidden state in each row of `x` by that of the previous position of the same slot.
// MTP module j + 1 processes the same tokens as module j, but combines each of them with the hidden
// state of one position earlier. `earlier` receives these positions, pos - 1, and may be the array
// `pos`. The hidden state for the first row of a slot comes from the last row of the previous call,
// which `carried` [slots, width] stores between calls. The positions of a slot must be ascending.
// Each thread processes one column.
extern "C" __global__ void delay_rows(float* x, const int* slot, const int* pos, int* earlier,
                                      float* carried, int rows, int slots, int width) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (column >= width) return;
  for (int r = 0; r < rows; ++r) {
    if (column == 0) earlier[r] = pos[r] - 1;
    if (slot[r] < 0 || slot[r] >= slots) continue;
    float* row = x + static_cast<long long>(r) * width + column;
    float* kept = carried + static_cast<long long>(slot[r]) * width + column;
    const float own = *row;
    *row = *kept;
    *kept = own;
  }
}
