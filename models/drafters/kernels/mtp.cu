// Passes hidden states from one multi-token prediction (MTP) module to the next.
#include "graft.cuh"

// Replaces each hidden state in `x` by that of the previous position of the same slot. Module j + 1
// combines the hidden state of position i with the token after the one that module j combines it
// with. It therefore processes the same tokens as module j, each with the hidden state and the
// position before. The first row of a slot receives the last row of the previous call, which
// `carried` [slots, width] holds, and
// `carried` receives the last row of this call. `earlier` receives pos - 1 and may be the array
// `pos`. The positions of a slot must be ascending. Each thread processes one column.
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
