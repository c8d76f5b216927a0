// Race detection in shared memory with vector clocks.
#include "races.h"

#include <algorithm>
#include <cstring>

namespace softcuda {
namespace ptx {

constexpr unsigned kMaxWarps = 32;
using RaceClock = uint32_t[kMaxWarps];

// The last accesses of a word of shared memory.
struct RaceWord {
  uint32_t write_clock = 0;  // 0: not written
  uint16_t writer = 0;
  bool write_atomic = false;
  const Instr* write_at = nullptr;
  uint32_t read_clocks[kMaxWarps] = {};
  uint32_t atomic_readers = 0;
  const Instr* read_at = nullptr;
};

struct Races {
  RaceClock clocks[kMaxWarps];
  RaceClock barriers[16];
  std::vector<RaceWord> words;
};

void start_races(Block& b) {
  if (!b.racecheck) return;
  static thread_local Races& races = *new Races;
  b.races = &races;
  std::memset(races.clocks, 0, sizeof races.clocks);
  std::memset(races.barriers, 0, sizeof races.barriers);
  for (unsigned i = 0; i < kMaxWarps; ++i) races.clocks[i][i] = 1;
  races.words.assign(b.shared_end / 4 + 1, RaceWord());
}

void arrive_for_races(Warp& w, unsigned barrier) {
  Races& races = *w.block->races;
  for (unsigned i = 0; i < kMaxWarps; ++i) {
    races.barriers[barrier][i] = std::max(races.barriers[barrier][i], races.clocks[w.index][i]);
  }
  ++races.clocks[w.index][w.index];
}

void join_at_barrier(Block& b, unsigned barrier) {
  Races& races = *b.races;
  for (const Warp& w : b.warps) {
    for (unsigned g = 0; g < w.group_count; ++g) {
      if (w.groups[g].state != Group::at_barrier || w.groups[g].barrier != barrier) continue;
      for (unsigned i = 0; i < kMaxWarps; ++i) {
        races.clocks[w.index][i] = std::max(races.clocks[w.index][i], races.barriers[barrier][i]);
      }
    }
  }
  std::memset(races.barriers[barrier], 0, sizeof races.barriers[barrier]);
}

namespace {

void report(Warp& w, const Instr* in, unsigned lane, uint32_t address, const char* here,
            unsigned other_warp, const Instr* other, const char* there) {
  w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in,
                std::string("race in shared memory at ") + hex(address) + ": this " + here +
                    " conflicts with a " + there + " of warp " + std::to_string(other_warp) +
                    " at " + w.block->kernel->where(other) + " without a barrier between them");
}

}  // namespace

void note_shared(Warp& w, const Instr* in, unsigned lane, uint32_t address, unsigned bytes,
                 bool write) {
  Block& b = *w.block;
  if (b.races == nullptr || b.failed) return;
  Races& races = *b.races;
  const bool atomic = b.atomic_access;
  const uint32_t* clock = races.clocks[w.index];
  for (unsigned word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    RaceWord& x = races.words[word];
    const bool both_atomic = atomic && x.write_atomic;
    if (x.write_clock > clock[x.writer] && x.writer != w.index && x.write_clock != 0 &&
        !both_atomic) {
      report(w, in, lane, address, write ? "write" : "read", x.writer, x.write_at, "write");
      return;
    }
    if (write) {
      for (unsigned other = 0; other < b.warps.size(); ++other) {
        if (other == w.index || x.read_clocks[other] <= clock[other]) continue;
        if (atomic && (x.atomic_readers >> other & 1) != 0) continue;
        report(w, in, lane, address, "write", other, x.read_at, "read");
        return;
      }
      x.write_clock = clock[w.index];
      x.writer = static_cast<uint16_t>(w.index);
      x.write_atomic = atomic;
      x.write_at = in;
    } else {
      x.read_clocks[w.index] = clock[w.index];
      x.read_at = in;
    }
  }
}

// Races between blocks in global memory are not detected.
void note_global(Warp&, const Instr*, unsigned, uint64_t, unsigned, bool) {}

}  // namespace ptx
}  // namespace softcuda
