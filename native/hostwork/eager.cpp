#include "hostwork/eager.h"

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace graft::hostwork {
namespace {

// Leaked on purpose: driver threads may still use it while static objects are being destroyed.
struct Eager {
  std::mutex mutex;  // never held while taking the GIL or calling the driver
  std::set<EagerRecord*> pending;
  std::map<std::uint64_t, std::deque<Failure>> failures;
};
Eager& eager() {
  static Eager* const instance = new Eager;
  return *instance;
}

void forget(EagerRecord* record) {
  const std::lock_guard<std::mutex> lock(eager().mutex);
  eager().pending.erase(record);
}

// Releases what an abandoned record refers to, but not the record.
class AbandonedEnd final : public Reapable {
 public:
  explicit AbandonedEnd(EagerRecord* record) : record_(record) {}
  void reap(std::vector<PyObject*>& references) noexcept override { record_->reap(references); }

 private:
  EagerRecord* const record_;
};

}  // namespace

void EagerRecord::entry(void* data) {
  auto* record = static_cast<EagerRecord*>(data);
  if (record->state_.exchange(kTaken) != kPending) return;  // abandoned before
  record->run();
  forget(record);
  retire(record);
}

Result EagerRecord::launch(std::uint64_t stream, bool spin) {
  stream_ = stream;
  {
    const std::lock_guard<std::mutex> lock(eager().mutex);
    eager().pending.insert(this);
  }
  // From here on the record may run, and be gone, before the call returns.
  const Result result =
      launch_host(reinterpret_cast<void*>(stream), &EagerRecord::entry, this, spin);
  if (result != kSuccess) {
    forget(this);
    retire(this);
  }
  return result;
}

void EagerRecord::fail_eager(Failure failure) {
  const std::lock_guard<std::mutex> lock(eager().mutex);
  eager().failures[stream_].push_back(std::move(failure));
}

bool take_eager_failure(std::uint64_t stream, Failure* out) {
  const std::lock_guard<std::mutex> lock(eager().mutex);
  const auto found = eager().failures.find(stream);
  if (found == eager().failures.end()) return false;
  *out = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) eager().failures.erase(found);
  return true;
}

std::vector<Failure> take_eager_failures() {
  std::vector<Failure> out;
  const std::lock_guard<std::mutex> lock(eager().mutex);
  for (auto& [stream, failures] : eager().failures) {
    for (Failure& failure : failures) out.push_back(std::move(failure));
  }
  eager().failures.clear();
  return out;
}

std::int64_t abandon_eager() {
  const std::lock_guard<std::mutex> lock(eager().mutex);
  std::int64_t count = 0;
  for (EagerRecord* record : eager().pending) {
    if (record->state_.exchange(EagerRecord::kTaken) != EagerRecord::kPending) continue;
    retire(new AbandonedEnd(record));
    ++count;
  }
  eager().pending.clear();
  return count;
}

std::int64_t pending_eager() {
  const std::lock_guard<std::mutex> lock(eager().mutex);
  return static_cast<std::int64_t>(eager().pending.size());
}

}  // namespace graft::hostwork
