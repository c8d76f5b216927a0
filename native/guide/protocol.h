// What the guide and the device exchange through pinned rows. Row states have the same values as in
// cudagraph/kernels/graft.cuh.
#pragma once

#include <cstdint>

namespace graft::guide {

enum RowState : int32_t {
  kRowNotReady = 0,
  kRowFree = 1,
  kRowReady = 2,
  kRowDeadEnd = 3,
  kRowError = 4,
};

// row_state[slot][j]: {state, epoch, position, more}; row j masks the token after position n + j.
// `more` of a free row: 1 if the request has no grammar. Of a ready row: 1 + the token that the
// grammar forces there, or 0.
constexpr int kRowStateWords = 4;

// committed[slot]: {replay, count, t_1 .. t_{K+1}}.
constexpr int kCommittedReplay = 0;
constexpr int kCommittedCount = 1;
constexpr int kCommittedTokens = 2;

// drafted[slot]: {replay, v, d_1 .. d_K}.
constexpr int kDraftedReplay = 0;
constexpr int kDraftedCount = 1;
constexpr int kDraftedTokens = 2;

// candidates[slot]: {replay, j, count, ids by the drafter's preference}; probe mode only.
constexpr int kCandidatesReplay = 0;
constexpr int kCandidatesDraft = 1;
constexpr int kCandidatesCount = 2;
constexpr int kCandidatesIds = 3;

// answers[slot]: {replay, j, the first legal candidate, or -1: none, mask row j - 1 was filled}.
constexpr int kAnswerWords = 4;

// One field of the pinned exchange: `base` is slot 0, `stride` the int32 words between slots.
struct Field {
  int32_t* base = nullptr;
  int64_t stride = 0;
  int32_t* row(int slot) const { return base + slot * stride; }
};

struct Exchange {
  Field mask;        // [slots, K + 1, words]
  Field row_state;   // [slots, K + 1, 4]
  Field committed;   // [slots, K + 3]
  Field drafted;     // [slots, K + 2]
  Field candidates;  // [slots, 3 + candidates], or empty
  Field answers;     // [slots, 4], or empty
};

struct Shape {
  int slots = 0;
  int draft_length = 0;
  int vocab_size = 0;
  int candidates = 0;  // ids probed per draft; 0: drafts are drawn under filled rows
  int rows() const { return draft_length + 1; }
  int words() const { return (vocab_size + 31) / 32; }
};

}  // namespace graft::guide
