// What the host, the C++ grammar worker and the kernels exchange: stated here and nowhere else.
// Kernels and worker include this text; Python reads its structs and numbers
// (cudagraph/cstruct.py).
#pragma once

// State of a mask row.
#define ROW_NOT_READY 0
#define ROW_FREE 1
#define ROW_READY 2
#define ROW_DEAD_END 3
#define ROW_ERROR 4

// Why verification ended a request.
#define REASON_NONE 0
#define REASON_STOP 1
#define REASON_LENGTH 2
#define REASON_DEAD_END 3
#define REASON_ERROR 4

// Stamp of a mask row. It masks the token after `position`. `more` of a free row: 1 if the request
// has no grammar at all. Of a ready row: 1 + the token that the grammar forces there, or 0.
struct RowStamp {
  int state;
  int epoch;
  int position;
  int more;
};

// Tokens that a replay committed to a slot; `rows` ids follow.
struct Committed {
  int replay;
  int count;
};

// Drafts that follow a slot's committed tokens; `drafts` ids follow, and as many parents: the row
// that each hangs on, where row 0 is the last committed token and row j is draft j. While a tree
// grows they are the nodes that its drafter is fed; one that is not there has id -1.
struct Drafted {
  int replay;
  int count;
};

// Ids that the grammar is to test for draft `draft`, best first; `candidates` ids follow. Of a tree
// `draft` is the level and `count` its nodes, each with as many ids; a node's end at the first -1.
// Where those of all levels come at once `draft` is how many drafts are wanted and `count` the
// levels, which end alike; behind the ids of `levels` levels stand their probabilities, floats.
struct Candidates {
  int replay;
  int draft;
  int count;
};

// The first legal candidate; -1: none is, and the mask row of the draft was filled. Of a tree
// `branch` words follow, one for each node: bit i is set if its candidate i is legal. To all levels
// at once `draft` is 0, and `id` drafts follow as in their record.
struct Answer {
  int replay;
  int draft;
  int id;
};

// Where a slot's records lie in its part of pinned memory: 32-bit words from the slot's first word.
// What the device writes and what the host writes share no cache line.
struct ExchangeLayout {
  int slots;
  int stride;      // words from slot to slot
  int rows;        // mask rows of a slot: one more than its drafts
  int words;       // of a mask row
  int candidates;  // of a draft, or of a node of a tree that grows
  int drafts;      // that the record of drafts has room for
  int branch;      // nodes of a level, or most drafts under one; 1: a chain
  int levels;      // whose candidates come at once; 0: they come one by one
  int stamps;      // RowStamp[rows]
  int committed;
  int drafted;
  int candidate_ids;  // Candidates
  int answer;
  int masks;  // of all slots, behind their parts: [rows][slots][words]
};

// What a replay brought to one row of its batch; `width` tokens follow, and as many rows: the one
// whose logits decided each token.
struct RoundRow {
  int slot;      // -1: padding
  int count;     // tokens committed
  int reason;    // REASON_*
  int accepted;  // drafts among the tokens
  int tested;    // drafts there were
  int cut;       // drafts that the round had no place for
  int old_n;     // position of the slot's last token before
};

// The output ring: entry `replay % entries`, `stride` words apart, rows `row` words apart.
struct OutputLayout {
  int entries;
  int stride;
  int rows;
  int row;
};
