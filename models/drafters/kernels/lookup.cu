// Drafts without a model: keeps what every slot said, and looks up what followed the last tokens
// where they stood before.
//
// A text is one row of `texts`, int32 [texts, length], -1 behind its end. Row s is what slot s
// said; the rows behind the slots are of requests that are over.
#include "sampling/kernels/slot.cuh"

#define VOTE_NONE 0     // one place is followed: the best fit
#define VOTE_ALL 1      // every place that fits with `shortest` tokens votes, once per suffix
#define VOTE_LONGEST 2  // every place that fits as well as any votes

// Writes tokens down at their positions. Where a slot begins anew, its text is kept in the place
// of the oldest text that is kept, if any are, and emptied. One block.
extern "C" __global__ void note_tokens(const int* token, const int* slot, const int* pos, int rows,
                                       int* texts, int length, int slot_count, int kept,
                                       int* begun) {
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  for (int r = 0; r < rows; ++r) {
    if (slot[r] < 0 || pos[r] != 0) continue;
    int* text = texts + static_cast<long long>(slot[r]) * length;
    const bool keeping = kept > 0 && text[0] >= 0;
    int* copy = texts + static_cast<long long>(slot_count + (keeping ? *begun % kept : 0)) * length;
    __syncthreads();
    for (int i = tid; i < length; i += step) {
      if (keeping) copy[i] = text[i];
      text[i] = -1;
    }
    if (tid == 0 && keeping) *begun = (*begun + 1) % kept;
    __syncthreads();
  }
  for (int r = tid; r < rows; r += step) {
    if (slot[r] < 0 || pos[r] < 0 || pos[r] >= length) continue;
    texts[static_cast<long long>(slot[r]) * length + pos[r]] = token[r];
  }
}

// What is looked up for one batch row. A place is (s, p): token p of text s.
struct Lookup {
  const int* texts;
  int count;
  int length;
  int self;  // the request's own text, whose places come before others'
  int n;     // its last token
  bool everywhere;
  bool oldest;
  const int* drafted;

  // With how many tokens, at most `most`, a place ends as the request does.
  __device__ int fit(int s, int p, int most) const {
    const int* text = texts + static_cast<long long>(s) * length;
    const int* own = texts + static_cast<long long>(self) * length;
    int found = 0;
    while (found < most && found <= p && found <= n && text[p - found] == own[n - found]) ++found;
    return found;
  }

  // The token j + 1 behind a place. Behind the end of its own text the drafts go on, so that what
  // repeats is drafted whole.
  __device__ int behind(int s, int p, int j) const {
    const int at = p + 1 + j;
    if (s == self && at > n) return drafted[at - n - 1];
    return at < length ? texts[static_cast<long long>(s) * length + at] : -1;
  }

  // Calls visit(s, p, fit) for this thread's places that fit with `shortest` tokens and are
  // followed by the first `j` drafts and a token more.
  template <class Visit>
  __device__ void places(int longest, int shortest, int j, Visit visit) const {
    for (int s = 0; s < count; ++s) {
      if (s != self && !everywhere) continue;
      const int end = s == self ? n : length - 1;
      for (int p = static_cast<int>(threadIdx.x); p < end; p += static_cast<int>(blockDim.x)) {
        if (behind(s, p, 0) < 0) break;
        const int found = fit(s, p, longest);
        if (found < shortest) continue;
        int same = 0;
        while (same < j && behind(s, p, same) == drafted[same]) ++same;
        if (same == j && behind(s, p, j) >= 0) visit(s, p, found);
      }
    }
  }

  // A place's rank: `most` first (22 bits), then the request's own, then the latest or oldest.
  __device__ unsigned long long rank(int most, int s, int p) const {
    const unsigned long long first = most < (1 << 22) ? most : (1 << 22) - 1;
    const unsigned long long order = oldest ? length - p : p + 1;
    return (first << 42) | (static_cast<unsigned long long>(s == self) << 41) | (order << 15) |
           static_cast<unsigned long long>(s);
  }
  __device__ static int ranked_first(unsigned long long rank) {
    return static_cast<int>(rank >> 42);
  }
  __device__ static int ranked_text(unsigned long long rank) {
    return static_cast<int>(rank & 0x7fff);
  }
  __device__ int ranked_place(unsigned long long rank) const {
    const int order = static_cast<int>((rank >> 15) & 0x3ffffff);
    return oldest ? length - order : order - 1;
  }
};

// A draft, or what may become one.
struct Continuation {
  int token;
  int parent;  // the draft that it hangs on, from 1; 0: the last token
  int depth;
  bool alone;  // no other place has a say in what follows
  float score;
  unsigned long long rank;  // of the place that is followed
};

// The drafts so far, and behind them what may be the next of them, best first; `most` in all.
struct Found {
  int drafts;
  int most;
  int end;
  Continuation all[MAX_DRAFTS];

