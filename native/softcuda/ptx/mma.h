// Products of small matrices, for mma.sync and wmma (handlers_mma.cpp).
#pragma once

#include "lanes.h"

namespace softcuda {
namespace ptx {

// The size of a product. Larger ones are computed in parts.
constexpr unsigned kRows = 16;
constexpr unsigned kColumns = 8;

// Element types of A and B, in Instr::kind.
enum Element : uint16_t { kBf16, kF16, kTf32, kE4m3, kE5m2, kS8, kU8 };
bool element_of(Type type, uint16_t* element);
unsigned bits_of(unsigned element);
// Returns element `e` of a register.
float value_of(unsigned element, uint32_t reg, unsigned e);
// Adds the product of A and B to D, with the model of accumulation that is selected.
void accumulate(const Kernel& kernel, unsigned element, const float (*a)[32],
                const float (*b)[kColumns], unsigned inner, float (*d)[kColumns]);
void accumulate_integer(const float (*a)[32], const float (*b)[kColumns], unsigned inner,
                        int32_t (*d)[kColumns], bool saturates);
// Checks that all lanes of the warp are at the instruction. Sets `next` if they are not.
bool all_lanes(Warp& w, const Instr* in, const Instr** next);

}  // namespace ptx
}  // namespace softcuda
