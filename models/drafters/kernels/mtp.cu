// Passes hidden states from one multi-token prediction (MTP) module to the next.
#include "graft.cuh"

// Shifts the rows of every slot by one, because the next module processes the same tokens at
// positions lower by one. Each row receives the previous row of its slot. The first row of a slot
// receives the row that `carried` [slots, width] stores from the previous call, and `carried`
// receives the last row. `earlier` receives the positions minus 1 and may be the same array as
// `pos`. The rows of a slot must be in ascending order. Each thread processes one column.
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
