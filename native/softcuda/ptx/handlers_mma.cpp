// Matrix instructions: mma.sync, ldmatrix, stmatrix and movmatrix. All lanes of the warp must
// execute them together.
#include <algorithm>

#include "mma.h"

namespace softcuda {
namespace ptx {
namespace {}  // namespace

unsigned bits_of(unsigned element) {
  if (element == kTf32) return 32;
  return element == kBf16 || element == kF16 ? 16 : 8;
}

namespace {

inline float small_float(uint32_t bits, unsigned exponent_bits, unsigned mantissa_bits) {
  const uint32_t sign = bits >> (exponent_bits + mantissa_bits) & 1;
  const uint32_t top = (1u << exponent_bits) - 1;
  const uint32_t exponent = bits >> mantissa_bits & top;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t bias = top >> 1;
  if (exponent == top && mantissa_bits == 3 && mantissa == 7) return bit_cast<float>(0x7fffffffu);
  if (exponent == top && mantissa_bits == 2) {
    return bit_cast<float>(mantissa != 0 ? 0x7fffffffu : 0x7f800000u | sign << 31);
  }
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(mantissa),
                                   1 - static_cast<int>(bias) - static_cast<int>(mantissa_bits));
    return sign != 0 ? -value : value;
  }
  return bit_cast<float>(sign << 31 | (exponent + 127 - bias) << 23 |
                         mantissa << (23 - mantissa_bits));
}

template <unsigned E>
inline float element_value(uint32_t reg, unsigned e) {
  switch (E) {
    case kBf16:
      return bit_cast<float>(e != 0 ? reg & 0xffff0000u : reg << 16);
    case kF16:
      return float_of_f16(static_cast<uint16_t>(reg >> (16 * e)));
    case kTf32:
      return bit_cast<float>(reg & 0xffffe000u);
    case kE4m3:
      return small_float(reg >> (8 * e) & 255, 4, 3);
    case kE5m2:
      return small_float(reg >> (8 * e) & 255, 5, 2);
    case kS8:
      return static_cast<float>(static_cast<int8_t>(reg >> (8 * e)));
    default:
      return static_cast<float>(reg >> (8 * e) & 255);
  }
}

}  // namespace

float value_of(unsigned element, uint32_t reg, unsigned e) {
  using Value = float (*)(uint32_t, unsigned);
  constexpr Value kValues[] = {element_value<kBf16>, element_value<kF16>,  element_value<kTf32>,
                               element_value<kE4m3>, element_value<kE5m2>, element_value<kS8>,
                               element_value<kU8>};
  return kValues[element](reg, e);
}

namespace {

// Layout of fragments. A register has `per` elements. In lane 4 g + t, register r of A has the
// elements of row g + 8 * (r % 2), from column t * per + r / 2 * 4 * per on. Register r of B has
// the elements of column g, from row t * per + r * 4 * per on.
template <unsigned E>
void gather_a(const Warp& w, const int32_t* operands, unsigned inner, float (*a)[32]) {
  const unsigned per = 32 / bits_of(E);
  for (unsigned r = 0; r < inner / (2 * per); ++r) {
    const uint32_t* reg = src_lanes<uint32_t>(w, operands[r]);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      float* row = a[lane / 4 + 8 * (r & 1)] + lane % 4 * per + r / 2 * 4 * per;
      for (unsigned e = 0; e < per; ++e) row[e] = element_value<E>(reg[lane], e);
    }
  }
}
template <unsigned E>
void gather_b(const Warp& w, const int32_t* operands, unsigned inner, float (*b)[kColumns]) {
  const unsigned per = 32 / bits_of(E);
  for (unsigned r = 0; r < inner / (4 * per); ++r) {
    const uint32_t* reg = src_lanes<uint32_t>(w, operands[r]);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const unsigned row = lane % 4 * per + r * 4 * per;
      for (unsigned e = 0; e < per; ++e) b[row + e][lane / 4] = element_value<E>(reg[lane], e);
    }
  }
}

