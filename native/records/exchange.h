// Records that the host, the C++ grammar worker and the kernels exchange through pinned memory.
//
// Kernels and worker include this header; Python parses its constants and structs
// (cudagraph/driver/cstruct.py). Each record is declared here only.
//
// A *slot* holds the state of one running request. A *replay* is one launch of a round's graph;
// replays are numbered from 1, so that a reader can tell a current record from an older one. The
// host's numbers are not limited. Records and kernels contain the lower 32 bits of a number, which
// repeat after 2^32 replays: compare them with == or with replays_since(), never with <. When a
// request gets a slot, the host or a kernel renews those records of the slot that will be read, so
// that none of them is older than the request. A *mask row* is a bitmask with one bit per token id.
// Row 0 of a slot constrains the token after the last committed one, row j the token after draft j.
#pragma once

#if defined(__CUDACC__) || defined(__SOFTCUDA__)
#define RECORDS_FUNCTION __device__ __forceinline__
#else
#define RECORDS_FUNCTION inline
#endif

// Values of RowStamp.state, the state of a mask row.
#define ROW_NOT_READY 0  // not filled for the current position
#define ROW_FREE 1       // every id is legal; the mask is not written
#define ROW_READY 2      // the mask is filled and has a legal id
#define ROW_DEAD_END 3   // no id is legal
#define ROW_ERROR 4      // the grammar backend failed

// Reasons for which verification ends a request.
#define REASON_NONE 0
#define REASON_STOP 1
#define REASON_LENGTH 2
#define REASON_DEAD_END 3
#define REASON_ERROR 4

// How a round generates and masks its drafts. sampling/mode.py has the table of modes.
enum DraftMode {
  DRAFT_MODE_PROPOSED = 0,       // the drafter returns token ids for all levels at once
  DRAFT_MODE_CHAIN = 1,          // a chain is sampled level by level without masks
  DRAFT_MODE_CHAIN_FILL = 2,     // each draft of a chain is sampled under its own mask row
  DRAFT_MODE_CHAIN_PROBE = 3,    // the grammar tests the candidates of one level at a time
  DRAFT_MODE_CHAIN_LATTICE = 4,  // the grammar tests the candidates of all levels in one step
  DRAFT_MODE_TREE = 5,           // a tree grows level by level without masks
  DRAFT_MODE_TREE_PROBE = 6,     // the grammar tests the candidates of all nodes of one level
  DRAFT_MODE_TREE_LATTICE = 7,   // the grammar tests the candidates of all levels in one step
};

// Stamp of a mask row: the state of the row, and the request and position for which it was filled.
// Kernels use a row only if epoch and position equal those of the slot.
struct RowStamp {
  int state;     // ROW_*
  int epoch;     // number of the slot assignment, which identifies the request
  int position;  // position of the token before the masked one
  // The meaning of `detail` depends on the state. With ROW_FREE, it is 1 if the request has no
  // grammar, so that every position is free, and 0 if only this position is free. With ROW_READY,
  // it is 1 + the token that the grammar forces, and 0 if it forces none. Otherwise it is 0.
  int detail;
};

// Tokens that a replay committed to a slot. An array of ExchangeLayout::rows ids follows the
// struct; the first `count` of them are used.
struct Committed {
  int replay;
  int count;
};

// Drafts that continue a slot's committed tokens. Two arrays follow the struct: the ids of the
// drafts, then their parents. Each has space for ExchangeLayout::drafts entries, of which the first
// `count` are used. A parent is a row number: row 0 is the last committed token, row j is draft j.
// While a tree grows, the arrays contain not the drafts but the nodes of all levels so far that are
// fed to the drafter, a fixed number per level. If a level has fewer nodes, the other ids are -1.
struct Drafted {
  int replay;
  int count;
};

