#include "graft.cuh"

// Writes the input rows of a prefill chunk, the prompt tokens begin .. end - 1 and padding, as six
// arrays of `rows` entries: token, next token, slot and position for the target, and slot and
// position for the drafter. `last` is the index of the last prompt token. This token is fed to the
// drafter only, because the request's first round feeds it to the target. Slot and position of
// padding are -1. One block.
extern "C" __global__ void prompt_rows(const int* tokens, int slot, int begin, int end, int last,
                                       int rows, int* out) {
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += static_cast<int>(blockDim.x)) {
    const int p = begin + r;
    const bool used = p < end;
    const bool fed = used && p < last;  // to the target
    const int row[] = {used ? tokens[p] : 0, fed ? tokens[p + 1] : 0, fed ? slot : -1,
                       fed ? p : -1,         used ? slot : -1,        used ? p : -1};
    for (int i = 0; i < 6; ++i) out[i * rows + r] = row[i];
  }
}
