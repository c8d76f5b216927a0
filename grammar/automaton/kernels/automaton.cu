// Grammar steps of requests whose grammar is an automaton on the device. A step is a kernel of one
// block that advances states, one thread per batch row, followed by `automaton_fill`, which fills
// the mask rows that the step needs.
//
// BLOCK, the number of threads per block, is set when the kernels are compiled: large on a GPU, 1
// on the soft device, where a barrier costs more than the work that it separates. Results do not
// depend on it.
#include "automaton.cuh"

#ifdef __SOFTCUDA__
#pragma softcuda quick
#endif

#ifndef BLOCK
#define BLOCK 128
#endif

constexpr int LANES = BLOCK < 32 ? BLOCK : 32;  // threads per mask word
static_assert(BLOCK == 1 || BLOCK % 32 == 0, "BLOCK is 1 or a multiple of 32");

__device__ __forceinline__ void block_sync() {
  if (BLOCK > 1) __syncthreads();
}

// Arguments common to all kernels that advance states.
struct Advance {
  const int* row_slot;
  const Slot* slots;
  AutomatonSlot* states;
  int* exchange;
  const ExchangeLayout& layout;
  Tables tables;
  int replay;
  FillItem* items;
  RowCache* cache;
  CachedRow* rows;
  unsigned int num_rows;  // number of rows in the cache
};

// Writes the AutomatonSlot of a request that joins the batch in `slot`. Also overwrites the slot's
// Committed record, because the previous request's record may contain a replay number that compares
// as later than this replay.
extern "C" __global__ void automaton_join(AutomatonSlot* states, int slot, const int* replay,
                                          int* exchange, const ExchangeLayout layout,
                                          const AutomatonRequest request) {
  AutomatonSlot& own = states[slot];
  own.table = request.table;
  own.epoch = request.epoch;
  own.applied = *replay;
  own.drafted = 0;
  own.closing_end = request.closing_end;
  own.narrowed = 0;
  own.num_stop_ids = request.num_stop_ids;
  for (int i = 0; i < request.num_stop_ids; ++i) own.stop_ids[i] = request.stop_ids[i];
  for (int j = 0; j < AUTOMATON_NODES; ++j) own.filled[j] = 0;
  own.state[0] = request.state;
  own.count[0] = request.count;
  own.depth[0] = request.depth;
  own.cost[0] = request.cost;
  for (int i = 0; i < request.depth; ++i) own.stack[i] = request.stack[i];
  int* committed = record_of(exchange, layout, slot, layout.committed);
  *reinterpret_cast<Committed*>(committed) = {*replay, 0};
}

// Counts the accepted drafts of a chain that were forced tokens, that is, the only legal id of
// their mask row. The stamp of a row contains this id, so the function must be called before
// commit() invalidates the stamps. Inactive slots are counted, too, because verification may have
// ended the request.
__device__ inline void count_forced(const Advance& a, const RoundRow* row) {
  const int index = row->slot;
  if (index < 0) return;
  const int* ids = reinterpret_cast<const int*>(row + 1);
  const int num_drafts = row->count < row->tested ? row->count : row->tested;
  for (int i = 0; i < num_drafts; ++i) {
    const RowStamp stamp = read_stamp(a.exchange, a.layout, index, i);
    const bool current = stamp.epoch == a.states[index].epoch && stamp.state == ROW_READY;
    if (current && stamp.detail == 1 + ids[i]) atomicAdd(&a.cache->forced, 1u);
  }
}

// Stores `at`, which has moved on from the position of node `from`, as the position of node `to`.
// Returns false if its stack is too deep to be stored.
__device__ __forceinline__ bool store_position(AutomatonSlot& own, int from, int to,
                                               const MovingPosition& at) {
  if (at.depth() > AUTOMATON_DEPTH) return false;
  int* stack = own.stack + to * AUTOMATON_DEPTH;
  if (from != to) {
    for (int i = 0; i < at.kept; ++i) stack[i] = at.below[i];
  }
  for (int i = 0; i < at.pushed; ++i) stack[at.kept + i] = at.above[i];
  own.state[to] = at.state;
  own.count[to] = at.count;
  own.depth[to] = at.depth();
  own.cost[to] = at.cost;
  return true;
}

