// Prompt lookup: stores the token history of every slot and drafts the continuations of earlier
// occurrences of the last tokens.
//
// A history is a row of `histories`, int32 [count, length], filled with -1 after its end. Row s
// belongs to slot s; the rows after the slots are histories of finished requests.
#include "sampling/kernels/slot.cuh"

#define VOTE_NONE 0     // follow the best occurrence
#define VOTE_ALL 1      // all occurrences of `shortest` or more tokens vote, once per suffix
#define VOTE_LONGEST 2  // all occurrences of the longest matching suffix vote

// Stores tokens at their positions. When a slot starts a new request (position 0), its history is
// copied over the oldest kept history, if histories are kept, and cleared. One block.
extern "C" __global__ void record_tokens(const int* token, const int* slot, const int* pos,
                                         int rows, int* histories, int length, int slot_count,
                                         int kept_count, int* next_kept) {
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  for (int r = 0; r < rows; ++r) {
    if (slot[r] < 0 || pos[r] != 0) continue;
    int* history = histories + static_cast<long long>(slot[r]) * length;
    const bool is_kept = kept_count > 0 && history[0] >= 0;
    int* copy =
        histories +
        static_cast<long long>(slot_count + (is_kept ? *next_kept % kept_count : 0)) * length;
    __syncthreads();
    for (int i = tid; i < length; i += step) {
      if (is_kept) copy[i] = history[i];
      history[i] = -1;
    }
    if (tid == 0 && is_kept) *next_kept = (*next_kept + 1) % kept_count;
    __syncthreads();
  }
  for (int r = tid; r < rows; r += step) {
    if (slot[r] < 0 || pos[r] < 0 || pos[r] >= length) continue;
    histories[static_cast<long long>(slot[r]) * length + pos[r]] = token[r];
  }
}

// Lookup for one batch row. An occurrence (s, p) is token p of history s.
struct Lookup {
  const int* histories;
  int count;
  int length;
  int self;  // history of the request, whose occurrences are preferred
  int n;     // index of its last token
  bool everywhere;
  bool oldest;
  const int* drafted;

  // Returns how many tokens up to (s, p) match the last tokens of the request, at most
  // `max_tokens`.
  __device__ int match_length(int s, int p, int max_tokens) const {
    const int* history = histories + static_cast<long long>(s) * length;
    const int* own = histories + static_cast<long long>(self) * length;
    int found = 0;
    while (found < max_tokens && found <= p && found <= n && history[p - found] == own[n - found])
      ++found;
    return found;
  }

  // Returns token j + 1 after an occurrence. The request's own history continues with the drafts,
  // so that repetitions are drafted in full.
  __device__ int following(int s, int p, int j) const {
    const int at = p + 1 + j;
    if (s == self && at > n) return drafted[at - n - 1];
    return at < length ? histories[static_cast<long long>(s) * length + at] : -1;
  }

  // Calls visit(s, p, match length) for those occurrences of this thread that match at least
  // `shortest` tokens and are followed by the first `j` drafts and one more token.
  template <class Visit>
  __device__ void for_each_occurrence(int longest, int shortest, int j, Visit visit) const {
    for (int s = 0; s < count; ++s) {
      if (s != self && !everywhere) continue;
      const int end = s == self ? n : length - 1;
      for (int p = static_cast<int>(threadIdx.x); p < end; p += static_cast<int>(blockDim.x)) {
        if (following(s, p, 0) < 0) break;
        const int found = match_length(s, p, longest);
        if (found < shortest) continue;
        int same = 0;
        while (same < j && following(s, p, same) == drafted[same]) ++same;
        if (same == j && following(s, p, j) >= 0) visit(s, p, found);
      }
    }
  }

  // Returns the rank of an occurrence: by `score` (22 bits), then the own history, then latest or
  // oldest.
  __device__ unsigned long long rank(int score, int s, int p) const {
    const unsigned long long first = score < (1 << 22) ? score : (1 << 22) - 1;
    const unsigned long long order = oldest ? length - p : p + 1;
    return (first << 42) | (static_cast<unsigned long long>(s == self) << 41) | (order << 15) |
           static_cast<unsigned long long>(s);
  }
  __device__ static int rank_score(unsigned long long rank) { return static_cast<int>(rank >> 42); }
  __device__ static int rank_history(unsigned long long rank) {
    return static_cast<int>(rank & 0x7fff);
  }
  __device__ int rank_position(unsigned long long rank) const {
    const int order = static_cast<int>((rank >> 15) & 0x3ffffff);
    return oldest ? length - order : order - 1;
  }
};

// A draft or a candidate for one.
struct Candidate {
  int token;
  int parent;  // parent draft, from 1; 0: the last token
  int depth;
  bool single;  // only one occurrence is followed from here on
  float score;
  unsigned long long rank;  // of the occurrence that is followed
};

