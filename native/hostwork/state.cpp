#include "hostwork/state.h"

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
  const std::lock_guard<std::mutex> lock(listeners_mutex_);
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

bool GraphState::set_parent(std::shared_ptr<GraphState> parent) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (keep_parent_ != nullptr) return keep_parent_ == parent;
  keep_parent_ = std::move(parent);
  parent_.store(keep_parent_.get(), std::memory_order_release);
  return true;
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
  if (status_ != nullptr) {
    store_release(status_ + 1, static_cast<std::int32_t>(failure.replay & 0x7fffffff));
    store_release(status_, code);
  }
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
  if (status_ != nullptr) {
    store_release(status_ + 1, 0);
    store_release(status_, kStatusOk);
  }
  failed_.store(false, std::memory_order_release);
}

}  // namespace graft::hostwork