// Advances node 0 of slot `index` by the committed tokens `ids`, and invalidates the stamps of all
// mask rows of the slot. The state becomes NODE_ERROR after an illegal token, and if the stack has
// become too deep for the device. The scheduler then runs the request's grammar steps on the host.
__device__ inline void commit(const Advance& a, int index, const int* ids, int count, int replay) {
  AutomatonSlot& own = a.states[index];
  const Automaton automaton(a.tables, own.table);
  for (int i = 0; i < count; ++i) {
    const int token = ids[i];
    const int state = own.state[0];
    if (state < 0) {
      own.state[0] = NODE_ERROR;
    } else if (is_ending(own, token)) {
      own.state[0] = automaton.accepting[state] != 0 ? NODE_ENDED : NODE_ERROR;
    } else {
      MovingPosition at(position_of(own, 0));
      const bool legal = automaton.walk(at, token);
      if (!legal || !store_position(own, 0, 0, at)) own.state[0] = NODE_ERROR;
    }
  }
  own.applied = replay;
  for (int j = 0; j < a.layout.rows; ++j) {
    own.filled[j] = 0;
    write_stamp(a.exchange, a.layout, index, j, ROW_NOT_READY, own.epoch, 0, 0);
  }
}

// Returns the budget of mask row j: the number of tokens that may follow node j, a stop id
// included. Returns NO_LIMIT if the output need not be complete.
__device__ __forceinline__ int budget_of(const Slot& slot, const AutomatonSlot& own, int j) {
  return own.closing_end < 0 ? NO_LIMIT : own.closing_end - (slot.n + depth_of(slot, j)) - 1;
}

// Computes the position of draft j from that of its parent and the token of the draft. The state
// becomes NODE_ILLEGAL, and the mask row of the draft is not filled, if the draft is illegal or a
// stop id, which has no text, if its stack is too deep for the device, or if the text after it
// cannot be completed within the budget.
__device__ __forceinline__ void enter(const Advance& a, const Slot& slot, AutomatonSlot& own,
                                      int j) {
  const int parent = slot.parent[j - 1];
  own.state[j] = NODE_ILLEGAL;
  if (own.state[parent] < 0) return;
  const Automaton automaton(a.tables, own.table);
  MovingPosition at(position_of(own, parent));
  if (!automaton.walk(at, slot.drafts[j - 1])) return;
  const int budget = budget_of(slot, own, j);
  if (budget != NO_LIMIT && automaton.distance_of(at) > budget) return;
  store_position(own, parent, j, at);
}

// Describes mask row j in `item`, so that automaton_fill fills the row, and marks the row as
// filled. Does nothing if the state of draft j is NODE_ILLEGAL.
__device__ __forceinline__ void request_row(const Advance& a, const Slot& slot, AutomatonSlot& own,
                                            int index, int j, FillItem* item) {
  const int state = own.state[j];
  if (state == NODE_ILLEGAL) return;
  item->action = state >= 0 ? FILL_ROW : FILL_STAMP;
  item->stamp = state == NODE_ERROR ? ROW_ERROR : ROW_DEAD_END;
  item->table = own.table;
  item->slot = index;
  item->j = j;
  item->state = state;
  item->position = slot.n + depth_of(slot, j);
  item->source = item->store = -1;
  item->limit = NO_LIMIT;
  item->shared = 0;
  if (state >= 0) {
    const int budget = budget_of(slot, own, j);
    const Automaton automaton(a.tables, own.table);
    if (budget != NO_LIMIT && automaton.largest_step + own.cost[j] > budget - 1) {
      item->limit = budget - 1;
    }
    item->shared = item->limit == NO_LIMIT && !automaton.is_near_limit(state, own.count[j]);
  }
  own.filled[j] = 1;
}

