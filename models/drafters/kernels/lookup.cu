// Prompt lookup: stores the token history of every slot, searches the histories for the last tokens
// of a request, and drafts the tokens that followed.
//
// A history is a row of `histories`, int32 [count, length]. Entries after its last token are -1.
// Row s belongs to slot s; the rows after the last slot are kept histories of finished requests.
#include "sampling/kernels/slot.cuh"

#define VOTE_NONE 0  // no votes: draft the tokens after the best occurrence
#define VOTE_ALL 1   // every suffix of `shortest` or more tokens votes at each of its occurrences
#define VOTE_LONGEST 2  // all occurrences of the longest matching suffix vote

// Stores the token of each input row in the history of the row's slot, at the row's position. A
// token at position 0 starts a new request, so the slot's old history is cleared. If `kept_count`
// is not 0, the old history is first copied to the kept histories of finished requests, where it
// replaces the oldest one. The launch has one block.
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

// The search for one request. The suffix is the sequence of the request's last tokens. An
// occurrence (s, p) means that the suffix, or the end of the suffix, matches the tokens of history
// s up to and including token p.
struct Lookup {
  const int* histories;
  int count;
  int length;
  int self;            // index of the request's own history; occurrences in it are preferred
  int n;               // index of the request's last token
  bool everywhere;     // search all histories, not only the request's own
  bool oldest;         // prefer the earliest occurrence, not the latest
  const int* drafted;  // drafts between the last token and the tree node, which extend the suffix

  // Returns how many tokens of history s, up to and including token p, match the last tokens of the
  // request. The result is at most `max_tokens`.
  __device__ int match_length(int s, int p, int max_tokens) const {
    const int* history = histories + static_cast<long long>(s) * length;
    const int* own = histories + static_cast<long long>(self) * length;
    int found = 0;
    while (found < max_tokens && found <= p && found <= n && history[p - found] == own[n - found])
      ++found;
    return found;
  }

  // Returns token p + 1 + j of history s, or -1 if the history has no such token. In the request's
  // own history, the drafts count as the tokens after the last token.
  __device__ int following(int s, int p, int j) const {
    const int at = p + 1 + j;
    if (s == self && at > n) return drafted[at - n - 1];
    return at < length ? histories[static_cast<long long>(s) * length + at] : -1;
  }

  // Calls visit(s, p, number of matching tokens, at most `longest`) for every occurrence (s, p)
  // with at least `shortest` matching tokens that is followed by the first `j` drafts and one more
  // token. The occurrences are divided among the threads of the block.
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

  // Returns the rank of an occurrence, by which atomicMax selects the best one. From the highest
  // bits: `score` (22 bits), whether the history is the request's own (1 bit), the order by
  // position (26 bits; greatest for the latest position or, with `oldest`, for the earliest), and
  // the history s (15 bits).
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

// A chosen draft, or a candidate for the next draft.
struct Candidate {
  int token;
  int parent;  // number of the parent draft, from 1; 0 for the last token of the request
  int depth;
  bool single;  // the drafts after it are read from the same occurrence, without another search
  float score;
  unsigned long long rank;  // rank of the occurrence that the token follows
};

// Chosen drafts and candidates in one array. Entries 0 .. drafts - 1 are the chosen drafts. Entries
// drafts .. end - 1 are the candidates for the next drafts, best first. `capacity` is the maximum
// of `end`.
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

// Searches the histories for earlier occurrences of suffixes of the request's tokens, and drafts
// the tokens that followed them. Writes the drafts of every batch row to `proposal`, int32 [batch,
// width], and fills the rest of the row with -1. There are at most `drafts` drafts, and at most
// `factor` drafts per token of the longest suffix that occurs earlier.
//
// The drafts form a tree with up to `branch` children per node and `levels` levels, and are chosen
// in the order of their scores. With VOTE_NONE, all scores are 1, and drafts are chosen by the rank
// of the occurrence that they follow (`Lookup::rank`), greatest first. Otherwise each occurrence of
// a suffix votes for the token after it. The share of a draft is the fraction of votes that its
// token received among the children of its parent. The score of a draft is the product of the
// shares on its path and must be at least `threshold`. `votes_of`, int32 [slots, vocab], is
// workspace that must be zero and is left zero. One block per batch row.
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
