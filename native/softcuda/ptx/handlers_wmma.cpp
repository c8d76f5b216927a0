// wmma: products of matrices whose fragments have no documented layout. On this device, the
// elements of a matrix are numbered row by row, and lane n has the elements n * E to n * E + E - 1,
// where E is the number of elements divided by 32. Some fragments of A and B have registers for
// twice as many elements, because GPUs store each element in two lanes. On this device, a lane then
// stores each of its elements twice.
#include <algorithm>

#include "mma.h"

namespace softcuda {
namespace ptx {
namespace {

enum Role : uint16_t { kA, kB, kC };
constexpr uint32_t kColumnMajor = 1u << 16;
constexpr uint32_t kSaturates = 1u << 17;
constexpr uint32_t kHalfSums = 1u << 18;    // C is f16
constexpr uint32_t kHalfResult = 1u << 19;  // D is f16

struct Shape {
  const char* name;
  unsigned m, n, k;
};
constexpr Shape kShapes[] = {{"m16n16k16", 16, 16, 16},
                             {"m32n8k16", 32, 8, 16},
                             {"m8n32k16", 8, 32, 16},
                             {"m16n16k8", 16, 16, 8}};

struct Size {
  unsigned rows, columns;
  unsigned per_lane() const { return rows * columns / kLanes; }
};
Size size_of_matrix(const Shape& shape, unsigned role) {
  if (role == kA) return {shape.m, shape.k};
  if (role == kB) return {shape.k, shape.n};
  return {shape.m, shape.n};
}

// The place of a matrix element in the registers of a lane: register number and first bit.
struct Place {
  unsigned reg, shift;
};
Place place(unsigned s, unsigned bits) {
  const unsigned per = 32 / bits;
  return {s / per, s % per * bits};
}

// wmma.load and wmma.store. op[0] is the address, op[1] the stride or kNoRegister, `kind` the role
// of the matrix (A, B or C), and `count` the bytes of an element. From index `imm` on,
// Kernel::operand_pool has the index of the shape, the number of bytes to add to the address, the
// number of registers, the registers, and a last word that is 1 for a store.
const Instr* matrix_access(Warp& w, const Instr* in) {
  const Instr* next = in;
  if (!all_lanes(w, in, &next)) return next;
  const int32_t* pool = w.block->kernel->operand_pool.data() + in->imm;
  const Size size = size_of_matrix(kShapes[pool[0]], in->kind);
  const auto registers = static_cast<unsigned>(pool[2]);
  const int32_t* regs = pool + 3;
  const bool stores = regs[registers] != 0;
  const bool by_column = (in->aux & kColumnMajor) != 0;
  const auto space = static_cast<Space>(in->aux >> kSpaceShift & 7);
  const unsigned bits = 8u * in->count;
  const unsigned slots = registers * (32 / bits);
  uint64_t base = (in->aux & kWide) != 0 ? src_lanes<uint64_t>(w, in->op[0])[0]
                                         : src_lanes<uint32_t>(w, in->op[0])[0];
  base += static_cast<uint64_t>(static_cast<int64_t>(pool[1]));
  const uint64_t stride = in->op[1] == kNoRegister ? (by_column ? size.rows : size.columns)
                                                   : src_lanes<uint32_t>(w, in->op[1])[0];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    uint32_t words[16] = {};
    for (unsigned s = 0; s < slots && stores; s += 32 / bits) {
      words[s / (32 / bits)] = src_lanes<uint32_t>(w, regs[s / (32 / bits)])[lane];
    }
    for (unsigned s = 0; s < slots; ++s) {
      if (stores && s >= size.per_lane()) break;
      const unsigned element = lane * size.per_lane() + s % size.per_lane();
      const unsigned i = element / size.columns;
      const unsigned j = element % size.columns;
      const uint64_t index = by_column ? j * stride + i : i * stride + j;
      char* at = resolve_address(w, in, space, lane, base + index * in->count, in->count, stores);
      if (at == nullptr) return in;
      const Place p = place(s, bits);
      if (stores) {
        const uint32_t value = words[p.reg] >> p.shift;
        std::memcpy(at, &value, in->count);
      } else {
        uint32_t value = 0;
        std::memcpy(&value, at, in->count);
        words[p.reg] |= value << p.shift;
      }
    }
    for (unsigned r = 0; r < registers && !stores; ++r) {
      dst_lanes<uint32_t>(w, regs[r])[lane] = words[r];
    }
  }
  return in + 1;
}

// Calls visit(row, column, word, shift) for each element of a matrix. `word` is the 32-bit register
// that contains the element, and `shift` the element's first bit in it.
template <class Visit>
void visit_elements(const Warp& w, const int32_t* regs, Size size, unsigned bits,
                    const Visit& visit) {
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned s = 0; s < size.per_lane(); ++s) {
      const unsigned element = lane * size.per_lane() + s;
      const Place p = place(s, bits);
      visit(element / size.columns, element % size.columns,
            src_lanes<uint32_t>(w, regs[p.reg])[lane], p.shift);
    }
  }
}

