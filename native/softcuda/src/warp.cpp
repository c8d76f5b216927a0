// Warp operations (INVARIANTS.md X6 to X8). The last lane that arrives at an operation computes the
// results of all lanes.
#include <cstring>

#include "executor.h"

namespace softcuda {
namespace {

// The value that a lane reads from an absent lane: NaN as a float, -1 as an integer
// (INVARIANTS.md X8).
constexpr unsigned long long kAbsentLane = ~0ull;

float as_float(unsigned long long word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

unsigned long long as_word(float value) {
  unsigned long long word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

// Returns the source lane of a shuffle as the CUDA programming guide defines it. The warp is
// divided into segments of `width` lanes. A lane whose source is outside of its segment reads its
// own value.
unsigned source_lane(unsigned op, unsigned lane, unsigned arg, unsigned width) {
  const unsigned first = lane & ~(width - 1);
  switch (op) {
    case SOFTCUDA_SHFL_IDX:
      return first | (arg & (width - 1));
    case SOFTCUDA_SHFL_UP:
      return arg <= lane - first ? lane - arg : lane;
    case SOFTCUDA_SHFL_DOWN:
      return arg < width && lane + arg < first + width ? lane + arg : lane;
    default: {
      const unsigned source = lane ^ arg;
      return source < first + width ? source : lane;
    }
  }
}

const char* op_name(unsigned op) {
  static const char* const names[] = {"__syncwarp",        "__shfl_sync",      "__shfl_up_sync",
                                      "__shfl_down_sync",  "__shfl_xor_sync",  "__ballot_sync",
                                      "__any_sync",        "__all_sync",       "__match_any_sync",
                                      "softcuda_warp_sum", "softcuda_warp_max"};
  return op < sizeof names / sizeof names[0] ? names[op] : "a warp operation";
}

// Computes the butterfly reduction of five xor shuffles for all lanes at once. The operands and
// their order are the same as those of the shuffles, so the result has the same bits.
template <class Combine>
void butterfly(float (&x)[32], const Combine& combine) {
  for (unsigned offset = 16; offset > 0; offset >>= 1) {
    float y[32];
    for (unsigned lane = 0; lane < 32; ++lane) y[lane] = combine(x[lane], x[lane ^ offset]);
    std::memcpy(x, y, sizeof y);
  }
}

}  // namespace

inline __attribute__((always_inline)) unsigned long long Executor::warp(unsigned op, unsigned mask,
                                                                        unsigned long long value,
                                                                        unsigned arg,
                                                                        unsigned width) {
  if (block_->tracked == 0) begin_tracking();
  const unsigned thread = block_->current;
  const unsigned w = thread / 32;
  const unsigned bit = 1u << (thread % 32);
  if ((mask & bit) == 0) {
    fail(CUDA_ERROR_LAUNCH_FAILED, std::string(op_name(op)) + " with mask " + hex(mask) +
                                       ", which does not contain the calling lane");
  }
  if (width == 0 || width > 32 || (width & (width - 1)) != 0) {
    fail(CUDA_ERROR_LAUNCH_FAILED, std::string(op_name(op)) + " with width " +
                                       std::to_string(width) + ", not a power of two up to 32");
  }
  lanes_[thread] = Lane{op, mask, arg, width, value, 0};
  at_warp_[w] |= bit;
  if (try_release_warp(w, mask)) {
    // The calling lane was marked as ready like the other lanes. Clear its bit, because it is
    // already running.
    ready_[w] &= ~bit;
  } else {
    suspend();
  }
  return lanes_[thread].result;
}

unsigned long long hook_warp(softcuda_block* block, unsigned op, unsigned mask,
                             unsigned long long value, unsigned arg, unsigned width) {
  return static_cast<Executor*>(block->executor)->warp(op, mask, value, arg, width);
}

// Computes softcuda_warp_sum or softcuda_warp_max for all lanes. Absent lanes contribute NaN
// (INVARIANTS.md X8).
void Executor::reduce_warp(Lane* lanes, unsigned group, unsigned op) {
  float x[32];
  for (unsigned i = 0; i < 32; ++i) x[i] = as_float(group >> i & 1 ? lanes[i].value : kAbsentLane);
  if (op == SOFTCUDA_WARP_SUM) {
    butterfly(x, [](float a, float b) { return a + b; });
  } else {
    butterfly(x, [](float a, float b) { return b > a ? b : a; });
  }
  for (unsigned i = 0; i < 32; ++i) lanes[i].result = as_word(x[i]);
}

// Computes the result of lane `i` for a vote, match or shuffle. `group` is the mask of the
// participating lanes. `votes` is the mask of those participating lanes whose value is not 0.
inline __attribute__((always_inline)) void Executor::resolve_lane(Lane* lanes, unsigned group,
                                                                  unsigned votes, unsigned i) {
  Lane& lane = lanes[i];
  switch (lane.op) {
    case SOFTCUDA_SYNCWARP:
      break;
    case SOFTCUDA_BALLOT:
      lane.result = votes;
      break;
    case SOFTCUDA_ANY:
      lane.result = votes != 0;
      break;
    case SOFTCUDA_ALL:
      lane.result = votes == group;
      break;
    case SOFTCUDA_MATCH_ANY: {
      unsigned same = 0;
      for (unsigned left = group; left != 0; left &= left - 1) {
        const unsigned other = static_cast<unsigned>(__builtin_ctz(left));
        if (lanes[other].value == lane.value) same |= 1u << other;
      }
      lane.result = same;
      break;
    }
    default: {
      const unsigned source = source_lane(lane.op, i, lane.arg, lane.width);
      lane.result = group >> source & 1 ? lanes[source].value : kAbsentLane;
    }
  }
}

// Releases the lanes of `mask` if all of them that exist and have not exited wait at the same
// operation with this mask (INVARIANTS.md X6). Lanes of the same warp that wait with other masks
// are not affected. Returns whether the lanes were released.
bool Executor::try_release_warp(unsigned w, unsigned mask) {
  const unsigned in_block = block_->count - w * 32;
  const unsigned exists = in_block >= 32 ? 0xffffffffu : (1u << in_block) - 1;
  const unsigned group = mask & exists & ~exited_[w];
  if (group == 0 || (at_warp_[w] & group) != group) return false;
  Lane* lanes = &lanes_[w * 32];
  const Lane& first = lanes[__builtin_ctz(group)];
  for (unsigned left = group; left != 0; left &= left - 1) {
    const Lane& lane = lanes[__builtin_ctz(left)];
    if (lane.mask != mask || lane.op != first.op) return false;
  }
  if (first.op == SOFTCUDA_WARP_SUM || first.op == SOFTCUDA_WARP_MAX) {
    reduce_warp(lanes, group, first.op);
  } else {
    unsigned votes = 0;
    for (unsigned left = group; left != 0; left &= left - 1) {
      const unsigned i = static_cast<unsigned>(__builtin_ctz(left));
      if (lanes[i].value != 0) votes |= 1u << i;
    }
    for (unsigned left = group; left != 0; left &= left - 1) {
      resolve_lane(lanes, group, votes, static_cast<unsigned>(__builtin_ctz(left)));
    }
  }
  at_warp_[w] &= ~group;
  ready_[w] |= group;
  return true;
}

}  // namespace softcuda
