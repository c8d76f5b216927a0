#include "hostwork/state.h"

#include <algorithm>
#include <map>
#include <utility>

namespace graft::hostwork {
namespace {

std::atomic<std::uint64_t> states{0};

// Failures that were not raised yet and are printed at exit, by the id of their GraphState.
// Failures may outlive their states. The table is leaked on purpose, because driver threads may use
// it while static objects are being destroyed.
struct UnreportedFailures {
  std::mutex mutex;  // never held while acquiring the GIL
  std::map<std::uint64_t, Failure> failures;
};
UnreportedFailures& unreported = *new UnreportedFailures;

void mark_reported(std::uint64_t state) {
  const std::lock_guard<std::mutex> lock(unreported.mutex);
  unreported.failures.erase(state);
}

void store_release(std::int32_t* word, std::int32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

}  // namespace

std::vector<Failure> take_unreported_failures() {
  std::vector<Failure> out;
  const std::lock_guard<std::mutex> lock(unreported.mutex);
  for (auto& [state, failure] : unreported.failures) out.push_back(std::move(failure));
  unreported.failures.clear();
  return out;
}

GraphState::GraphState(std::int32_t* status)
    : id_(states.fetch_add(1)), release_(new ReferenceRelease) {
  if (status != nullptr) status_.push_back(status);
}

void GraphState::announce_launch() noexcept {
  announced_.fetch_add(1);
  const std::lock_guard<std::mutex> lock(listeners_mutex_);
  for (const auto& weak : listeners_) {
    if (const std::shared_ptr<LaunchListener> listener = weak.lock()) listener->launching();
  }
}

void GraphState::add_listener(std::weak_ptr<LaunchListener> listener) {
  if (GraphState* parent = parent_.load(std::memory_order_acquire)) {
    parent->add_listener(std::move(listener));
    return;
  }
  const std::lock_guard<std::mutex> lock(listeners_mutex_);
  listeners_.erase(std::remove_if(listeners_.begin(), listeners_.end(),
                                  [](const auto& weak) { return weak.expired(); }),
                   listeners_.end());
  listeners_.push_back(std::move(listener));
}

bool GraphState::overrun() const {
  const std::lock_guard<std::mutex> lock(listeners_mutex_);
  for (const auto& weak : listeners_) {
    const std::shared_ptr<LaunchListener> listener = weak.lock();
    if (listener && listener->overrun()) return true;
  }
  return false;
}

GraphState::~GraphState() { release_->reference = first_.exception; }

bool GraphState::set_parent(const std::shared_ptr<GraphState>& parent) {
  std::vector<std::int32_t*> words;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (parent_owner_ != nullptr) return parent_owner_ == parent;
    parent_owner_ = parent;
    parent_launches_at_join_ = parent->launched();
    words.swap(status_);
    parent_.store(parent.get(), std::memory_order_release);
  }
  for (std::int32_t* word : words) parent->add_status(word);
  std::vector<std::weak_ptr<LaunchListener>> listeners;
  {
    const std::lock_guard<std::mutex> lock(listeners_mutex_);
    listeners.swap(listeners_);
  }
  for (auto& listener : listeners) parent->add_listener(std::move(listener));
  return true;
}

void GraphState::add_status(std::int32_t* words) {
  if (GraphState* parent = parent_.load(std::memory_order_acquire)) {
    parent->add_status(words);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  status_.push_back(words);
}

std::int64_t GraphState::launched() const {
  const GraphState* parent = parent_.load(std::memory_order_acquire);
  const std::int64_t own = launched_.load(std::memory_order_relaxed);
  return parent == nullptr ? own : own + parent->launched() - parent_launches_at_join_;
}

std::int64_t GraphState::announced() const {
  const GraphState* parent = parent_.load(std::memory_order_acquire);
  const std::int64_t own = announced_.load();
  return parent == nullptr ? own : own + parent->announced() - parent_launches_at_join_;
}

// Returns the number that is added to the run count of a host step to get its replay number. A
// child graph uses the replay numbers of its parent. The run counts of its host steps include
// `launched_` runs from before the child was moved into the parent, but not the parent's launches
// from before the move.
std::int64_t GraphState::base() const {
  const GraphState* parent = parent_.load(std::memory_order_acquire);
  if (parent == nullptr) return base_.load(std::memory_order_acquire);
  return parent->base() + parent_launches_at_join_ - launched_.load(std::memory_order_relaxed);
}

// Stores the status words: first the replay number (word 1), then `code`, the reason of the failure
// (word 0; INVARIANTS.md E3). The caller must hold the mutex.
void GraphState::store_status(std::int32_t code, std::int64_t replay) noexcept {
  for (std::int32_t* words : status_) {
    store_release(words + 1, static_cast<std::int32_t>(replay & 0x7fffffff));
    store_release(words, code);
  }
}

void GraphState::fail(StatusCode code, Failure failure) noexcept {
  if (GraphState* parent = parent_.load(std::memory_order_acquire)) {
    parent->fail(code, std::move(failure));
    return;
  }
  if (record_first(code, std::move(failure)) && failure_callback_ != nullptr)
    failure_callback_(*this);
}

// Records the failure if it is the first one, and returns whether it is.
bool GraphState::record_first(StatusCode code, Failure failure) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) {
    release_later(failure.exception);
    return false;
  }
  store_status(code, failure.replay);
  {
    const std::lock_guard<std::mutex> unreported_lock(unreported.mutex);
    unreported.failures[id_] = Failure{failure.node, failure.replay, nullptr, failure.message};
  }
  first_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  return true;
}

bool GraphState::pending(Failure* out) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_.load(std::memory_order_relaxed)) return false;
  mark_reported(id_);
  *out = first_;
  Py_XINCREF(out->exception);
  return true;
}

void GraphState::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  mark_reported(id_);
  release_later(first_.exception);
  first_ = Failure{};
  store_status(kStatusOk, 0);
  failed_.store(false, std::memory_order_release);
}

PyObject* PayloadCell::set(std::int64_t first, PyObject* value, std::uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty() || entries_.back().first < first) {
    entries_.push_back({first, Reference(new ReferenceRelease(value)), address});
    return nullptr;
  }
  // The last entry is for the same replays, from `first` on. They were not launched yet, so none of
  // them has received its value, which is therefore replaced.
  entries_.back().address = address;
  return std::exchange(entries_.back().value->reference, value);
}

void PayloadCell::bring_forward(std::int64_t first) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.back().first != first + 1) return;
  entries_.back().first = first;
  const std::size_t before = entries_.size() - 2;
  if (entries_.size() > 1 && entries_[before].first == first)
    entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(before));
}

PayloadCell::Payload PayloadCell::pick(std::int64_t replay) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (entries_.size() > 1 && entries_[1].first <= replay) entries_.pop_front();
  return {entries_.front().value->reference, entries_.front().address};
}

void PayloadCell::restart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (entries_.size() > 1) entries_.pop_front();
  entries_.front().first = 0;
}

std::size_t PayloadCell::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

}  // namespace graft::hostwork