struct Matrices {
  float a[32][32];
  float b[32][32];
  uint32_t c[32][32];  // bits of floats or integers
};

// Computes the 16 x 8 elements of D that begin at (row, column).
void multiply_part(const Kernel& kernel, const Instr* in, const Shape& shape, Matrices& m,
                   unsigned row, unsigned column) {
  alignas(64) float a[kRows][32] = {};
  alignas(64) float b[32][kColumns] = {};
  alignas(64) uint32_t d[kRows][kColumns] = {};
  const unsigned rows = std::min(kRows, shape.m - row);
  for (unsigned i = 0; i < rows; ++i) {
    std::memcpy(a[i], m.a[row + i], sizeof a[i]);
    std::memcpy(d[i], m.c[row + i] + column, sizeof d[i]);
  }
  for (unsigned k = 0; k < shape.k; ++k) std::memcpy(b[k], m.b[k] + column, sizeof b[k]);
  if (in->kind == kS8 || in->kind == kU8) {
    int32_t sums[kRows][kColumns];
    std::memcpy(sums, d, sizeof d);
    accumulate_integer(a, b, shape.k, sums, (in->aux & kSaturates) != 0);
    std::memcpy(d, sums, sizeof d);
  } else {
    float sums[kRows][kColumns];
    std::memcpy(sums, d, sizeof d);
    accumulate(kernel, in->kind, a, b, shape.k, sums);
    std::memcpy(d, sums, sizeof d);
  }
  for (unsigned i = 0; i < rows; ++i) std::memcpy(m.c[row + i] + column, d[i], sizeof d[i]);
}

// wmma.mma. `kind` is the element type of A and B. From index `imm` on, Kernel::operand_pool has
// the index of the shape, the numbers of registers of D, A, B and C, and the registers.
const Instr* multiply(Warp& w, const Instr* in) {
  const Instr* next = in;
  if (!all_lanes(w, in, &next)) return next;
  const Kernel& kernel = *w.block->kernel;
  const int32_t* pool = kernel.operand_pool.data() + in->imm;
  const Shape& shape = kShapes[pool[0]];
  const int32_t* d = pool + 5;
  const int32_t* a = d + pool[1];
  const int32_t* b = a + pool[2];
  const int32_t* c = b + pool[3];
  const unsigned bits = bits_of(in->kind);
  Matrices m = {};
  const auto element = [&](uint32_t word, unsigned shift) {
    return value_of(in->kind, word, shift / bits);
  };
  visit_elements(w, a, size_of_matrix(shape, kA), bits,
                 [&](unsigned i, unsigned j, uint32_t word, unsigned shift) {
                   m.a[i][j] = element(word, shift);
                 });
  visit_elements(w, b, size_of_matrix(shape, kB), bits,
                 [&](unsigned i, unsigned j, uint32_t word, unsigned shift) {
                   m.b[i][j] = element(word, shift);
                 });
  const Size size = size_of_matrix(shape, kC);
  const bool half = (in->aux & kHalfSums) != 0;
  visit_elements(w, c, size, half ? 16 : 32,
                 [&](unsigned i, unsigned j, uint32_t word, unsigned shift) {
                   const auto bits16 = static_cast<uint16_t>(word >> shift);
                   m.c[i][j] = half ? bit_cast<uint32_t>(float_of_f16(bits16)) : word;
                 });
  for (unsigned row = 0; row < shape.m; row += kRows) {
    for (unsigned column = 0; column < shape.n; column += kColumns) {
      multiply_part(kernel, in, shape, m, row, column);
    }
  }
  const bool half_result = (in->aux & kHalfResult) != 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    uint32_t words[8] = {};
    for (unsigned s = 0; s < size.per_lane(); ++s) {
      const unsigned e = lane * size.per_lane() + s;
      const uint32_t value = m.c[e / size.columns][e % size.columns];
      const Place p = place(s, half_result ? 16 : 32);
      words[p.reg] |=
          half_result ? uint32_t{f16_of_float(bit_cast<float>(value))} << p.shift : value;
    }
    for (int r = 0; r < pool[1]; ++r) {
      dst_lanes<uint32_t>(w, d[r])[lane] = words[r];
    }
  }
  return in + 1;
}

// Returns the number of 32-bit registers per lane of a fragment of A, B or C (`role`). `doubled` is
// set if the layout stores each element twice.
unsigned registers_of(const Shape& shape, unsigned role, unsigned bits, bool doubled) {
  return size_of_matrix(shape, role).per_lane() * bits / 32 * (doubled ? 2 : 1);
}

std::vector<Operand> parts_of(const Operand& operand) {
  if (operand.kind == Operand::vector) return operand.parts;
  return {operand};
}

int take_shape(Opcode& op) {
  for (int i = 0; i < 4; ++i) {
    if (op.take(kShapes[i].name)) return i;
  }
  return -1;
}

