// Recursive calls. Functions are inlined, so a recursive call is inside an inlined copy of the
// called function. It jumps back to the beginning of this copy. Before the jump, the thread's
// registers and the parameters of the functions that have not returned are saved. When the thread
// reaches the end of the copy, they are restored, and the thread continues after the call.
#include <cstring>

#include "builder.h"

namespace softcuda {
namespace ptx {

namespace {

// For a recursive call, Kernel::operand_pool contains: the distance, in instructions, from the call
// to the beginning of the inlined copy that it calls; the number of this copy (Builder::Instance);
// the bytes of the frame; and three lists, each preceded by its length. The lists are (from, to,
// bytes) of each argument, (from, to, bytes) of each result, and (address, bytes) of the parameter
// memory to save. All addresses are offsets in the thread's local memory.
constexpr size_t kHeader = 3;

char* local_memory(const Warp& w, unsigned lane) {
  const Block& b = *w.block;
  return b.local + (size_t{w.index} * kLanes + lane) * b.kernel->local_bytes;
}

void copy_parameters(const int32_t* list, char* local) {
  for (int32_t i = 0; i < *list; ++i) {
    const int32_t* item = list + 1 + 3 * i;
    std::memmove(local + item[1], local + item[0], static_cast<size_t>(item[2]));
  }
}

// Visits the state of one thread that is saved by a recursive call: calls visit(memory, bytes) for
// each register and each range of parameter memory in `ranges`, and visit_predicate(word) for each
// predicate.
template <class Visit, class VisitPredicate>
void visit_saved(const Warp& w, const int32_t* ranges, unsigned lane, const Visit& visit,
                 const VisitPredicate& visit_predicate) {
  for (const auto& item : w.block->kernel->saved_registers) {
    char* const slot = w.regs + item.first;
    if (item.second == 0) {
      visit_predicate(reinterpret_cast<uint32_t*>(slot));
    } else {
      visit(slot + lane * item.second, item.second);
    }
  }
  for (int32_t i = 0; i < *ranges; ++i) {
    const int32_t* item = ranges + 1 + 2 * i;
    visit(local_memory(w, lane) + item[0], static_cast<unsigned>(item[1]));
  }
}

const int32_t* skip_triples(const int32_t* list) { return list + 1 + 3 * *list; }

}  // namespace

bool push_frame(Warp& w, const Instr* in, unsigned lane) {
  Block& b = *w.block;
  const int32_t* pool = b.kernel->operand_pool.data() + in->imm;
  auto& frames = b.frames[w.index * kLanes + lane];
  size_t used = static_cast<size_t>(pool[2]);
  for (const Frame& frame : frames) {
    used += static_cast<size_t>(b.kernel->operand_pool[static_cast<size_t>(frame.call->imm) + 2]);
  }
  if (used > b.stack_limit) {
    b.fail(CUDA_ERROR_HARDWARE_STACK_ERROR, &w, static_cast<int>(lane), in,
           "stack overflow: " + std::to_string(frames.size() + 1) +
               " nested recursive calls need " + std::to_string(used) +
               " bytes, but CU_LIMIT_STACK_SIZE is " + std::to_string(b.stack_limit));
    return false;
  }
  const int32_t* arguments = pool + kHeader;
  const int32_t* ranges = skip_triples(skip_triples(arguments));
  Frame frame{in, {}};
  visit_saved(
      w, ranges, lane,
      [&](const char* at, unsigned bytes) {
        frame.saved.insert(frame.saved.end(), at, at + bytes);
      },
      [&](const uint32_t* word) { frame.saved.push_back((*word >> lane & 1) != 0 ? 1 : 0); });
  frames.push_back(std::move(frame));
  copy_parameters(arguments, local_memory(w, lane));
  return true;
}

const Instr* pop_frame(Warp& w, unsigned lane, int32_t instance) {
  Block& b = *w.block;
  auto& frames = b.frames[w.index * kLanes + lane];
  if (frames.empty()) return nullptr;
  const Frame frame = std::move(frames.back());
  const int32_t* pool = b.kernel->operand_pool.data() + frame.call->imm;
  if (pool[1] != instance) {
    frames.back() = frame;
    return nullptr;
  }
  frames.pop_back();
  const int32_t* results = skip_triples(pool + kHeader);
  // The results are in memory that pop_frame() restores, so they are copied out of it first.
  char* const local = local_memory(w, lane);
  std::vector<char> values;
  for (int32_t i = 0; i < *results; ++i) {
    const int32_t* item = results + 1 + 3 * i;
    values.insert(values.end(), local + item[0], local + item[0] + item[2]);
  }
  const char* from = frame.saved.data();
  visit_saved(
      w, skip_triples(results), lane,
      [&](char* at, unsigned bytes) {
        std::memcpy(at, from, bytes);
        from += bytes;
      },
      [&](uint32_t* word) { *word = (*word & ~(1u << lane)) | uint32_t{*from++ != 0} << lane; });
  const char* value = values.data();
  for (int32_t i = 0; i < *results; ++i) {
    const int32_t* item = results + 1 + 3 * i;
    std::memcpy(local + item[1], value, static_cast<size_t>(item[2]));
    value += item[2];
  }
  return frame.call + 1;
}

}  // namespace ptx
}  // namespace softcuda
