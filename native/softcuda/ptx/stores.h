// Stores of device code that are not visible everywhere yet (INVARIANTS.md P14). With
// SOFTCUDA_PTX_SEED, weak stores to global memory are kept in buffers, so that a program fails if
// it depends on their order without a fence, a release or a barrier.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "loads.h"
#include "program.h"

namespace softcuda {
namespace ptx {

// Stored bytes of one aligned 8-byte word. Bit i of `mask` is set if byte i was stored.
struct StoredWord {
  uint64_t value = 0;
  uint8_t mask = 0;
  const Memory* owner = nullptr;
};

// Stored words that are not in memory yet. The key of a word is its host address divided by 8.
class StoreBuffer {
 public:
  bool empty() const { return words_.empty(); }
  size_t size() const { return words_.size(); }
  void clear() { words_.clear(); }
  // Adds the stored bytes of a word. They replace older values of the same bytes.
  void put(uint64_t word, const StoredWord& bytes);
  // Copies those bytes of [storage, storage + bytes) that are in the buffer to their places in
  // `out`. Returns false if the buffer has none of them.
  bool read(const char* storage, unsigned bytes, char* out) const;
  // Removes a word and stores it in `out`. Returns false if it is not in the buffer.
  bool take(uint64_t word, StoredWord* out);
  // Stores in `word` one of the buffered words, which `random` selects. Returns false if the buffer
  // is empty.
  bool random_word(uint64_t random, uint64_t* word) const;
  // Whether the buffer has words of host memory.
  bool has_host_memory() const;
  std::unordered_map<uint64_t, StoredWord> take_all();

 private:
  std::unordered_map<uint64_t, StoredWord> words_;
};

// Buffers of the block that a worker runs. If a word is in several buffers, the warp's buffer has
// the newest value, the block's buffer an older one, and the device's buffer the oldest one.
struct BlockStores {
  StoreBuffer warps[kLanes];  // visible to one warp
  StoreBuffer block;          // visible to the block
  HostLoads loads;
  // The store that is being executed: the host address and the value of each lane. A load that
  // reads from the buffers also uses `values`.
  char* targets[kLanes];
  alignas(64) char values[kLanes][32];
  bool delay = false;
};

// Stores of blocks that have ended. Other blocks of the launch do not see them until they are
// written to memory.
struct PendingStores {
  std::mutex mutex;
  StoreBuffer words;
  std::vector<std::shared_ptr<Memory>> owners;
};

// Prepares the buffers for a block. Does nothing without SOFTCUDA_PTX_SEED.
void begin_block_stores(Block& b);
// Moves the stores of a block that has ended to LaunchState::pending.
void end_block_stores(Block& b);
// Makes all stores visible at the end of a launch.
void end_launch_stores(LaunchState& launch);
// Loads `count` aligned 8-byte words of host memory from host address `first` * 8 on, with the
// values in the device's buffer.
void load_host_words(uint64_t first, unsigned count, uint64_t* out);
// Called before each access to global memory. Does nothing for weak loads and stores, which use the
// buffers and HostLoads. Before any other access, writes the buffered values of the accessed words
// to memory, and lets the access read memory.
void order_accesses(Warp& w, const Instr* in, char* storage, unsigned bytes, bool write);
// Called when a warp has run and the next warp takes its turn. Makes random words of the buffers
// visible in some of the calls.
void age_stores(Warp& w);

}  // namespace ptx
}  // namespace softcuda