__device__ __forceinline__ bool uses_cache(const FillItem& item) {
  return item.action == FILL_ROW && item.shared != 0;
}

// Returns the grammar state of a batch row's request. Returns null if the state is not on the
// device (the request is not promoted).
__device__ __forceinline__ AutomatonSlot* state_of(const Advance& a, int b) {
  const int index = a.row_slot[b];
  if (index < 0 || !a.slots[index].active) return nullptr;
  AutomatonSlot* own = a.states + index;
  return own->epoch == a.slots[index].epoch ? own : nullptr;
}

// Looks up the mask row of an item's state in the cache, and counts a hit or a miss.
__device__ __forceinline__ void find_row(const Advance& a, FillItem& item, unsigned int now) {
  const int r = Automaton(a.tables, item.table).rows[item.state];
  const bool found = r >= 0;
  if (found) {
    item.source = r;
    atomicExch(&a.rows[r].referenced, 1);
    atomicExch(&a.rows[r].used, now);
  }
  atomicAdd(found ? &a.cache->hits : &a.cache->misses, 1u);
}

// Assigns a row of the cache to the state of an item (clock algorithm). Does nothing if another
// thread has assigned a row to this state or is doing so.
__device__ inline void assign_row(const Advance& a, FillItem& item, unsigned int now) {
  int* own = Automaton(a.tables, item.table).rows + item.state;
  if (atomicCAS(own, ROW_ABSENT, ROW_CLAIMED) != ROW_ABSENT) return;
  for (int i = 0; i < CACHE_TRIES; ++i) {
    const int r = static_cast<int>(atomicAdd(&a.cache->hand, 1u) % a.num_rows);
    CachedRow& row = a.rows[r];
    const unsigned int used = atomicAdd(&row.used, 0u);
    if (used == now) continue;
    if (atomicExch(&row.referenced, 0) != 0) continue;
    if (atomicCAS(&row.used, used, now) != used) continue;
    if (row.table >= 0) {
      atomicExch(Automaton(a.tables, row.table).rows + row.state, ROW_ABSENT);
      atomicAdd(&a.cache->evicted, 1u);
    }
    row.table = item.table;
    row.state = item.state;
    atomicAdd(&a.cache->stored, 1u);
    item.store = r;
    atomicExch(own, r);
    return;
  }
  atomicExch(own, ROW_ABSENT);
}

// Each item (FillItem) is a mask row that the following automaton_fill fills. For each item that
// this kernel has written, finds the cached mask row of the item's state, or assigns a row of the
// cache to it. All threads of the block must call this function.
__device__ inline void use_cache(const Advance& a, int num_items) {
  if (a.num_rows == 0) return;
  block_sync();  // all threads have written their items
  const unsigned int now = a.cache->launch + 1;
  for (int i = static_cast<int>(threadIdx.x); i < num_items; i += BLOCK) {
    if (uses_cache(a.items[i])) find_row(a, a.items[i], now);
  }
  block_sync();  // find all rows before assigning any (rules 2 and 3 of RowCache in automaton.cuh)
  if (threadIdx.x == 0) a.cache->launch = now;
  for (int i = static_cast<int>(threadIdx.x); i < num_items; i += BLOCK) {
    FillItem& item = a.items[i];
    if (uses_cache(item) && item.source < 0) assign_row(a, item, now);
  }
}

// Removes the rows of a table from the cache. The kernel must be launched with one block.
extern "C" __global__ void automaton_forget(unsigned char* memory, long long table,
                                            CachedRow* cached) {
  const Automaton automaton({memory, nullptr, nullptr, nullptr, 0}, table);
  const int states = reinterpret_cast<const AutomatonTable*>(memory + table)->states;
  for (int s = static_cast<int>(threadIdx.x); s < states; s += BLOCK) {
    const int r = automaton.rows[s];
    if (r < 0) continue;
    cached[r].table = -1;
    cached[r].referenced = 0;
  }
}