// The chosen drafts, followed by the candidates for the next ones, best first; at most `capacity`.
struct CandidateList {
  int drafts;
  int capacity;
  int end;
  Candidate all[MAX_DRAFTS];

  __device__ void add(const Candidate& added) {
    int i = end < capacity ? end++ : capacity;
    const auto is_before = [](const Candidate& a, const Candidate& b) {
      return a.score > b.score || (a.score == b.score && a.rank > b.rank);
    };
    for (; i > drafts && is_before(added, all[i - 1]); --i) {
      if (i < capacity) all[i] = all[i - 1];
    }
    if (i < capacity) all[i] = added;
  }
};

// Proposes at most `drafts` tokens, and at most `factor` per matched token, in a row of `proposal`
// of `width` entries, the rest of which is -1: a tree with up to `branch` children per node and
// `levels` levels, best score first. With votes, the share of a child is that of the votes of the
// occurrences that it follows, and its score the product of the shares on its path, which must
// reach `threshold`. Without votes occurrences are ordered by rank. `votes_of`, int32 [slots,
// vocab], is zero before and after. One block per batch row.
extern "C" __global__ void propose_drafts(const int* row_slot, const Slot* slots,
                                          const int* histories, int history_count, int length,
                                          int longest, int shortest, int everywhere, int oldest,
                                          int vote, int drafts, float factor, float threshold,
                                          int branch, int levels, int vocab, int* votes_of,
                                          int width, int* proposal, int* parents) {
  __shared__ unsigned long long best;
  __shared__ int voters, votes;
  __shared__ int path[MAX_DRAFTS];
  __shared__ CandidateList found;
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const bool leader = tid == 0;
  const int self = row_slot[b];
  for (int i = tid; i < width; i += static_cast<int>(blockDim.x)) proposal[b * width + i] = -1;
  if (leader) best = 0;
  if (self < 0 || !slots[self].active) return;
  int* counts = votes_of + static_cast<long long>(self) * vocab;
  const Lookup look = {histories,     history_count,   length,      self,
                       slots[self].n, everywhere != 0, oldest != 0, path};
  __syncthreads();
  look.for_each_occurrence(longest, shortest, 0, [&](int s, int p, int match) {
    atomicMax(&best, look.rank(match, s, p));
  });
  __syncthreads();
  const unsigned long long first_rank = best;
  if (first_rank == 0) return;
  const int best_match = Lookup::rank_score(first_rank);
  const int high = vote == VOTE_LONGEST ? best_match : longest;
  const int low = vote == VOTE_LONGEST ? best_match : shortest;
  if (leader) {
    const float scaled = factor * static_cast<float>(best_match);
    found.drafts = found.end = 0;
    found.capacity = scaled < static_cast<float>(drafts) ? static_cast<int>(scaled) : drafts;
  }
  Candidate node = {-1, 0, 0, vote == VOTE_NONE && branch == 1, 1.0f, first_rank};
  while (true) {
    __syncthreads();
    const int row = found.drafts;
    if (node.depth == levels) {
      // no children
    } else if (node.single) {
      if (leader) {
        node.token = look.following(Lookup::rank_history(node.rank), look.rank_position(node.rank),
                                    node.depth);
        node.parent = row;
        ++node.depth;
        if (node.token >= 0) found.add(node);
      }
    } else {
      if (leader) voters = votes = 0;
      __syncthreads();
      look.for_each_occurrence(high, low, node.depth, [&](int s, int p, int match) {
        atomicAdd(counts + look.following(s, p, node.depth), match - low + 1);
        atomicAdd(&votes, match - low + 1);
        atomicAdd(&voters, 1);
      });
      for (int child = 0; child < branch; ++child) {
        __syncthreads();
        if (leader) best = 0;
        __syncthreads();
        look.for_each_occurrence(high, low, node.depth, [&](int s, int p, int match) {
          const int count = counts[look.following(s, p, node.depth)];
          if (count > 0) atomicMax(&best, look.rank(vote == VOTE_NONE ? match : count, s, p));
        });
        __syncthreads();
        if (best == 0) break;
        if (!leader) continue;
        const int token =
            look.following(Lookup::rank_history(best), look.rank_position(best), node.depth);
        const float share = static_cast<float>(counts[token]) / static_cast<float>(votes);
        const float score = vote == VOTE_NONE ? 1.0f : node.score * share;
        counts[token] = 0;
        if (score >= threshold) {
          found.add({token, row, node.depth + 1, voters == 1, score, best});
        }
      }
      __syncthreads();
      look.for_each_occurrence(high, low, node.depth, [&](int s, int p, int) {
        counts[look.following(s, p, node.depth)] = 0;
      });
    }
    __syncthreads();
    if (found.drafts == found.end) break;
    node = found.all[found.drafts];
    __syncthreads();  // all threads have read `node`
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
