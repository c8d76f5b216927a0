// Machines (automata with a stack) in device memory, and the states of the requests that use them.
// native/guide/automaton/machine.h says what a machine is.
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
#define NODE_ERROR -3    // row 0 only: a committed token is illegal, or its stack is too deep

// Values of FillItem.action.
#define FILL_NOTHING 0
#define FILL_STAMP 1  // only write the stamp
#define FILL_ROW 2    // write the mask row and the stamp

// Maximum number of rows of the row cache that are examined for eviction. If none of them can be
// evicted, the new row is not stored.
#define CACHE_TRIES 64

#define AUTOMATON_STOPS 64  // maximum number of stop ids in an AutomatonSlot
#define AUTOMATON_NODES 65  // MAX_DRAFTS + 1

#define AUTOMATON_DEPTH 64    // maximum number of entries on the stack of a node
#define AUTOMATON_STACK 4160  // AUTOMATON_NODES * AUTOMATON_DEPTH

// Maximum number of entries that one token may push. Requests are not promoted if the vocabulary
// has a token with more opening brackets.
#define AUTOMATON_PUSHES 64

// FillItem.limit of rows that allow all legal tokens.
#define NO_LIMIT 2147483647

// Header of a machine's table. These arrays follow it without gaps; AutomatonGrammar.table()
// (native/guide/automaton/bind.cpp) describes those that are not described here:
// * uint8 [256]: class of each byte.
// * int32 [states]: row of each state in the row cache, or ROW_ABSENT or ROW_CLAIMED.
// * int32 [states]: distance of each state.
// * int32 [entries]: cost of each entry.
// * int32 [entries + 1]: index of the first return of each entry.
// * int32 [counts][3]: (limit, next state below the limit, next state at the limit).
// * int32 [states], only if there are counts: smallest value of the counter from which on a token
//   may make the counter reach a limit; NO_LIMIT in states that do not count.
// * int16 [states][classes]: next state, -1 if the byte is illegal, or -2 - the number of an
// action.
// * int16 [actions][2]: (entry, next state) to push an entry, or (ACTION_*, target).
// * int16 [returns][2]: (exit, next state).
// * uint8 [states]: whether the state is accepting.
#define ACTION_POP -1    // pop the top entry; the target is an exit
#define ACTION_COUNT -2  // increment the counter; the target is the number of a count
#define ACTION_RESET -3  // set the counter to 0; the target is the next state
#define ROW_ABSENT -1
#define ROW_CLAIMED -2  // a thread of the running kernel is assigning a row to the state
struct AutomatonTable {
  int states;
  int classes;
  int entries;
  int actions;
  int returns;
  int counts;
  int pops;  // whether a byte pops an entry
  // Upper bound of the distance of the position after any token, without the costs of the stack
  // entries that existed before the token.
  int largest_step;
};

// A request that joins the batch, as automaton_join receives it. The fields of AutomatonSlot with
// the same names describe them; `state`, `count`, `depth` and `stack` are those of the last
// committed token.
struct AutomatonRequest {
  long long table;
  long long cost;
  int epoch;
  int closing_end;
  int num_stop_ids;
  int state;
  int count;
  int depth;
  int stop_ids[AUTOMATON_STOPS];
  int stack[AUTOMATON_DEPTH];
};

// Grammar state of a request whose machine runs on the device (a promoted request). The request of
// a slot is promoted if and only if its epoch equals the `epoch` of the slot's AutomatonSlot.
struct AutomatonSlot {
  long long table;  // offset of an AutomatonTable in the memory of all tables
  int epoch;        // epoch of the request, see Slot
  int applied;      // last replay whose commit was applied to node 0
  int drafted;      // replay in which the rows marked in `filled` were filled
  // If mask rows have a budget, the output must be complete before the position `closing_end`, and
  // the mask row after the token at position p has the budget closing_end - p - 1
  // (native/guide/matcher.h). Otherwise, `closing_end` is -1.
  int closing_end;
  int narrowed;  // whether a budget has excluded legal tokens from a row of the request
  int num_stop_ids;
  int stop_ids[AUTOMATON_STOPS];  // ids that end the text in an accepting state
  // The following arrays have an element for each node of the draft tree: node 0 is the last
  // committed token, node j is draft j.
  int state[AUTOMATON_NODES];       // state of the machine, or NODE_*
  int count[AUTOMATON_NODES];       // value of the counter
  int filled[AUTOMATON_NODES];      // whether the mask row of the node is filled
  int depth[AUTOMATON_NODES];       // number of entries on the stack
  long long cost[AUTOMATON_NODES];  // sum of the costs of these entries (distances.h)
  int stack[AUTOMATON_STACK];       // entries of node j, from j * AUTOMATON_DEPTH, the top last
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
  // Largest distance of the positions to which tokens of the row may lead, or NO_LIMIT.
  int limit;
  // Whether the row may be read from the cache and stored in it. A row with a limit, or whose
  // tokens may make the counter reach a limit, is not shared.
  int shared;
  // Number of legal ids, summed by the blocks that share the row. If automaton_fill does not look
  // for forced tokens, it is not counted exactly; it is positive if and only if an id is legal.
  int num_legal;
  int last_legal;        // largest legal id, if automaton_fill looks for forced tokens
  int narrowed;          // whether the limit has excluded a legal token, as far as blocks know
  unsigned int arrived;  // number of blocks that have finished their part of the row
};