// Returns word w of a mask row: bit i is set if `tested` has bit i, token 32 * w + i is legal at a
// position, and leads to a distance of at most `limit`. Sets `narrowed` if the limit has excluded
// a legal token. All threads of a warp must call this function with the same arguments.
__device__ __forceinline__ unsigned int legal_word(const Automaton& automaton, const Position& from,
                                                   int w, unsigned int tested, int limit,
                                                   bool& narrowed) {
  const auto is_legal = [&](int i) {
    if ((tested >> i & 1u) == 0) return false;
    MovingPosition at(from);
    if (!automaton.walk(at, w * 32 + i)) return false;
    if (limit == NO_LIMIT || automaton.distance_of(at) <= limit) return true;
    narrowed = true;
    return false;
  };
  if (LANES > 1) return __ballot_sync(FULL_WARP, is_legal(static_cast<int>(threadIdx.x) % LANES));
  unsigned int word = 0;
  if (tested == 0) return word;
  for (int i = 0; i < 32; ++i) word |= static_cast<unsigned int>(is_legal(i)) << i;
  return word;
}

// Adds the number of legal ids of mask word w to `legal`, and sets `last` to the largest of them if
// it is larger.
__device__ __forceinline__ void count_ids(unsigned int word, int w, int& legal, int& last) {
  if (word == 0) return;
  legal += __popc(word);
  const int largest = w * 32 + 31 - __clz(static_cast<int>(word));
  if (largest > last) last = largest;
}

// Open step: advances the state of each request by the tokens that were committed without a commit
// step, if there are any. Then writes to `items`, for automaton_fill, which mask rows to fill: row
// 0 and the rows of the drafts, which verification reads, unless they are already filled. If
// `copied` is set, the host's mask rows were copied over the rows of all slots, so no row counts as
// filled.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    automaton_open(const int* row_slot, int batch, const Slot* slots, AutomatonSlot* states,
                   int* exchange, const ExchangeLayout layout, unsigned char* memory,
                   const int* offsets, const unsigned char* bytes, const unsigned int* closing,
                   int num_tokens, const int* replay, FillItem* items, RowCache* cache,
                   CachedRow* cached, int num_cached, int num_rows, int copied) {
  const Advance a = {row_slot,
                     slots,
                     states,
                     exchange,
                     layout,
                     {memory, offsets, bytes, closing, num_tokens},
                     *replay,
                     items,
                     cache,
                     cached,
                     static_cast<unsigned int>(num_cached)};
  for (int b = static_cast<int>(threadIdx.x); b < batch; b += BLOCK) {
    FillItem* own_items = items + static_cast<long long>(b) * num_rows;
    for (int j = 0; j < num_rows; ++j) own_items[j].action = FILL_NOTHING;
    AutomatonSlot* own = state_of(a, b);
    if (own == nullptr) continue;
    const int index = a.row_slot[b];
    const Slot& slot = a.slots[index];
    const Committed* committed = reinterpret_cast<const Committed*>(
        record_of(a.exchange, a.layout, index, a.layout.committed));
    if (replays_since(committed->replay, own->applied) > 0) {
      const int* ids = reinterpret_cast<const int*>(committed + 1);
      if (committed->count > 0) commit(a, index, ids, committed->count, committed->replay);
    }
    const bool kept = !copied && replay_after(own->drafted) == a.replay;
    for (int j = 0; j < num_rows && j <= slot.draft_len; ++j) {
      if (kept && own->filled[j]) continue;
      if (j > 0) enter(a, slot, *own, j);
      request_row(a, slot, *own, index, j, own_items + j);
    }
  }
  use_cache(a, batch * num_rows);
}

