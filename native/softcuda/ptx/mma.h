// Products of small matrices, for mma.sync and wmma (handlers_mma.cpp).
#pragma once

#include "lanes.h"

namespace softcuda {
namespace ptx {

// Rows and columns of the product that accumulate() computes. Larger products consist of several
// such products.
constexpr unsigned kRows = 16;
constexpr unsigned kColumns = 8;

// Element types of A and B, in Instr::kind.
enum Element : uint16_t { kBf16, kF16, kTf32, kE4m3, kE5m2, kS8, kU8 };
bool element_of(Type type, uint16_t* element);
unsigned bits_of(unsigned element);
// Converts element `e` of the register value `reg` to a float. `element` is the type of the
// elements.
float value_of(unsigned element, uint32_t reg, unsigned e);
// Adds the product of A and B to D as SOFTCUDA_PTX_MMA selects. `inner` is the inner dimension.
void accumulate(const Kernel& kernel, unsigned element, const float (*a)[32],
                const float (*b)[kColumns], unsigned inner, float (*d)[kColumns]);
void accumulate_integer(const float (*a)[32], const float (*b)[kColumns], unsigned inner,
                        int32_t (*d)[kColumns], bool saturates);
// Returns whether all 32 lanes of the warp are at the instruction. Otherwise, sets `next` to the
// instruction that the handler must return, and reports a fault if lanes of the warp have exited.
bool all_lanes(Warp& w, const Instr* in, const Instr** next);

}  // namespace ptx
}  // namespace softcuda