  __device__ void add(const Continuation& added) {
    int i = end < most ? end++ : most;
    const auto is_before = [](const Continuation& a, const Continuation& b) {
      return a.score > b.score || (a.score == b.score && a.rank > b.rank);
    };
    for (; i > drafts && is_before(added, all[i - 1]); --i) {
      if (i < most) all[i] = all[i - 1];
    }
    if (i < most) all[i] = added;
  }
};

// Drafts at most `drafts` tokens, and `factor` times as many as fit, in a row of `width` whose rest
// is -1: a tree of `branch` children and `levels`, that of best score first. With votes a child's
// share is that of the votes of the places it follows, and its score the product of the shares down
// to it, which is `threshold` or more; without, places come as they rank. `votes_of` is zero,
// int32 [slots, vocabulary], and is left so. One block per batch row.
extern "C" __global__ void propose_texts(const int* row_slot, const Slot* slots, const int* texts,
                                         int text_count, int length, int longest, int shortest,
                                         int everywhere, int oldest, int vote, int drafts,
                                         float factor, float threshold, int branch, int levels,
                                         int vocab, int* votes_of, int width, int* proposal,
                                         int* parents) {
  __shared__ unsigned long long best;
  __shared__ int voters, votes;
  __shared__ int path[MAX_DRAFTS];
  __shared__ Found found;
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const bool leader = tid == 0;
  const int self = row_slot[b];
  for (int i = tid; i < width; i += static_cast<int>(blockDim.x)) proposal[b * width + i] = -1;
  if (leader) best = 0;
  if (self < 0 || !slots[self].active) return;
  int* counts = votes_of + static_cast<long long>(self) * vocab;
  const Lookup look = {texts,         text_count,      length,      self,
                       slots[self].n, everywhere != 0, oldest != 0, path};
  __syncthreads();
  look.places(longest, shortest, 0,
              [&](int s, int p, int fit) { atomicMax(&best, look.rank(fit, s, p)); });
  __syncthreads();
  const unsigned long long fitting = best;
  if (fitting == 0) return;
  const int best_fit = Lookup::ranked_first(fitting);
  const int high = vote == VOTE_LONGEST ? best_fit : longest;
  const int low = vote == VOTE_LONGEST ? best_fit : shortest;
  if (leader) {
    const float scaled = factor * static_cast<float>(best_fit);
    found.drafts = found.end = 0;
    found.most = scaled < static_cast<float>(drafts) ? static_cast<int>(scaled) : drafts;
  }
  Continuation node = {-1, 0, 0, vote == VOTE_NONE && branch == 1, 1.0f, fitting};
  while (true) {
    __syncthreads();
    const int row = found.drafts;
    if (node.depth == levels) {
      // no children
    } else if (node.alone) {
      if (leader) {
        node.token =
            look.behind(Lookup::ranked_text(node.rank), look.ranked_place(node.rank), node.depth);
        node.parent = row;
        ++node.depth;
        if (node.token >= 0) found.add(node);
      }
    } else {
      if (leader) voters = votes = 0;
      __syncthreads();
      look.places(high, low, node.depth, [&](int s, int p, int fit) {
        atomicAdd(counts + look.behind(s, p, node.depth), fit - low + 1);
        atomicAdd(&votes, fit - low + 1);
        atomicAdd(&voters, 1);
      });
      for (int child = 0; child < branch; ++child) {
        __syncthreads();
        if (leader) best = 0;
        __syncthreads();
        look.places(high, low, node.depth, [&](int s, int p, int fit) {
          const int count = counts[look.behind(s, p, node.depth)];
          if (count > 0) atomicMax(&best, look.rank(vote == VOTE_NONE ? fit : count, s, p));
        });
        __syncthreads();
        if (best == 0) break;
        if (!leader) continue;
        const int token =
            look.behind(Lookup::ranked_text(best), look.ranked_place(best), node.depth);
        const float share = static_cast<float>(counts[token]) / static_cast<float>(votes);
        const float score = vote == VOTE_NONE ? 1.0f : node.score * share;
        counts[token] = 0;
        if (score >= threshold) {
          found.add({token, row, node.depth + 1, voters == 1, score, best});
        }
      }
      __syncthreads();
      look.places(high, low, node.depth,
                  [&](int s, int p, int) { counts[look.behind(s, p, node.depth)] = 0; });
    }
    __syncthreads();
    if (found.drafts == found.end) break;
    node = found.all[found.drafts];
    __syncthreads();  // everybody has read it
    if (!leader) continue;
    ++found.drafts;
    for (int i = found.drafts; i > 0; i = found.all[i - 1].parent) {
      path[found.all[i - 1].depth - 1] = found.all[i - 1].token;
    }
  }
  for (int i = tid; i < found.drafts; i += static_cast<int>(blockDim.x)) {
    proposal[b * width + i] = found.all[i].token;
    if (parents != nullptr) parents[b * width + i] = found.all[i].parent;
  }
}