bool decode_matrix(Builder& b, Opcode& op, Instr& in, bool stores) {
  in.kind = op.take("a") ? kA : op.take("b") ? kB : kC;
  if (in.kind == kC && !op.take(stores ? "d" : "c")) return false;
  const int shape = take_shape(op);
  if (shape < 0) return false;
  const bool by_column = op.take("col");
  if (!by_column && !op.take("row")) return false;
  Space space = Space::generic;
  if (op.take("global")) space = Space::global;
  if (op.take("shared") || op.take("shared::cta")) space = Space::shared;
  const Type type = op.take_type();
  const bool sums = type == Type::f32 || type == Type::s32 || type == Type::f16;
  uint16_t element = 0;
  if (in.kind == kC ? !sums : !element_of(type, &element)) return false;
  if ((type == Type::tf32) != (shape == 3) && in.kind != kC) return false;
  in.count = static_cast<uint16_t>(size_of(type));
  const Operand& memory = b.operand(stores ? 0 : 1);
  const std::vector<Operand> parts = parts_of(b.operand(stores ? 1 : 0));
  const unsigned count =
      registers_of(kShapes[shape], in.kind, 8u * in.count, type == Type::f16 && in.kind != kC);
  if (parts.size() != count) b.refuse_operand("the size of a fragment is wrong");
  unsigned width = 8;
  int64_t offset = 0;
  in.op[0] = b.address(memory, &space, &width, &offset);
  in.op[1] = b.operand_count() > 2 ? b.src(b.operand(2), Type::u32) : kNoRegister;
  in.aux = (width == 8 ? kWide : 0) | static_cast<uint32_t>(space) << kSpaceShift |
           (by_column ? kColumnMajor : 0);
  in.site = b.new_site();
  std::vector<int32_t> pool = {shape, static_cast<int32_t>(offset), static_cast<int32_t>(count)};
  for (const Operand& part : parts) {
    pool.push_back(stores ? b.src(part, Type::b32) : b.dst(part, 4));
    if (pool.back() == kNoRegister) b.refuse_operand("a register is expected");
  }
  pool.push_back(stores ? 1 : 0);
  in.imm = static_cast<int64_t>(b.pool_operands(pool));
  in.run = in.guarded = matrix_access;
  return true;
}

bool decode_product(Builder& b, Opcode& op, Instr& in) {
  // The layouts of A and B need not be known here, because wmma.load has already applied them.
  for (int i = 0; i < 2; ++i) {
    if (!op.take("row") && !op.take("col")) return false;
  }
  const int shape = take_shape(op);
  if (shape < 0) return false;
  if (op.take("satfinite")) in.aux |= kSaturates;
  const Type d = op.take_type();
  Type a = op.take_type();
  Type c = op.take_type();
  const Type last = op.take_type();
  if (last == Type::none) {  // no types of A and B: both are f16
    c = a;
    a = Type::f16;
  } else {
    if (a != c) return false;
    c = last;
  }
  if (!element_of(a, &in.kind) || in.kind == kE4m3 || in.kind == kE5m2) return false;
  const bool integer = in.kind == kS8 || in.kind == kU8;
  for (const Type sums : {d, c}) {
    const bool half = sums == Type::f16 && in.kind == kF16;
    if (integer ? sums != Type::s32 : sums != Type::f32 && !half) return false;
  }
  if ((in.kind == kTf32) != (shape == 3)) return false;
  if (c == Type::f16) in.aux |= kHalfSums;
  if (d == Type::f16) in.aux |= kHalfResult;
  const unsigned bits = bits_of(in.kind);
  const bool doubled = in.kind == kF16;
  const Shape& s = kShapes[shape];
  const unsigned counts[] = {registers_of(s, kC, d == Type::f16 ? 16 : 32, false),
                             registers_of(s, kA, bits, doubled), registers_of(s, kB, bits, doubled),
                             registers_of(s, kC, c == Type::f16 ? 16 : 32, false)};
  std::vector<int32_t> pool = {shape};
  for (const unsigned count : counts) pool.push_back(static_cast<int32_t>(count));
  for (size_t o = 0; o < 4; ++o) {
    const std::vector<Operand> parts = parts_of(b.operand(o));
    if (parts.size() != counts[o]) b.refuse_operand("the size of a fragment is wrong");
    for (const Operand& part : parts) {
      pool.push_back(o == 0 ? b.dst(part, 4) : b.src(part, Type::b32));
      if (pool.back() == kNoRegister) b.refuse_operand("a register is expected");
    }
  }
  in.imm = static_cast<int64_t>(b.pool_operands(pool));
  in.run = in.guarded = multiply;
  return true;
}

}  // namespace

bool decode_wmma(Builder& b, Opcode& op, Instr& in) {
  if (op.base != "wmma") return false;
  const bool loads = op.take("load");
  const bool stores = op.take("store");
  const bool multiplies = !loads && !stores && op.take("mma");
  if (!op.take("sync")) return false;
  op.take("aligned");
  if (multiplies) return decode_product(b, op, in);
  return (loads || stores) && decode_matrix(b, op, in, stores);
}

}  // namespace ptx
}  // namespace softcuda
