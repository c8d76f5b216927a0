// State that is passed between multi-token prediction (MTP) modules.
#include "graft.cuh"

// Shifts the rows of every slot by one: a row receives the previous row of its slot, the first one
// the row that `carried` [slots, width] keeps from the previous call. `earlier` receives the
// position minus 1 and may be `pos`. The rows of a slot are in ascending order; a thread processes
// one column.
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
