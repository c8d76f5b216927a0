// Prompt lookup: keeps every slot's tokens by position, and drafts what followed the last ones
// where they stood before.
#include "slot.cuh"

#define NGRAM_BLOCK 128

extern "C" __global__ void note_tokens(const int* token, const int* slot, const int* pos, int rows,
                                       int* history, int length) {
  const int r = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (r >= rows || slot[r] < 0 || pos[r] < 0 || pos[r] >= length) return;
  history[static_cast<long long>(slot[r]) * length + pos[r]] = token[r];
}

// One block per batch row. A place p of a slot fits with as many tokens as end alike at p and at
// the request's last token; the best fit wins, and of equals the latest place, or the earliest. A
// request's own places come before others'. Behind the end of a slot's tokens the draft goes on
// with itself, so that what repeats is drafted whole.
extern "C" __global__ void propose_ngram(const int* row_slot, const Slot* slots, int slot_count,
                                         const int* history, int length, int drafts, int longest,
                                         int shortest, int everywhere, int oldest, int* proposal) {
  __shared__ unsigned long long best[NGRAM_BLOCK];
  const int b = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int self = row_slot[b];
  int* drafted = proposal + b * drafts;
  if (tid == 0) drafted[0] = -1;
  if (self < 0 || !slots[self].active) return;
  const int n = slots[self].n;  // of the last token
  const int* own = history + static_cast<long long>(self) * length;

  unsigned long long mine = 0;
  for (int s = 0; s < slot_count; ++s) {
    if (s != self && !everywhere) continue;
    const int* other = history + static_cast<long long>(s) * length;
    const int end = s == self ? n : length - 1;  // something must follow the place
    for (int p = tid; p < end; p += NGRAM_BLOCK) {
      if (other[p + 1] < 0) continue;
      int fit = 0;
      while (fit < longest && fit <= p && fit <= n && other[p - fit] == own[n - fit]) ++fit;
      if (fit < shortest) continue;
      const unsigned long long order = static_cast<unsigned int>(oldest ? length - p : p + 1);
      const unsigned long long key = (static_cast<unsigned long long>(fit) << 48) |
                                     (static_cast<unsigned long long>(s == self) << 47) |
                                     (order << 15) | static_cast<unsigned int>(s);
      mine = key > mine ? key : mine;
    }
  }
  best[tid] = mine;
  __syncthreads();
  for (int half = NGRAM_BLOCK / 2; half > 0; half /= 2) {
    if (tid < half && best[tid + half] > best[tid]) best[tid] = best[tid + half];
    __syncthreads();
  }
  if (tid != 0 || best[0] == 0) return;
  const int s = static_cast<int>(best[0] & 0x7fff);
  const int order = static_cast<int>((best[0] >> 15) & 0xffffffffu);
  const int first = (oldest ? length - order : order - 1) + 1;
  const int* from = history + static_cast<long long>(s) * length;
  for (int j = 0; j < drafts; ++j) {
    const int at = first + j;
    int token = -1;
    if (s == self && at > n) {
      token = drafted[at - n - 1];
    } else if (at < length) {
      token = from[at];
    }
    drafted[j] = token;
    if (token < 0) return;
  }
}