// Commit step: advances the state of each request by the tokens that verification has committed. If
// `fill` is not 0, also writes to `items` that automaton_fill shall fill mask row 0 of each
// request.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    automaton_commit(const int* row_slot, int batch, const Slot* slots, AutomatonSlot* states,
                     int* exchange, const ExchangeLayout layout, unsigned char* memory,
                     const int* offsets, const unsigned char* bytes, const unsigned int* closing,
                     int num_tokens, const int* replay, FillItem* items, RowCache* cache,
                     CachedRow* cached, int num_cached, int fill, const RoundRow* rows,
                     int row_words, int forced) {
  const Advance a = {row_slot,
                     slots,
                     states,
                     exchange,
                     layout,
                     {memory, offsets, bytes, closing, num_tokens},
                     *replay,
                     items,
                     cache,
                     cached,
                     static_cast<unsigned int>(num_cached)};
  for (int b = static_cast<int>(threadIdx.x); b < batch; b += BLOCK) {
    FillItem* item = a.items + b;
    item->action = FILL_NOTHING;
    AutomatonSlot* own = state_of(a, b);
    const RoundRow* row = round_row(rows, row_words, b);
    if (forced) count_forced(a, row);
    if (own == nullptr || row->count <= 0) continue;
    const int index = a.row_slot[b];
    commit(a, index, reinterpret_cast<const int*>(row + 1), row->count, a.replay);
    own->drafted = a.replay;
    if (fill) request_row(a, a.slots[index], *own, index, 0, item);
  }
  if (fill) use_cache(a, batch);
}

// Draft step: computes the automaton's state after draft j of each request's chain. Then writes to
// `items` that automaton_fill shall fill mask row j: the ids that may follow draft j.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    automaton_draft(const int* row_slot, int batch, const Slot* slots, AutomatonSlot* states,
                    int* exchange, const ExchangeLayout layout, unsigned char* memory,
                    const int* offsets, const unsigned char* bytes, const unsigned int* closing,
                    int num_tokens, const int* replay, FillItem* items, RowCache* cache,
                    CachedRow* cached, int num_cached, int j, const RoundRow* rows, int row_words) {
  const Advance a = {row_slot,
                     slots,
                     states,
                     exchange,
                     layout,
                     {memory, offsets, bytes, closing, num_tokens},
                     *replay,
                     items,
                     cache,
                     cached,
                     static_cast<unsigned int>(num_cached)};
  for (int b = static_cast<int>(threadIdx.x); b < batch; b += BLOCK) {
    FillItem* item = a.items + b;
    item->action = FILL_NOTHING;
    AutomatonSlot* own = state_of(a, b);
    const RoundRow* row = round_row(rows, row_words, b);
    if (own == nullptr || row->count <= 0) continue;
    const int index = a.row_slot[b];
    const Slot& slot = a.slots[index];
    if (slot.draft_len < j || !own->filled[j - 1]) continue;
    enter(a, slot, *own, j);
    request_row(a, slot, *own, index, j, item);
  }
  use_cache(a, batch);
}