using GatherA = void (*)(const Warp&, const int32_t*, unsigned, float (*)[32]);
using GatherB = void (*)(const Warp&, const int32_t*, unsigned, float (*)[kColumns]);
constexpr GatherA kGatherA[] = {gather_a<kBf16>, gather_a<kF16>, gather_a<kTf32>, gather_a<kE4m3>,
                                gather_a<kE5m2>, gather_a<kS8>,  gather_a<kU8>};
constexpr GatherB kGatherB[] = {gather_b<kBf16>, gather_b<kF16>, gather_b<kTf32>, gather_b<kE4m3>,
                                gather_b<kE5m2>, gather_b<kS8>,  gather_b<kU8>};

// ---- accumulation models (PTX.md) -------------------------------------------------------------

// Adds the products one after another, each with one rounding.
void accumulate_sequential(const float (*a)[32], const float (*b)[kColumns], unsigned inner,
                           float (*d)[kColumns]) {
  for (unsigned i = 0; i < kRows; ++i) {
    float sum[kColumns];
    for (unsigned j = 0; j < kColumns; ++j) sum[j] = d[i][j];
    for (unsigned k = 0; k < inner; ++k) {
      const float x = a[i][k];
      for (unsigned j = 0; j < kColumns; ++j) sum[j] = std::fma(x, b[k][j], sum[j]);
    }
    for (unsigned j = 0; j < kColumns; ++j) d[i][j] = canonical(sum[j]);
  }
}

__extension__ typedef __int128 Int128;

// A product or sum, represented as significand * 2^exponent.
struct Term {
  int64_t significand;
  int exponent;
};
Term term_of(double x) {
  if (x == 0) return {0, -100000};
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);
  return {static_cast<int64_t>(std::ldexp(fraction, 53)), exponent - 53};
}

// Adds terms (products and the previous sum) as fixed-point numbers. Each term is truncated
// `fraction_bits` bits below the largest exponent of the terms. The sum is truncated to a float or,
// with `nearest`, rounded to nearest.
float fixed_point_sum(const double* terms, unsigned count, int fraction_bits, bool nearest) {
  double special = 0;
  bool finite = true;
  int top = -100000;
  for (unsigned k = 0; k < count; ++k) {
    if (!(terms[k] - terms[k] == 0)) {
      finite = false;
      special += terms[k];
    }
    const Term t = term_of(finite ? terms[k] : 0);
    if (t.significand != 0) top = std::max(top, t.exponent + 52);
  }
  if (!finite) return canonical(static_cast<float>(special));
  if (top == -100000) {
    double sum = 0;
    for (unsigned k = 0; k < count; ++k) sum += terms[k];
    return static_cast<float>(sum);
  }
  const int last = top - fraction_bits;  // exponent of the last bit of the sum
  Int128 sum = 0;
  bool lost = false;
  for (unsigned k = 0; k < count; ++k) {
    const Term t = term_of(terms[k]);
    const int shift = t.exponent - last;
    const uint64_t magnitude =
        static_cast<uint64_t>(t.significand < 0 ? -t.significand : t.significand);
    Int128 value = 0;
    if (shift >= 0) {
      value = static_cast<Int128>(magnitude) << shift;
    } else if (shift > -64) {
      value = static_cast<Int128>(magnitude >> -shift);
      lost = lost || (magnitude & ((uint64_t{1} << -shift) - 1)) != 0;
    } else {
      lost = lost || magnitude != 0;
    }
    sum += t.significand < 0 ? -value : value;
  }
  if (sum == 0) return 0.0f;
  const bool negative = sum < 0;
  Int128 magnitude = negative ? -sum : sum;
  // Shift the magnitude until it fits into 62 bits. `sticky` is true if a bit that is not 0 was
  // lost.
  int exponent = last;
  bool sticky = lost;
  while (magnitude >> 62 != 0) {
    sticky = sticky || (magnitude & 1) != 0;
    magnitude >>= 1;
    ++exponent;
  }
  uint64_t m = static_cast<uint64_t>(magnitude);
  int drop = 40 - __builtin_clzll(m);  // keep 24 bits
  if (exponent + drop < -149) drop = -149 - exponent;
  if (drop > 0) {
    if (drop > 63) return negative ? -0.0f : 0.0f;
    const uint64_t rest = m & ((uint64_t{1} << drop) - 1);
    const uint64_t half = uint64_t{1} << (drop - 1);
    m >>= drop;
    if (nearest && (rest > half || (rest == half && (sticky || (m & 1) != 0)))) ++m;
    exponent += drop;
  }
  const double value = std::ldexp(static_cast<double>(m), exponent);
  float result = static_cast<float>(value);
  if (!nearest && value > static_cast<double>(std::numeric_limits<float>::max())) {
    result = std::numeric_limits<float>::infinity();
  }
  return negative ? -result : result;
}

