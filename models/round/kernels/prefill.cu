#include "graft.cuh"

// Lays out tokens begin..end-1 of a prompt, as six arrays of `rows` rows: the token, the one
// behind, slot and position, which are -1 of padding: for the target, which is not fed token
// `last`, and again for the drafter, which is. One block.
extern "C" __global__ void prompt_rows(const int* tokens, int slot, int begin, int end, int last,
                                       int rows, int* out) {
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += static_cast<int>(blockDim.x)) {
    const int p = begin + r;
    const bool own = p < end;
    const bool fed = own && p < last;
    const int row[] = {own ? tokens[p] : 0, fed ? tokens[p + 1] : 0, fed ? slot : -1,
                       fed ? p : -1,        own ? slot : -1,         own ? p : -1};
    for (int i = 0; i < 6; ++i) out[i * rows + r] = row[i];
  }
}