// Fills the mask rows of the items that the previous kernel has written. Block (i, p) fills part p
// of the row of item i. Of the blocks of an item, the last one to finish writes the stamp of the
// row (RowStamp), which says whether the row is ready. With `forced`, the stamp of a row with a
// single legal id contains this id, as on the host (Forced::token with `unique_only`,
// native/guide/slot.h).
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    automaton_fill(FillItem* items, AutomatonSlot* states, int* masks, int* exchange,
                   const ExchangeLayout layout, unsigned char* memory, const int* offsets,
                   const unsigned char* bytes, const unsigned int* closing, int num_tokens,
                   unsigned int* cached_words, RowCache* cache, int forced) {
  __shared__ int num_legal;
  __shared__ int last_legal;
  FillItem& item = items[blockIdx.x];
  const int part = static_cast<int>(blockIdx.y);
  const int parts = static_cast<int>(gridDim.y);
  const bool leader = threadIdx.x == 0;
  if (item.action == FILL_NOTHING) return;
  const AutomatonSlot& own = states[item.slot];
  if (item.action == FILL_STAMP) {
    if (leader && part == 0) {
      write_stamp(exchange, layout, item.slot, item.j, item.stamp, own.epoch, item.position, 0);
    }
    return;
  }
  const Automaton automaton({memory, offsets, bytes, closing, num_tokens}, item.table);
  unsigned int* row = const_cast<unsigned int*>(mask_of(masks, layout, item.slot, item.j));
  const int words = (layout.words + parts - 1) / parts;
  const int begin = part * words;
  const int end = begin + words < layout.words ? begin + words : layout.words;
  const int first_word = begin + static_cast<int>(threadIdx.x) / LANES;
  const bool writes = threadIdx.x % LANES == 0;
  if (leader) {
    num_legal = 0;
    last_legal = 0;
  }
  block_sync();
  const Position position = position_of(own, item.j);
  const Position base = {item.state, 0, 0, 0, nullptr};  // without the stack
  const bool is_shared = item.shared != 0;
  // Tokens whose bits depend on the stack, and are therefore not in cached rows.
  const bool has_closing = automaton.pops != 0 && is_shared;
  bool narrowed = false;
  unsigned int seen = 0;
  int legal = 0;
  int last = 0;
  if (item.source >= 0) {
    const unsigned int* source = cached_words + static_cast<long long>(item.source) * layout.words;
    for (int w = begin + static_cast<int>(threadIdx.x); w < end; w += BLOCK) {
      row[w] = source[w];
      seen |= source[w];
      if (forced) count_ids(source[w], w, legal, last);
    }
  } else {
    unsigned int* stored = nullptr;
    if (item.store >= 0) stored = cached_words + static_cast<long long>(item.store) * layout.words;
    for (int w = first_word; w < end; w += BLOCK / LANES) {
      const unsigned int tested = has_closing ? ~closing[w] : ~0u;
      const unsigned int word =
          legal_word(automaton, is_shared ? base : position, w, tested, item.limit, narrowed);
      if (!writes) continue;
      seen |= word;
      if (forced) count_ids(word, w, legal, last);
      row[w] = word;
      if (stored != nullptr) stored[w] = word;
    }
  }
  if (has_closing) {
    block_sync();  // all words are written
    for (int w = first_word; w < end; w += BLOCK / LANES) {
      if (closing[w] == 0) continue;
      const unsigned int word =
          legal_word(automaton, position, w, closing[w], item.limit, narrowed);
      if (!writes || word == 0) continue;
      seen |= word;
      if (forced) count_ids(word, w, legal, last);
      row[w] |= word;
    }
  }
  if (narrowed) atomicExch(&item.narrowed, 1);
  if (seen != 0) {
    atomicAdd(&num_legal, forced ? legal : 1);
    atomicMax(&last_legal, last);
  }
  block_sync();
  if (!leader) return;
  if (automaton.accepting[item.state] != 0 && item.limit >= 0) {
    for (int i = 0; i < own.num_stop_ids; ++i) {
      const int w = own.stop_ids[i] >> 5;
      if (w < begin || w >= end) continue;
      row[w] |= 1u << (own.stop_ids[i] & 31);
      num_legal += 1;
      if (own.stop_ids[i] > last_legal) last_legal = own.stop_ids[i];
    }
  }
  if (num_legal != 0) {
    atomicAdd(&item.num_legal, num_legal);
    atomicMax(&item.last_legal, last_legal);
  }
  __threadfence();
  if (atomicInc(&item.arrived, parts - 1) != static_cast<unsigned int>(parts - 1)) return;
  __threadfence();
  const int total = atomicExch(&item.num_legal, 0);
  const int token = atomicExch(&item.last_legal, 0);
  if (atomicExch(&item.narrowed, 0) != 0) {
    atomicAdd(&cache->narrowed_rows, 1u);
    if (atomicExch(&states[item.slot].narrowed, 1) == 0) atomicAdd(&cache->closed, 1u);
  }
  const int state = total != 0 ? ROW_READY : ROW_DEAD_END;
  const int detail = forced && total == 1 ? 1 + token : 0;
  write_stamp(exchange, layout, item.slot, item.j, state, own.epoch, item.position, detail);
}
