// The state of a launch, and the log of the memory that it accesses. If a programmatic edge leads
// from this launch to a kernel, the kernel must not access this memory before griddepcontrol.wait.
#include "launch_state.h"

#include "races.h"
#include "stores.h"

namespace softcuda {
namespace ptx {

namespace {

// Calls visit(page, word) for each 4-byte word of an address range. `word` is its index in the
// page.
template <class Visit>
void visit_words(const char* storage, unsigned bytes, const Visit& visit) {
  const auto first = reinterpret_cast<uint64_t>(storage);
  for (uint64_t word = first / 4; word <= (first + bytes - 1) / 4; ++word) {
    visit(word / 512, word % 512);
  }
}

}  // namespace

void AccessLog::add(const char* storage, unsigned bytes, bool write) {
  std::lock_guard<std::mutex> lock(mutex_);
  visit_words(storage, bytes, [&](uint64_t page, uint64_t word) {
    Page& at = pages_[page];
    auto& words = write ? at.written : at.read;
    words[word / 64] |= uint64_t{1} << word % 64;
  });
}

template <class Test>
bool AccessLog::any_word(const char* storage, unsigned bytes, const Test& test) const {
  bool found = false;
  visit_words(storage, bytes, [&](uint64_t page, uint64_t word) {
    const auto at = pages_.find(page);
    found = found || (at != pages_.end() && (test(at->second, word / 64) >> word % 64 & 1) != 0);
  });
  return found;
}

bool AccessLog::writes(const char* storage, unsigned bytes) const {
  return any_word(storage, bytes, [](const Page& page, uint64_t i) { return page.written[i]; });
}

bool AccessLog::accesses(const char* storage, unsigned bytes) const {
  return any_word(storage, bytes,
                  [](const Page& page, uint64_t i) { return page.written[i] | page.read[i]; });
}

LaunchState::LaunchState() = default;
LaunchState::~LaunchState() = default;

}  // namespace ptx
}  // namespace softcuda
