// Automata of regular grammars in device memory, and the states of the requests that use them.
//
// The device does the work of the grammar worker (native/guide/worker.h) for these requests. It
// advances the states by committed tokens and drafts, fills mask rows and stamps them. It
// writes the same rows and stamps in the same order, so the kernels that read them need not
// distinguish the two cases.
#pragma once

#include "sampling/kernels/slot.cuh"

// AutomatonSlot.state: a state of the automaton, or one of these values.
#define NODE_ILLEGAL -1  // the draft is illegal, or no token may follow it
#define NODE_ENDED -2    // row 0 only: the text is complete
#define NODE_ERROR -3    // row 0 only: verification committed an illegal token

// FillItem.action
#define FILL_NOTHING 0
#define FILL_STAMP 1  // only write the stamp
#define FILL_ROW 2    // write the mask row and the stamp

// Rows of the row cache that are considered for eviction before a row is not stored.
#define CACHE_TRIES 64

#define AUTOMATON_STOPS 64
#define AUTOMATON_NODES 65  // MAX_DRAFTS + 1

// Header of an automaton's table. Arrays follow it without gaps: the class of each byte, uint8
// [256]; the number of each state's row in the row cache or ROW_ABSENT or ROW_CLAIMED, int32
// [states]; the next state or -1, int16 [states][classes]; whether the state is accepting, uint8
// [states].
#define ROW_ABSENT -1
#define ROW_CLAIMED -2  // a thread of the running kernel looks for a row
struct AutomatonTable {
  int states;
  int classes;
};

// Grammar state of a promoted request. The request of a slot is promoted exactly if it has the
// epoch of the slot's AutomatonSlot. Python reads this struct by field name (device.py); a join
// passes it by value.
struct AutomatonSlot {
  long long table;  // offset of an AutomatonTable in the memory of all tables
  int epoch;        // epoch of the request, see Slot
  int applied;      // last replay whose commit was applied to state[0]
  int drafted;      // replay that has filled the rows in `filled` while it drafted
  int num_stop_ids;
  int stop_ids[AUTOMATON_STOPS];  // ids that end the text in an accepting state
  int state[AUTOMATON_NODES];     // state of each node of the draft tree
  int filled[AUTOMATON_NODES];    // whether the row of the node is filled
};

// Work for one mask row, from the kernels that advance states to `automaton_fill`.
struct FillItem {
  long long table;  // as in AutomatonSlot
  int action;       // FILL_*
  int slot;
  int j;           // number of the mask row
  int state;       // state of the automaton
  int stamp;       // ROW_* to stamp with FILL_STAMP
  int source;      // row of the cache to copy; -1: compute the row
  int store;       // row of the cache to store the computed row in; -1: none
  int position;    // position of the token before the masked one
  int num_legal;   // legal ids, counted by the blocks that share the row; without forced tokens,
                   // this is only 0 if no id is legal
  int last_legal;  // largest legal id
  unsigned int arrived;
};

// Row cache: mask rows of states, without the bits of stop ids, which differ between requests.
//
// 1. Only the kernels that advance states assign rows. They run one after another, with one block
//    each, and have numbers (`launch`).
// 2. A row that kernel n assigns is written by the automaton_fill that follows it, and may be read
//    from kernel n + 1 on.
// 3. A row that kernel n has found or assigned is not assigned again by kernel n, because the
//    automaton_fill that follows reads or writes it.
// 4. AutomatonTable.rows and CachedRow agree between kernels: state s of table t has row r exactly
//    if row r has table t and state s. automaton_forget removes a table before its memory is
//    reused.
struct RowCache {
  unsigned int launch;
  unsigned int hand;  // next row to consider for eviction
  // Counts of rows.
  unsigned int hits;
  unsigned int misses;
  unsigned int stored;
  unsigned int evicted;
  // Count of accepted drafts that the grammar forced.
  unsigned int forced;
};

struct CachedRow {
  long long table;  // as in AutomatonSlot; -1: the row is free
  int state;
  int referenced;     // whether the row was found since the hand passed it
  unsigned int used;  // number of the last kernel that has found or assigned the row
};

// Tables of all automata, and the bytes of the tokens of the vocabulary: token i has bytes
// offsets[i] to offsets[i + 1]. Ids from `num_tokens` have no text.
struct Tables {
  unsigned char* memory;
  const int* offsets;
  const unsigned char* bytes;
  int num_tokens;
};

struct Automaton {
  Tables tables;
  const unsigned char* byte_class;
  int* rows;
  const short* next;
  const unsigned char* accepting;
  int classes;

  __device__ __forceinline__ Automaton(const Tables& all, long long offset) : tables(all) {
    unsigned char* memory = all.memory + offset;
    const AutomatonTable* table = reinterpret_cast<const AutomatonTable*>(memory);
    const long long states = table->states;
    classes = table->classes;
    byte_class = memory + sizeof(AutomatonTable);
    rows = reinterpret_cast<int*>(memory + sizeof(AutomatonTable) + 256);
    next = reinterpret_cast<const short*>(rows + states);
    accepting = reinterpret_cast<const unsigned char*>(next + states * classes);
  }

  // Returns the state after the text of a token, or NODE_ILLEGAL.
  __device__ __forceinline__ int walk(int state, int token) const {
    if (token < 0 || token >= tables.num_tokens) return NODE_ILLEGAL;
    const int end = tables.offsets[token + 1];
    int i = tables.offsets[token];
    if (i == end) return NODE_ILLEGAL;
    for (; i < end && state >= 0; ++i) state = next[state * classes + byte_class[tables.bytes[i]]];
    return state;
  }
};

__device__ __forceinline__ bool is_ending(const AutomatonSlot& slot, int token) {
  bool found = false;
  for (int i = 0; i < slot.num_stop_ids; ++i) found = found || slot.stop_ids[i] == token;
  return found;
}

// Writes a stamp as Worker::stamp does.
__device__ __forceinline__ void write_stamp(int* exchange, const ExchangeLayout& x, int slot, int j,
                                            int state, int epoch, int position, int detail) {
  RowStamp* stamp = reinterpret_cast<RowStamp*>(record_of(exchange, x, slot, x.stamps)) + j;
  *stamp = {state, epoch, position, detail};
}
