// Race detection in shared memory with vector clocks, and the clocks of barriers.
#include "races.h"

#include <algorithm>

namespace softcuda {
namespace ptx {

void start_races(Block& b) {
  if (!b.racecheck) return;
  static thread_local Races& races = *new Races;
  b.races = &races;
  for (unsigned i = 0; i < kMaxWarps; ++i) {
    races.clocks[i].fill(0);
    races.clocks[i][i] = 1;
    races.orders[i] = WarpOrder();
  }
  for (Clocks& clocks : races.barriers) clocks.fill(0);
  races.mbarriers.clear();
  for (WarpOrder& order : races.barrier_orders) order = WarpOrder();
  const softcuda_dim3 grid = b.work->grid;
  races.block = (b.index.z * grid.y + b.index.y) * grid.x + b.index.x;
  races.words.assign(b.shared_end / 4 + 1, RaceWord());
}

void arrive_for_races(Warp& w, unsigned barrier) {
  Races& races = *w.block->races;
  for (unsigned i = 0; i < kMaxWarps; ++i) {
    races.barriers[barrier][i] = std::max(races.barriers[barrier][i], races.clocks[w.index][i]);
  }
  ++races.clocks[w.index][w.index];
  races.barrier_orders[barrier].join(races.orders[w.index]);
}

void join_at_barrier(Block& b, unsigned barrier) {
  Races& races = *b.races;
  for (const Warp& w : b.warps) {
    for (unsigned g = 0; g < w.group_count; ++g) {
      if (w.groups[g].state != Group::at_barrier || w.groups[g].barrier != barrier) continue;
      for (unsigned i = 0; i < kMaxWarps; ++i) {
        races.clocks[w.index][i] = std::max(races.clocks[w.index][i], races.barriers[barrier][i]);
      }
      races.orders[w.index].join(races.barrier_orders[barrier]);
    }
  }
  races.barriers[barrier].fill(0);
  races.barrier_orders[barrier] = WarpOrder();
}

void note_mbarrier(Warp& w, const char* storage, bool arrives) {
  Races& races = *w.block->races;
  auto& object = races.mbarriers[storage];
  Clocks& to = arrives ? object.first : races.clocks[w.index];
  const Clocks& from = arrives ? races.clocks[w.index] : object.first;
  for (unsigned i = 0; i < kMaxWarps; ++i) to[i] = std::max(to[i], from[i]);
  if (arrives) {
    object.second.join(races.orders[w.index]);
    ++races.clocks[w.index][w.index];
  } else {
    races.orders[w.index].join(object.second);
  }
}

namespace {

void report(Warp& w, const Instr* in, unsigned lane, uint32_t address, const char* here,
            unsigned other_warp, const Instr* other, const char* there) {
  // If the launch has published more clocks in global memory than GlobalRaces can keep, GlobalRaces
  // has dropped all of them. The dropped clocks may have ordered the two accesses, so no race is
  // reported.
  if (w.block->launch->races->overflowed()) return;
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
  const bool strong = (in->aux & kStrong) != 0;
  const Clocks& clock = races.clocks[w.index];
  for (unsigned word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    RaceWord& x = races.words[word];
    const bool both_strong = strong && x.write_strong;
    if (x.write_clock > clock[x.writer] && x.writer != w.index && x.write_clock != 0 &&
        !both_strong) {
      report(w, in, lane, address, write ? "write" : "read", x.writer, x.write_at, "write");
      return;
    }
    if (write) {
      for (unsigned other = 0; other < b.warps.size(); ++other) {
        if (other == w.index || x.read_clocks[other] <= clock[other]) continue;
        if (strong && (x.strong_readers >> other & 1) != 0) continue;
        report(w, in, lane, address, "write", other, x.read_at, "read");
        return;
      }
      x.write_clock = clock[w.index];
      x.writer = static_cast<uint16_t>(w.index);
      x.write_strong = strong;
      x.write_at = in;
    } else {
      x.read_clocks[w.index] = clock[w.index];
      x.read_at = in;
      const uint32_t bit = 1u << w.index;
      x.strong_readers = strong ? x.strong_readers | bit : x.strong_readers & ~bit;
    }
  }
}

}  // namespace ptx
}  // namespace softcuda