void accumulate_fixed_point(const float (*a)[32], const float (*b)[kColumns], unsigned inner,
                            float (*d)[kColumns], unsigned step, int fraction_bits, bool nearest) {
  const FloatMode mode(false);
  double terms[33];
  for (unsigned i = 0; i < kRows; ++i) {
    for (unsigned j = 0; j < kColumns; ++j) {
      for (unsigned from = 0; from < inner; from += step) {
        const unsigned n = std::min(step, inner - from);
        terms[0] = static_cast<double>(d[i][j]);
        for (unsigned k = 0; k < n; ++k) {
          terms[k + 1] = static_cast<double>(a[i][from + k]) * static_cast<double>(b[from + k][j]);
        }
        d[i][j] = fixed_point_sum(terms, n + 1, fraction_bits, nearest);
      }
    }
  }
}

}  // namespace

void accumulate(const Kernel& kernel, unsigned element, const float (*a)[32],
                const float (*b)[kColumns], unsigned inner, float (*d)[kColumns]) {
  switch (options().accumulation) {
    case Accumulation::sequential:
      accumulate_sequential(a, b, inner, d);
      return;
    case Accumulation::exact:
      accumulate_fixed_point(a, b, inner, d, inner, 70, true);
      return;
    case Accumulation::hardware:
      break;
  }
  // The hardware model adds `step` products and the accumulator at once. Before that, it aligns
  // them to their largest exponent and truncates them to `fraction_bits` fraction bits.
  const bool hopper = kernel.target >= 90;
  const unsigned bits = bits_of(element);
  const unsigned step = (hopper ? 256 : 128) / bits;
  int fraction_bits = hopper ? 25 : 24;
  if (bits == 8 && kernel.target >= 89 && kernel.target < 100) fraction_bits = 13;
  accumulate_fixed_point(a, b, inner, d, step, fraction_bits, false);
}

// Multiplies 8-bit integers. They are stored as floats, which represent them exactly. A sum wraps
// around at 32 bits or, with `saturates`, is clamped.
void accumulate_integer(const float (*a)[32], const float (*b)[kColumns], unsigned inner,
                        int32_t (*d)[kColumns], bool saturates) {
  for (unsigned i = 0; i < kRows; ++i) {
    for (unsigned j = 0; j < kColumns; ++j) {
      int64_t sum = d[i][j];
      for (unsigned k = 0; k < inner; ++k) {
        sum += static_cast<int64_t>(a[i][k]) * static_cast<int64_t>(b[k][j]);
      }
      if (saturates) sum = std::min<int64_t>(INT32_MAX, std::max<int64_t>(INT32_MIN, sum));
      d[i][j] = static_cast<int32_t>(static_cast<uint32_t>(sum));
    }
  }
}

