// Automata of regular grammars in device memory, and the states of the requests that use them.
//
// For these requests, kernels do the work of the grammar worker (native/guide/worker.h). They
// advance the states by committed tokens and drafts, fill mask rows and write the stamp of each
// row, which says whether the row is ready (RowStamp). They write the same rows and stamps in the
// same order as the worker, so the kernels that read mask rows need not know which of the two has
// written them.
#pragma once

#include "sampling/kernels/slot.cuh"

// AutomatonSlot.state: a state of the automaton, or one of these values.
#define NODE_ILLEGAL -1  // the draft is illegal, or no token may follow it
#define NODE_ENDED -2    // row 0 only: the text is complete
#define NODE_ERROR -3    // row 0 only: verification committed an illegal token

// Values of FillItem.action.
#define FILL_NOTHING 0
#define FILL_STAMP 1  // only write the stamp
#define FILL_ROW 2    // write the mask row and the stamp

// Maximum number of rows of the row cache that are examined for eviction. If none of them can be
// evicted, the new row is not stored.
#define CACHE_TRIES 64

#define AUTOMATON_STOPS 64  // maximum number of stop ids in an AutomatonSlot
#define AUTOMATON_NODES 65  // MAX_DRAFTS + 1

// Header of an automaton's table. These arrays follow it without gaps:
// * uint8 [256]: class of each byte.
// * int32 [states]: row of each state in the row cache, or ROW_ABSENT or ROW_CLAIMED.
// * int16 [states][classes]: next state, or -1 if the byte is illegal.
// * uint8 [states]: whether the state is accepting.
#define ROW_ABSENT -1
#define ROW_CLAIMED -2  // a thread of the running kernel is assigning a row to the state
struct AutomatonTable {
  int states;
  int classes;
};

// Grammar state of a request whose automaton runs on the device (a promoted request). The request
// of a slot is promoted if and only if its epoch equals the `epoch` of the slot's AutomatonSlot.
// Python reads the layout of this struct from this header (device.py) and passes the struct to
// automaton_join by value.
struct AutomatonSlot {
  long long table;  // offset of an AutomatonTable in the memory of all tables
  int epoch;        // epoch of the request, see Slot
  int applied;      // last replay whose commit was applied to state[0]
  int drafted;      // replay in which the rows marked in `filled` were filled
  int num_stop_ids;
  int stop_ids[AUTOMATON_STOPS];  // ids that end the text in an accepting state
  int state[AUTOMATON_NODES];     // automaton state or NODE_* of each node of the draft tree
  int filled[AUTOMATON_NODES];    // whether the mask row of each node is filled
};

// Describes the work for one mask row. The kernels that advance states write the items, and
// `automaton_fill` executes them.
struct FillItem {
  long long table;  // as in AutomatonSlot
  int action;       // FILL_*
  int slot;
  int j;         // number of the mask row
  int state;     // state of the automaton
  int stamp;     // for FILL_STAMP: the row state (ROW_*) to write into the stamp
  int source;    // row of the cache to copy; -1: compute the row
  int store;     // row of the cache to store the computed row in; -1: none
  int position;  // position of the token before the token that the row constrains
  // Number of legal ids, summed by the blocks that share the row. If automaton_fill does not look
  // for forced tokens, it is not counted exactly; it is positive if and only if an id is legal.
  int num_legal;
  int last_legal;        // largest legal id, if automaton_fill looks for forced tokens
  unsigned int arrived;  // number of blocks that have finished their part of the row
};

// Row cache: mask rows of automaton states, without the bits of stop ids, which differ between
// requests.
//
// 1. Only the kernels that advance states (automaton_open, automaton_commit and automaton_draft)
//    assign cache rows to states. They run one after another, with one block each. `launch` counts
//    them; below, kernel n is the one with number n.
// 2. A row that kernel n assigns is written by the automaton_fill that follows it, and may be read
//    from kernel n + 1 on.
// 3. A row that kernel n has found or assigned is not assigned to another state by kernel n,
//    because the automaton_fill that follows reads or writes the row.
// 4. Between two kernels, the array of rows in the table of each automaton agrees with the array of
//    CachedRow: state s of table t has row r if and only if CachedRow r has table t and state s.
//    automaton_forget removes the rows of a table before the table's memory is reused.
struct RowCache {
  unsigned int launch;  // number of the last kernel that has used the cache
  unsigned int hand;    // next row to examine for eviction
  // Numbers of mask rows that the kernels have found in the cache (hits), not found (misses),
  // stored in it and evicted from it.
  unsigned int hits;
  unsigned int misses;
  unsigned int stored;
  unsigned int evicted;
  // Number of accepted drafts that the grammar forced.
  unsigned int forced;
};

struct CachedRow {
  long long table;  // as in AutomatonSlot; -1: the row is free
  int state;
  int referenced;     // whether a kernel has found the row since `hand` passed it
  unsigned int used;  // number of the last kernel that has found or assigned the row
};

// Tables of all automata, and the bytes of the tokens of the vocabulary: token i < num_tokens has
// bytes offsets[i] to offsets[i + 1]. Greater ids have no text.
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

  // Returns the state after the text of a token, or NODE_ILLEGAL if the token is illegal or has no
  // text.
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

// Writes the stamp of mask row j of a slot, as Worker::stamp does on the host.
__device__ __forceinline__ void write_stamp(int* exchange, const ExchangeLayout& x, int slot, int j,
                                            int state, int epoch, int position, int detail) {
  RowStamp* stamp = reinterpret_cast<RowStamp*>(record_of(exchange, x, slot, x.stamps)) + j;
  *stamp = {state, epoch, position, detail};
}
