// Stores of device code that are not visible everywhere yet (INVARIANTS.md P14). With a seed, weak
// stores to global memory are kept in buffers, so that a program cannot depend on their order
// without a fence, a release or a barrier.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace softcuda {
namespace ptx {

// Stored bytes of one aligned 8-byte word. Bit i of `mask` is set if byte i was stored.
struct StoredWord {
  uint64_t value = 0;
  uint8_t mask = 0;
  const Memory* owner = nullptr;
};

// Words by storage address divided by 8.
class StoreBuffer {
 public:
  bool empty() const { return words_.empty(); }
  size_t size() const { return words_.size(); }
  void clear() { words_.clear(); }
  // Adds a word. Its bytes replace older ones.
  void put(uint64_t word, const StoredWord& bytes);
  // Copies the bytes of [storage, storage + bytes) that it has to `out`. Returns false if it has
  // none.
  bool read(const char* storage, unsigned bytes, char* out) const;
  // Removes a word. Returns false if there is none.
  bool take(uint64_t word, StoredWord* out);
  // Chooses a word. Returns false if there is none.
  bool random_word(uint64_t random, uint64_t* word) const;
  // Whether it has words that the host can read.
  bool has_host_memory() const;
  std::unordered_map<uint64_t, StoredWord> take_all();

 private:
  std::unordered_map<uint64_t, StoredWord> words_;
};

// Buffers of the block that a worker runs. A word may be in several of them; the value of the warp
// is the latest, then that of the block, then that of the device.
struct BlockStores {
  StoreBuffer warps[kLanes];  // visible to one warp
  StoreBuffer block;          // visible to the block
  // Targets of the store that is being executed, and its values or those of a load.
  char* targets[kLanes];
  alignas(64) char values[kLanes][32];
  bool delay = false;
};

// Stores of blocks that have ended. No other block of the launch sees them.
struct PendingStores {
  std::mutex mutex;
  StoreBuffer words;
  std::vector<std::shared_ptr<Memory>> owners;
};

// Prepares the buffers for a block, if there is a seed.
void begin_block_stores(Block& b);
// Keeps the stores of a block that has ended.
void end_block_stores(Block& b);
// Makes all stores visible at the end of a launch.
void end_launch_stores(LaunchState& launch);
// Called for each access to global memory before it happens.
void order_stores(Warp& w, const Instr* in, char* storage, unsigned bytes, bool write);
// Called after each turn of a warp: makes random words visible.
void age_stores(Warp& w);

}  // namespace ptx
}  // namespace softcuda
