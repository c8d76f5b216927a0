// Token selector of the drafter DFlash2 (models/drafters/dflash2.py). DFlash2 computes the logits
// of all draft levels at once. The selector then changes the logits of the best ids of a level,
// depending on the token that precedes them.
#include "best.cuh"

#define MAX_SELECTED 64
#define SELECTED_MARGIN 40.0f  // logit gap to all other ids; exp(-40) = 4e-18

// Writes the k best columns of each row in descending order, followed by -1 if there are fewer. One
// block per row of logits.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    selector_best(const float* logits, int vocab, int k, int* best) {
  __shared__ Scratch scratch;
  const long long r = blockIdx.x;
  BestFirst order(logits + r * vocab, vocab);
  for (int c = 0; c < k; ++c) {
    const int column = order.next(scratch);
    if (threadIdx.x == 0) best[r * k + c] = column;
  }
}

// Adds sum(predecessor * hidden * successor) to the logit of each id in `best`, which selector_best
// has written. The three vectors belong to the preceding token, the position and the id. Then adds
// a constant to these logits, so that all of them are greater than those of the other ids. The
// other ids are drafted only if the grammar rejects all ids in `best`.
//
// One block per row of logits. `nodes` consecutive rows, which belong to the nodes of one tree
// level of a request, share `best` [k], `successor` [k, rank] and `hidden` [rank].
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    selector_score(float* logits, int vocab, int nodes, int k, int rank, const int* best,
                   const float* successor, const float* hidden, const float* predecessor) {
  __shared__ float scores[MAX_SELECTED];
  __shared__ float last;  // lowest logit of the best ids
  const int tid = static_cast<int>(threadIdx.x);
  const long long r = blockIdx.x;
  float* row = logits + r * vocab;
  best += r / nodes * k;
  successor += r / nodes * k * rank;
  hidden += r / nodes * rank;
  predecessor += r * rank;
  for (int c = tid / LANES; c < k && best[c] >= 0; c += WARPS) {
    float sum = 0.0f;
    for (int i = tid % LANES; i < rank; i += LANES) {
      sum = fmaf(predecessor[i] * hidden[i], successor[c * rank + i], sum);
    }
    if (LANES == 32) sum = warp_sum(sum);
    if (tid % LANES != 0) continue;
    scores[c] = row[best[c]] + sum;
    if (c + 1 == k || best[c + 1] < 0) last = row[best[c]];
  }
  block_sync();
  float least = 0.0f;
  for (int c = 0; c < k && best[c] >= 0; ++c) {
    least = c == 0 || scores[c] < least ? scores[c] : least;
  }
  for (int c = tid; c < k && best[c] >= 0; c += BLOCK) {
    row[best[c]] = (scores[c] - least) + (last + SELECTED_MARGIN);
  }
}