// Candidate ids that the grammar tests, most likely first. The draft mode determines the meaning of
// `draft` and `count`, and the words that follow the struct. "Lattice" means that the candidates of
// all levels are tested in one step.
//
//   mode           draft             count             words that follow
//   chain, probe   number of draft   number of ids     ids
//   tree, probe    level             number of nodes   ids [branch][candidates]
//   lattice        maximum number    number of levels  ids [levels][candidates], then their
//                  of drafts                           probabilities, float [levels][candidates]
//
// The ids of a node or level end at the first -1.
struct Candidates {
  int replay;
  int draft;
  int count;
};

// Answer of the grammar to a Candidates record.
//
//   mode           draft             id                         words that follow
//   chain, probe   number of draft   first legal candidate, or  none
//                                    -1: none is legal, and the mask
//                                    row was filled
//   tree, probe    level             number of nodes            legal candidates of each node, as
//                                                               bits [branch]
//   lattice        0                 number of drafts           ids [drafts], parents [drafts]
struct Answer {
  int replay;
  int draft;
  int id;
};

// Sizes and offsets of a slot's records, in 32-bit words from the slot's first word. Records
// written by the device and records written by the host share no cache line.
struct ExchangeLayout {
  int slots;
  int stride;         // words per slot
  int rows;           // mask rows per slot: maximum drafts + 1
  int words;          // 32-bit words per mask row
  int mode;           // DRAFT_MODE_*
  int candidates;     // ids per draft, node or level that the grammar tests
  int drafts;         // capacity of the Drafted record
  int branch;         // maximum children per node, and nodes fed to the drafter per level
  int levels;         // number of draft levels
  int stamps;         // offset of RowStamp[rows]
  int committed;      // offset of Committed
  int drafted;        // offset of Drafted
  int candidate_ids;  // offset of Candidates
  int answer;         // offset of Answer
  int masks;          // offset of the mask rows of all slots, [rows][slots][words]
};

// Returns the number of the replay that follows `replay`.
RECORDS_FUNCTION int replay_after(int replay) {
  return static_cast<int>(static_cast<unsigned int>(replay) + 1u);
}

// Returns how many replays `replay` is later than `earlier`; negative if it is earlier.
RECORDS_FUNCTION int replays_since(int replay, int earlier) {
  return static_cast<int>(static_cast<unsigned int>(replay) - static_cast<unsigned int>(earlier));
}

// Returns whether the grammar tests the candidates of all levels in one step.
RECORDS_FUNCTION bool is_lattice_mode(int mode) {
  return mode == DRAFT_MODE_CHAIN_LATTICE || mode == DRAFT_MODE_TREE_LATTICE;
}

// Returns whether the grammar tests candidate ids instead of filling mask rows for the drafts.
RECORDS_FUNCTION bool is_probe_mode(int mode) {
  return mode == DRAFT_MODE_CHAIN_PROBE || mode == DRAFT_MODE_TREE_PROBE || is_lattice_mode(mode);
}

// Returns whether drafts contain only tokens that the grammar accepts.
RECORDS_FUNCTION bool is_masked_mode(int mode) {
  return mode == DRAFT_MODE_CHAIN_FILL || is_probe_mode(mode);
}

// Returns whether the drafts form a tree that grows level by level.
RECORDS_FUNCTION bool is_growing_tree_mode(int mode) {
  return mode == DRAFT_MODE_TREE || mode == DRAFT_MODE_TREE_PROBE;
}

// Result of one batch row of a replay. Two arrays of `width` = maximum drafts + 1 entries follow
// the struct: the tokens, and for each token the number of the forward row whose logits determined
// it. The forward rows of a batch row are numbered from 0.
struct RoundRow {
  int slot;      // request slot of the row; -1: the row is padding
  int count;     // committed tokens
  int reason;    // REASON_*
  int accepted;  // drafts among the committed tokens
  int tested;    // drafts that were verified
  int cut;       // drafts that were not verified, because the round had no rows for them
  int relaxed;   // accepted drafts that exact verification would have rejected
  int old_n;     // position of the slot's last token before the round
};

// Layout of a field of the output ring, in 32-bit words. A replay writes entry `replay % entries`.
struct OutputLayout {
  int entries;  // number of entries
  int stride;   // distance from one entry to the next
  int rows;     // batch rows per entry
  int row;      // words per batch row
};