bool all_lanes(Warp& w, const Instr* in, const Instr** next) {
  const uint32_t lanes = active_lanes(w, in);
  if (lanes == kAllLanes) return true;
  if (lanes == 0) {
    *next = in + 1;
  } else if (w.live() != kAllLanes) {
    const uint32_t missing = ~w.live();
    w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, __builtin_ctz(lanes), in,
                  "all 32 lanes of the warp must execute the instruction, but the lanes " +
                      hex(missing) + " have exited or do not exist");
    *next = in;
  } else {
    *next = wait_for_lanes(w, in);
  }
  return false;
}

namespace {

// mma.sync. `count` is the inner dimension, `kind` the element type of A. `aux` has the element
// type of B; bit 8 is set for float16 accumulators, and bit 9 if sums saturate. From index `imm`
// on, Kernel::operand_pool has the registers of D, A, B and C.
const Instr* mma(Warp& w, const Instr* in) {
  const Instr* next = in;
  if (!all_lanes(w, in, &next)) return next;
  const Kernel& kernel = *w.block->kernel;
  const unsigned inner = in->count;
  const unsigned element_a = in->kind;
  const unsigned element_b = in->aux & 255;
  const bool half = (in->aux & 256) != 0;
  const unsigned per = 32 / bits_of(element_a);
  const int32_t* d = kernel.operand_pool.data() + in->imm;
  const unsigned results = half ? 2 : 4;
  const int32_t* a = d + results;
  const int32_t* b = a + inner / (2 * per);
  const int32_t* c = b + inner / (4 * per);
  alignas(64) float ma[kRows][32];
  alignas(64) float mb[32][kColumns];
  alignas(64) float md[kRows][kColumns];
  kGatherA[element_a](w, a, inner, ma);
  kGatherB[element_b](w, b, inner, mb);
  if (element_a == kS8 || element_a == kU8) {
    int32_t sums[kRows][kColumns];
    for (unsigned r = 0; r < 4; ++r) {
      const int32_t* from = src_lanes<int32_t>(w, c[r]);
      for (unsigned lane = 0; lane < kLanes; ++lane)
        sums[lane / 4 + 8 * (r / 2)][lane % 4 * 2 + r % 2] = from[lane];
    }
    accumulate_integer(ma, mb, inner, sums, (in->aux & 512) != 0);
    for (unsigned r = 0; r < 4; ++r) {
      int32_t* to = dst_lanes<int32_t>(w, d[r]);
      for (unsigned lane = 0; lane < kLanes; ++lane)
        to[lane] = sums[lane / 4 + 8 * (r / 2)][lane % 4 * 2 + r % 2];
    }
    return in + 1;
  }
  for (unsigned r = 0; r < results; ++r) {
    const uint32_t* from = src_lanes<uint32_t>(w, c[r]);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (half) {
        for (unsigned e = 0; e < 2; ++e)
          md[lane / 4 + 8 * r][lane % 4 * 2 + e] =
              float_of_f16(static_cast<uint16_t>(from[lane] >> (16 * e)));
      } else {
        md[lane / 4 + 8 * (r / 2)][lane % 4 * 2 + r % 2] = bit_cast<float>(from[lane]);
      }
    }
  }
  accumulate(kernel, element_a, ma, mb, inner, md);
  for (unsigned r = 0; r < results; ++r) {
    uint32_t* to = dst_lanes<uint32_t>(w, d[r]);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (half) {
        const float* pair = &md[lane / 4 + 8 * r][lane % 4 * 2];
        to[lane] = f16_of_float(pair[0]) | uint32_t{f16_of_float(pair[1])} << 16;
      } else {
        to[lane] = bit_cast<uint32_t>(md[lane / 4 + 8 * (r / 2)][lane % 4 * 2 + r % 2]);
      }
    }
  }
  return in + 1;
}

