// What the modules of multi-token prediction hand to one another.
#include "graft.cuh"

// Every row gets what the row before it of its slot held, the first one what `carried` [slots,
// width] keeps from an earlier call, and the position before its own. A slot's rows are in order. A
// thread walks one column; `earlier` may be `pos`.
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
