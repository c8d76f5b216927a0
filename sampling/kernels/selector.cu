// A left-to-right selector (DFlash2): the best ids of a row change places by the token before it.
#include "best.cuh"

#define MAX_SELECTED 64
#define ABOVE 40.0f  // between what is selected from and all other ids; exp(-40) is 4e-18

// One block a row of logits: its k best columns, the best first; -1 behind the last that is there.
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

// One block a row of logits; `nodes` of them, side by side, have one row of the block behind them,
// with its `best` ids and their `successor` [k, rank] and with its `hidden` [rank]. What is best is
// scored u + sum of predecessor * hidden * successor, and lifted above all other ids: these keep
// their logits and are drafted only where a grammar takes all of the best.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    selector_score(float* logits, int vocab, int nodes, int k, int rank, const int* best,
                   const float* successor, const float* hidden, const float* predecessor) {
  __shared__ float scores[MAX_SELECTED];
  __shared__ float last;  // logit of the worst of the best
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
    row[best[c]] = (scores[c] - least) + (last + ABOVE);
  }
}