// ldmatrix and stmatrix. `count` is the number of matrices; `kind` is a sum of 1 (transposed) and 2
// (store). op[0] is the address; lane 8 m + i has that of row i of matrix m. From index `imm` on,
// Kernel::operand_pool has the registers, followed by the number of bytes to add to the addresses.
const Instr* matrix_access(Warp& w, const Instr* in) {
  const Instr* next = in;
  if (!all_lanes(w, in, &next)) return next;
  const int32_t* regs = w.block->kernel->operand_pool.data() + in->imm;
  const bool stores = (in->kind & 2) != 0;
  const bool transposed = (in->kind & 1) != 0;
  char* rows[32] = {};
  for (unsigned lane = 0; lane < 8u * in->count; ++lane) {
    uint64_t at = (in->aux & kWide) != 0 ? src_lanes<uint64_t>(w, in->op[0])[lane]
                                         : src_lanes<uint32_t>(w, in->op[0])[lane];
    at += static_cast<uint64_t>(static_cast<int64_t>(regs[in->count]));
    if (at >= kSharedWindow) at -= kSharedWindow;
    rows[lane] = resolve_address(w, in, Space::shared, lane, at, 16, stores);
    if (rows[lane] == nullptr) return in;
  }
  for (unsigned m = 0; m < in->count; ++m) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned row = transposed ? lane % 4 * 2 + e : lane / 4;
        const unsigned column = transposed ? lane / 4 : lane % 4 * 2 + e;
        char* element = rows[8 * m + row] + 2 * column;
        if (stores) {
          const auto value =
              static_cast<uint16_t>(src_lanes<uint32_t>(w, regs[m])[lane] >> (16 * e));
          std::memcpy(element, &value, 2);
        } else {
          uint16_t value = 0;
          std::memcpy(&value, element, 2);
          uint32_t* to = dst_lanes<uint32_t>(w, regs[m]) + lane;
          *to = e == 0 ? value : *to | uint32_t{value} << 16;
        }
      }
    }
  }
  return in + 1;
}

// movmatrix.trans: transposes an 8 x 8 matrix of 16-bit elements.
const Instr* transpose_matrix(Warp& w, const Instr* in) {
  const Instr* next = in;
  if (!all_lanes(w, in, &next)) return next;
  uint16_t m[8][8];
  const uint32_t* from = src_lanes<uint32_t>(w, in->op[1]);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned e = 0; e < 2; ++e)
      m[lane / 4][lane % 4 * 2 + e] = static_cast<uint16_t>(from[lane] >> (16 * e));
  }
  uint32_t* to = dst_lanes<uint32_t>(w, in->op[0]);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    to[lane] = m[lane % 4 * 2][lane / 4] | uint32_t{m[lane % 4 * 2 + 1][lane / 4]} << 16;
  }
  return in + 1;
}

}  // namespace

bool element_of(Type type, uint16_t* element) {
  switch (type) {
    case Type::bf16:
      *element = kBf16;
      return true;
    case Type::f16:
      *element = kF16;
      return true;
    case Type::tf32:
      *element = kTf32;
      return true;
    case Type::e4m3:
      *element = kE4m3;
      return true;
    case Type::e5m2:
      *element = kE5m2;
      return true;
    case Type::s8:
      *element = kS8;
      return true;
    case Type::u8:
      *element = kU8;
      return true;
    default:
      return false;
  }
}

