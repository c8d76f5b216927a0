// The state of a launch, with the memory that a kernel reached through a programmatic edge must not
// access before griddepcontrol.wait.
#include "launch_state.h"

#include "ptx.h"
#include "races.h"
#include "stores.h"

namespace softcuda {
namespace ptx {

namespace {

// Calls visit(page, word in page) for each word of an address range.
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
    (write ? at.written : at.read)[word / 64] |= uint64_t{1} << word % 64;
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

void begin_launch(Op& op) {
  if (!options().adversarial && !options().racecheck) {
    static const auto& unchecked = *new std::shared_ptr<LaunchState>(new LaunchState);
    op.launch_state = unchecked;
    return;
  }
  const Kernel& kernel = *op.work.kernel->function->ptx;
  auto state = std::make_shared<LaunchState>();
  if (options().racecheck) state->races = std::make_unique<GlobalRaces>(kernel);
  if (options().adversarial) state->pending = std::make_unique<PendingStores>();
  state->log = op.log;
  if (op.precedes_programmatically) state->log = std::make_shared<AccessLog>(kernel.name);
  // Kernels for architectures without griddepcontrol are ordered fully.
  if (kernel.target >= 90) state->unordered = op.unordered;
  for (const Op* primary : op.primaries) {
    if (kernel.target < 90 || primary->work.kind != WorkKind::kernel) continue;
    if (primary->launch_state == nullptr || primary->launch_state->log == nullptr) continue;
    state->unordered.push_back(primary->launch_state->log);
  }
  op.launch_state = std::move(state);
}

std::shared_ptr<AccessLog> make_access_log(const KernelWork& work) {
  if (work.function->ptx == nullptr || (!options().adversarial && !options().racecheck)) {
    return nullptr;
  }
  return std::make_shared<AccessLog>(work.function->ptx->name);
}

void set_known(AccessLog& log) { log.known.store(true, std::memory_order_relaxed); }

bool is_known(const AccessLog& log) { return log.known.load(std::memory_order_relaxed); }

void end_launch(Op& op) {
  if (!options().adversarial && !options().racecheck) return;
  end_launch_stores(*op.launch_state);
  op.launch_state->races = nullptr;
  op.launch_state->unordered.clear();
}

}  // namespace ptx
}  // namespace softcuda