// Row cache: mask rows of states, without the bits of stop ids, which differ between requests. If
// the machine pops entries, a cached row also has no bits of tokens that contain a closing byte
// (Tables.closing), because these bits depend on the stack. automaton_fill tests these tokens anew
// for each row.
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
  // Number of rows from which a budget has excluded legal tokens, and number of requests with such
  // rows.
  unsigned int narrowed_rows;
  unsigned int closed;
};

struct CachedRow {
  long long table;  // as in AutomatonSlot; -1: the row is free
  int state;
  int referenced;     // whether a kernel has found the row since `hand` passed it
  unsigned int used;  // number of the last kernel that has found or assigned the row
};

// Tables of all machines, and the bytes of the tokens of the vocabulary: token i < num_tokens has
// bytes offsets[i] to offsets[i + 1]. Greater ids have no text. `closing` is a mask row: its bits
// are set for the tokens that contain a byte which may pop an entry.
struct Tables {
  unsigned char* memory;
  const int* offsets;
  const unsigned char* bytes;
  const unsigned int* closing;
  int num_tokens;
};

// Position of a machine in a text: its state, counter and stack. `below` points to the `depth`
// entries of the stack, the top last.
struct Position {
  int state;
  int count;
  int depth;
  long long cost;  // sum of the costs of the stack's entries (distances.h)
  const int* below;
};

__device__ __forceinline__ Position position_of(const AutomatonSlot& slot, int node) {
  return {slot.state[node], slot.count[node], slot.depth[node], slot.cost[node],
          slot.stack + node * AUTOMATON_DEPTH};
}

// Position that moves on without changing the stack that it began with, which other threads read
// too: the stack consists of the lower `kept` entries of that stack, and of `pushed` entries.
struct MovingPosition {
  int state;
  int count;
  int kept;
  int pushed;
  long long cost;
  const int* below;
  short above[AUTOMATON_PUSHES];

  __device__ __forceinline__ explicit MovingPosition(const Position& from)
      : state(from.state),
        count(from.count),
        kept(from.depth),
        pushed(0),
        cost(from.cost),
        below(from.below) {}

  __device__ __forceinline__ int depth() const { return kept + pushed; }
};

struct Automaton {
  Tables tables;
  const unsigned char* byte_class;
  int* rows;
  const int* distance;
  const int* entry_cost;
  const int* returns_begin;
  const int* counts;
  const int* near;
  const short* next;
  const short* actions;
  const short* returns;
  const unsigned char* accepting;
  int classes;
  int num_counts;
  int pops;
  int largest_step;

  __device__ __forceinline__ Automaton(const Tables& all, long long offset) : tables(all) {
    unsigned char* memory = all.memory + offset;
    const AutomatonTable* table = reinterpret_cast<const AutomatonTable*>(memory);
    const long long states = table->states;
    classes = table->classes;
    num_counts = table->counts;
    pops = table->pops;
    largest_step = table->largest_step;
    byte_class = memory + sizeof(AutomatonTable);
    rows = reinterpret_cast<int*>(memory + sizeof(AutomatonTable) + 256);
    distance = rows + states;
    entry_cost = distance + states;
    returns_begin = entry_cost + table->entries;
    counts = returns_begin + table->entries + 1;
    near = counts + 3 * table->counts;
    next = reinterpret_cast<const short*>(near + (table->counts > 0 ? states : 0));
    actions = next + states * classes;
    returns = actions + 2 * table->actions;
    accepting = reinterpret_cast<const unsigned char*>(returns + 2 * table->returns);
  }

  // Whether a token may make the counter reach a limit.
  __device__ __forceinline__ bool is_near_limit(int state, int count) const {
    return num_counts > 0 && count >= near[state];
  }

  // Reads a byte with an action. Returns whether it is legal.
  __device__ inline bool act(MovingPosition& at, int action) const {
    const int entry = actions[2 * action];
    const int target = actions[2 * action + 1];
    if (entry == ACTION_COUNT) {
      const int* own = counts + 3 * target;
      at.count += 1;
      at.state = at.count < own[0] ? own[1] : own[2];
      return true;
    }
    at.count = 0;
    if (entry != ACTION_POP) {
      at.state = target;
      if (entry == ACTION_RESET) return true;
      at.above[at.pushed++] = static_cast<short>(entry);
      at.cost += entry_cost[entry];
      return true;
    }
    if (at.depth() == 0) return false;
    const int top = at.pushed > 0 ? at.above[--at.pushed] : at.below[--at.kept];
    at.cost -= entry_cost[top];
    at.state = -1;
    for (int i = returns_begin[top]; i < returns_begin[top + 1]; ++i) {
      if (returns[2 * i] == target) at.state = returns[2 * i + 1];
    }
    return at.state >= 0;
  }

  // Reads the text of a token. Returns whether the token has text and is legal.
  __device__ __forceinline__ bool walk(MovingPosition& at, int token) const {
    if (token < 0 || token >= tables.num_tokens) return false;
    const int end = tables.offsets[token + 1];
    int i = tables.offsets[token];
    if (i == end) return false;
    for (; i < end; ++i) {
      const int code = next[at.state * classes + byte_class[tables.bytes[i]]];
      if (code >= 0) {
        at.state = code;
      } else if (code == -1 || !act(at, -2 - code)) {
        return false;
      }
    }
    return true;
  }

  __device__ __forceinline__ long long distance_of(const MovingPosition& at) const {
    return distance[at.state] + at.cost;
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