namespace {

bool decode_mma_sync(Builder& b, Opcode& op, Instr& in) {
  if (!op.take("sync")) return false;
  op.take("aligned");
  struct Shape {
    const char* name;
    unsigned inner;
  };
  constexpr Shape kShapes[] = {{"m16n8k4", 4}, {"m16n8k8", 8}, {"m16n8k16", 16}, {"m16n8k32", 32}};
  unsigned inner = 0;
  for (const Shape& shape : kShapes) {
    if (op.take(shape.name)) inner = shape.inner;
  }
  if (inner == 0 || !op.take("row") || !op.take("col")) return false;
  const bool saturates = op.take("satfinite");
  const Type d = op.take_type();
  const Type a = op.take_type();
  const Type second = op.take_type();
  const Type c = op.take_type();
  uint16_t element_b = 0;
  if (!element_of(a, &in.kind) || !element_of(second, &element_b)) return false;
  const unsigned bits = bits_of(in.kind);
  if (bits != bits_of(element_b) || d != c) return false;
  const bool integer = in.kind == kS8 || in.kind == kU8;
  const bool half = d == Type::f16;
  if (integer ? d != Type::s32 : d != Type::f32 && !half) return false;
  if (!integer && in.kind != element_b && bits != 8) return false;
  const unsigned per = 32 / bits;
  if (inner < 4 * per || inner > 8 * per) return false;
  in.count = static_cast<uint16_t>(inner);
  in.aux = element_b | (half ? 256u : 0u) | (saturates ? 512u : 0u);
  const size_t sizes[] = {half ? 2u : 4u, inner / (2 * per), inner / (4 * per), half ? 2u : 4u};
  std::vector<int32_t> pool;
  for (size_t o = 0; o < 4; ++o) {
    const Operand& operand = b.operand(o);
    // A fragment of one register may be written without braces.
    std::vector<Operand> parts = operand.parts;
    if (operand.kind != Operand::vector) parts = {operand};
    if (parts.size() != sizes[o]) b.refuse_operand("the size of a fragment is wrong");
    for (const Operand& part : parts)
      pool.push_back(o == 0 ? b.dst(part, 4) : b.src(part, Type::b32));
    if (o == 0 && std::count(pool.begin(), pool.end(), kNoRegister) != 0) return false;
  }
  in.imm = static_cast<int64_t>(b.pool_operands(pool));
  in.run = in.guarded = mma;
  return true;
}

bool decode_matrix_access(Builder& b, Opcode& op, Instr& in) {
  const bool stores = op.base == "stmatrix";
  if (!op.take("sync")) return false;
  op.take("aligned");
  if (!op.take("m8n8")) return false;
  unsigned count = 0;
  if (op.take("x1")) count = 1;
  if (op.take("x2")) count = 2;
  if (op.take("x4")) count = 4;
  if (count == 0) return false;
  in.kind = static_cast<uint16_t>((op.take("trans") ? 1 : 0) | (stores ? 2 : 0));
  Space space = Space::generic;
  if (op.take("shared") || op.take("shared::cta")) space = Space::shared;
  if (op.take_type() != Type::b16) return false;
  in.count = static_cast<uint16_t>(count);
  unsigned width = 8;
  int64_t offset = 0;
  in.op[0] = b.address(b.operand(stores ? 0 : 1), &space, &width, &offset);
  in.aux = width == 8 ? kWide : 0;
  in.site = b.new_site();
  const Operand& values = b.operand(stores ? 1 : 0);
  std::vector<Operand> parts = values.parts;
  if (values.kind != Operand::vector) parts = {values};
  if (parts.size() != count) b.refuse_operand("the number of registers does not match");
  std::vector<int32_t> pool;
  for (const Operand& part : parts) {
    pool.push_back(stores ? b.src(part, Type::b32) : b.dst(part, 4));
    if (pool.back() == kNoRegister) return false;
  }
  pool.push_back(static_cast<int32_t>(offset));
  in.imm = static_cast<int64_t>(b.pool_operands(pool));
  in.run = in.guarded = matrix_access;
  return true;
}

}  // namespace

bool decode_mma(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "mma") return decode_mma_sync(b, op, in);
  if (op.base == "ldmatrix" || op.base == "stmatrix") return decode_matrix_access(b, op, in);
  if (op.base == "movmatrix") {
    if (!op.take("sync") || !op.take("aligned") || !op.take("m8n8") || !op.take("trans"))
      return false;
    if (op.take_type() != Type::b16) return false;
    in.op[0] = b.dst(b.operand(0), 4);
    in.op[1] = b.src(b.operand(1), Type::b32);
    in.run = in.guarded = transpose_matrix;
    return in.op[0] != kNoRegister;
  }
  return false;
}

}  // namespace ptx
}  // namespace softcuda
