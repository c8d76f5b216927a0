// Race detection (invariant P12). A warp's clock counts its barriers. An access is ordered after an
// earlier access of another warp if the warp has synchronized with that warp since.
#pragma once

#include "program.h"

namespace softcuda {
namespace ptx {

// Prepares race detection for a block, if it is on.
void start_races(Block& b);
// A warp arrives at a barrier, and a barrier is complete.
void arrive_for_races(Warp& w, unsigned barrier);
void join_at_barrier(Block& b, unsigned barrier);
void note_global(Warp& w, const Instr* in, unsigned lane, uint64_t address, unsigned bytes,
                 bool write);

}  // namespace ptx
}  // namespace softcuda
