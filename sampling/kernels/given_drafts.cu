// Verification of drafts that are given as plain arrays (sampling/draft_verifier.py): the drafts
// and their probabilities are checked and written to the slots, from which the other kernels read
// them, and the committed tokens are written to an array.
#include "row.cuh"
#include "slot.cuh"

// Values of GivenFault.code, the reason why a batch row is not verified.
#define GIVEN_ID 1        // a draft is neither a token id nor -1
#define GIVEN_GAP 2       // a draft follows a -1
#define GIVEN_POSITION 3  // the position is less than 1
#define GIVEN_RANGE 4     // an element of q is negative, greater than 1 or NaN
#define GIVEN_SUM 5       // the sum of a row of q is not 1
#define GIVEN_ZERO 6      // a draft has probability 0 in q
#define GIVEN_LOGIT 7     // a logit is NaN or +inf
#define GIVEN_EMPTY 8     // all logits of a row are -inf

#define MAX_SUM_ERROR 1e-3f
// Elements of q are added as integers in units of 1 / SUM_UNITS. The sum of 2^24 elements is below
// 2^63.
#define SUM_UNITS 274877906944.0f

// The first invalid input of a batch row (one sequence whose drafts are verified).
struct GivenFault {
  int code;         // GIVEN_*; 0: all inputs are valid
  int j;            // index of the draft, or of the row of logits
  long long token;  // with GIVEN_ID, GIVEN_GAP and GIVEN_ZERO: the draft; otherwise the position
  float value;      // with GIVEN_RANGE: an invalid element; with GIVEN_SUM: the sum
  int unused;
};

// Returns element i of an array of integers, each of which has 4 or 8 `bytes`.
__device__ __forceinline__ long long integer_at(const void* array, int bytes, long long i) {
  return bytes == 8 ? reinterpret_cast<const long long*>(array)[i]
                    : reinterpret_cast<const int*>(array)[i];
}

// Checks the distribution `q` [vocab_size] from which `draft` was sampled, and copies it to
// `table`. Returns 0 if it is valid, otherwise GIVEN_RANGE, GIVEN_SUM or GIVEN_ZERO. `value`
// receives the invalid element (GIVEN_RANGE) or the sum.
__device__ __forceinline__ int load_table(const float* q, int vocab_size, int draft, float* table,
                                          Scratch& scratch, float* value) {
  u64 sum = 0;
  u64 invalid = 0;  // 1 + column of an invalid element
  for (int i = static_cast<int>(threadIdx.x); i < vocab_size; i += BLOCK) {
    const float x = q[i];
    table[i] = x;
    if (x >= 0.0f && x <= 1.0f + MAX_SUM_ERROR) {
      sum += static_cast<u64>(x * SUM_UNITS);
    } else {
      invalid = static_cast<u64>(i) + 1;
    }
  }
  sum = block_reduce(sum, scratch, Sum());
  block_sync();
  invalid = block_reduce(invalid, scratch, Max());
  block_sync();
  if (invalid > 0) {
    *value = q[invalid - 1];
    return GIVEN_RANGE;
  }
  *value = static_cast<float>(sum) / SUM_UNITS;
  if (fabsf(*value - 1.0f) > MAX_SUM_ERROR) return GIVEN_SUM;
  return q[draft] > 0.0f ? 0 : GIVEN_ZERO;
}

// Writes the given drafts of each batch row to a slot, from which the verification kernels read
// them. Block b writes batch row b to slot b. The drafts of a batch row end at the first -1. If an
// input of the batch row is invalid, its slot becomes inactive, so that no token is committed.
//
// `request` contains the sampling parameters of all batch rows. `seeds` and `positions` may be null
// if sampling is greedy. If q, float [batch, max_drafts, vocab_size], is not null, q[b][j] is the
// distribution from which draft j of batch row b was sampled, and it is copied to `tables`.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    load_given_drafts(const Slot request, const void* drafts, int draft_bytes, int max_drafts,
                      int vocab_size, const float* q, const unsigned long long* seeds,
                      const void* positions, int position_bytes, Slot* slots, float* tables,
                      GivenFault* faults) {
  __shared__ Scratch scratch;
  const int b = static_cast<int>(blockIdx.x);
  const bool leader = threadIdx.x == 0;
  const long long first = static_cast<long long>(b) * max_drafts;
  const long long position = positions == nullptr ? 1 : integer_at(positions, position_bytes, b);
  GivenFault fault = {0, 0, 0, 0.0f, 0};
  if (position < 1 || position > 0x3fffffff) fault = {GIVEN_POSITION, 0, position, 0.0f, 0};
  int count = 0;
  for (int j = 0; j < max_drafts && fault.code == 0; ++j) {
    const long long token = integer_at(drafts, draft_bytes, first + j);
    if (token < -1 || token >= vocab_size) {
      fault = {GIVEN_ID, j, token, 0.0f, 0};
    } else if (token >= 0 && count < j) {
      fault = {GIVEN_GAP, j, token, 0.0f, 0};
    }
    count += token >= 0;
  }
  for (int j = 0; j < count && q != nullptr && fault.code == 0; ++j) {
    const long long token = integer_at(drafts, draft_bytes, first + j);
    const long long row = (first + j) * vocab_size;
    float value = 0.0f;
    const int code =
        load_table(q + row, vocab_size, static_cast<int>(token), tables + row, scratch, &value);
    if (code != 0) fault = {code, j, token, value, 0};
  }
  if (!leader) return;
  faults[b] = fault;
  Slot& slot = slots[b];
  slot = request;
  slot.active = fault.code == 0;
  slot.n = static_cast<int>(position) - 1;
  slot.seed = seeds == nullptr ? 0 : seeds[b];
  slot.draft_len = fault.code == 0 ? count : 0;
  for (int j = 0; j < slot.draft_len; ++j) {
    slot.drafts[j] = static_cast<int>(integer_at(drafts, draft_bytes, first + j));
    slot.parent[j] = j;
    slot.path[j] = (2ull << j) - 1;
    slot.q_kind[j] = q == nullptr ? DRAFT_POINT : DRAFT_DENSE;
  }
}

// Writes the committed tokens of each batch row to `tokens`, int [batch, max_drafts + 1]; the rest
// of a row is -1. Without invalid inputs, the number of committed tokens is the number of accepted
// drafts plus 1. It is less if the row of logits after the last accepted draft has no valid token.
extern "C" __global__ void write_given_tokens(int batch, int max_drafts, const RoundRow* rows,
                                              int row_words, const int* row_ok, int* tokens,
                                              GivenFault* faults) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= batch) return;
  const int width = max_drafts + 1;
  const RoundRow* row = round_row(rows, row_words, b);
  const int* committed = reinterpret_cast<const int*>(row + 1);
  if (faults[b].code == 0 && row->count <= row->accepted) {
    const bool empty = row_ok[b * width + row->count] == ROW_NO_TOKEN;
    faults[b] = {empty ? GIVEN_EMPTY : GIVEN_LOGIT, row->count, 0, 0.0f, 0};
  }
  const int count = faults[b].code == 0 ? row->count : 0;
  for (int i = 0; i < width; ++i) tokens[b * width + i] = i < count ? committed[i] : -1;
}
