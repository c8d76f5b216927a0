// Race detection (INVARIANTS.md P12). A warp's clock counts its barriers, fences and releases. An
// access is ordered after an earlier access of another warp if the two warps have synchronized in
// between.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "launch_state.h"

namespace softcuda {
namespace ptx {

constexpr unsigned kMaxWarps = 32;
// A vector clock, which describes a point of the execution: for each warp of a block, the clock up
// to which the warp's accesses are ordered before this point; 0 if none of them is.
using Clocks = std::array<uint32_t, kMaxWarps>;
// Clocks of the warps of several blocks, by block number. If the bit kOwnBlockOnly of the key is
// set, only warps of the same block may use the clocks, because they were published with scope
// .cta.
using BlockClocks = std::unordered_map<uint32_t, Clocks>;
constexpr uint32_t kOwnBlockOnly = 0x80000000u;

// What one warp knows about the accesses of other blocks.
struct WarpOrder {
  BlockClocks known;  // accesses that are ordered before the warp's next access
  BlockClocks read;   // clocks in words that the warp has read; its next fence adds them to `known`
  BlockClocks fenced;  // clocks at the warp's last fence, which its strong writes publish
  bool empty() const { return known.empty() && read.empty() && fenced.empty(); }
  void join(const WarpOrder& other);
};

// The last accesses of a word of shared memory.
struct RaceWord {
  uint32_t write_clock = 0;  // 0: not written
  uint16_t writer = 0;
  bool write_strong = false;
  const Instr* write_at = nullptr;
  uint32_t read_clocks[kMaxWarps] = {};
  uint32_t strong_readers = 0;
  const Instr* read_at = nullptr;
};

// Race-detection state of the block that a worker runs.
struct Races {
  Clocks clocks[kMaxWarps];
  Clocks barriers[16];
  WarpOrder orders[kMaxWarps];
  WarpOrder barrier_orders[16];
  // For each mbarrier object, by address: the accesses that are ordered before the arrivals at the
  // object. `first` covers accesses of this block, `second` those of other blocks.
  std::unordered_map<const char*, std::pair<Clocks, WarpOrder>> mbarriers;
  uint32_t block = 0;  // number of the block in the grid
  std::vector<RaceWord> words;
};

// One access of a word of global memory.
struct GlobalAccess {
  uint32_t block = 0;
  uint32_t clock = 0;  // 0: no access
  uint32_t instruction = 0;
  uint8_t warp = 0;
  uint8_t bytes = 0;  // one bit per byte of the word
  bool strong = false;
  bool wide = false;  // scope .gpu or .sys
};

// For the words of global memory that one launch accesses: their last accesses, and the vector
// clocks that strong writes of its blocks have published in them.
class GlobalRaces {
 public:
  explicit GlobalRaces(const Kernel& kernel) : kernel_(kernel) {}
  // Reports accesses that were not checked, to standard error.
  ~GlobalRaces();
  // Records an access. If it races with an earlier one, returns the text of the race, otherwise "".
  std::string note(const Warp& w, const Instr* in, char* storage, unsigned bytes, bool write);
  // Returns the clocks that publish() has stored for the word of memory at `storage`; empty if
  // there are none.
  BlockClocks published(const char* storage);
  void publish(const char* storage, const BlockClocks& clocks);
  // Whether the strong writes of the launch have published more clocks than this object can keep.
  // It has then dropped all of them, and checks no further access to global memory.
  bool overflowed() const { return overflowed_.load(std::memory_order_relaxed); }

 private:
  struct Word {
    GlobalAccess write;
    // The first reader and the last one. Other readers are forgotten.
    GlobalAccess readers[2];
    // Instruction of the last non-coherent load; -1: none.
    int32_t non_coherent = -1;
  };
  struct Page {
    Word words[256];
  };
  std::string conflict(const Warp& w, const GlobalAccess& now, const GlobalAccess& then, bool write,
                       bool wrote) const;
  // Returns the text of the fault if a launch both writes a word and reads it with ld.nc, which
  // requires that the word does not change during the launch; "" otherwise.
  std::string non_coherent(const Instr* in, Word& word, bool write) const;
  Word* find(uint64_t word);

  const Kernel& kernel_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;  // by storage address / 1024
  std::unordered_map<uint64_t, BlockClocks> published_;
  size_t clocks_ = 0;  // number of clocks in published_
  std::atomic<bool> overflowed_{false};
  uint64_t unchecked_ = 0;  // accesses that were not checked
};

// Prepares race detection for a block, if it is on.
void start_races(Block& b);
// Record that a warp arrives at a barrier, and that a barrier is complete.
void arrive_for_races(Warp& w, unsigned barrier);
void join_at_barrier(Block& b, unsigned barrier);
// Checks an access to global memory for races. If it races with an earlier access, reports a fault
// and returns false.
bool note_global(Warp& w, const Instr* in, unsigned lane, uint64_t address, char* storage,
                 unsigned bytes, bool write);

}  // namespace ptx
}  // namespace softcuda
