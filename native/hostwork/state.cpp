#include "hostwork/state.h"

#include <algorithm>
#include <utility>

#include "hostwork/reaper.h"

namespace graft::hostwork {
namespace {

class ReferenceEnd final : public Reapable {
 public:
  explicit ReferenceEnd(PyObject* reference) : reference_(reference) {}
  void reap(std::vector<PyObject*>& references) noexcept override {
    references.push_back(reference_);
  }

 private:
  PyObject* const reference_;
};

void store_release(std::int32_t* word, std::int32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

}  // namespace

void drop_later(PyObject* reference) noexcept {
  if (reference != nullptr) retire(new ReferenceEnd(reference));
}

void GraphState::count_launch() noexcept {
  launched_.fetch_add(1);
  const std::lock_guard<std::mutex> lock(listeners_mutex_);
  for (const auto& weak : listeners_) {
    if (const std::shared_ptr<LaunchListener> listener = weak.lock()) listener->launched();
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

GraphState::~GraphState() { drop_later(first_.exception); }

bool GraphState::set_parent(const std::shared_ptr<GraphState>& parent) {
  std::vector<std::int32_t*> words;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (keep_parent_ != nullptr) return keep_parent_ == parent;
    keep_parent_ = parent;
    joined_at_ = parent->launched();
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

void GraphState::remove_status(std::int32_t* words) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status_.erase(std::remove(status_.begin(), status_.end(), words), status_.end());
  }
  if (GraphState* parent = parent_.load(std::memory_order_acquire)) parent->remove_status(words);
}

std::int64_t GraphState::launched() const {
  const GraphState* parent = parent_.load(std::memory_order_acquire);
  const std::int64_t own = launched_.load(std::memory_order_relaxed);
  return parent == nullptr ? own : own + parent->launched() - joined_at_;
}

// Replays are numbered as the parent's: this graph's records ran `launched_` times before.
std::int64_t GraphState::base() const {
  const GraphState* parent = parent_.load(std::memory_order_acquire);
  if (parent == nullptr) return base_.load(std::memory_order_acquire);
  return parent->base() + joined_at_ - launched_.load(std::memory_order_relaxed);
}

// Word 0 after word 1 (E3). The mutex is held.
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
  if (note(code, std::move(failure)) && report_ != nullptr) report_(*this);
}

// True for the first failure.
bool GraphState::note(StatusCode code, Failure failure) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++failures_;
  if (failed_.load(std::memory_order_relaxed)) {
    drop_later(failure.exception);
    return false;
  }
  store_status(code, failure.replay);
  first_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  return true;
}

bool GraphState::pending(Failure* out) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_.load(std::memory_order_relaxed)) return false;
  *out = first_;
  Py_XINCREF(out->exception);
  return true;
}

std::int64_t GraphState::failures() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failures_;
}

void GraphState::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_later(first_.exception);
  first_ = Failure{};
  failures_ = 0;
  store_status(kStatusOk, 0);
  failed_.store(false, std::memory_order_release);
}

}  // namespace graft::hostwork
