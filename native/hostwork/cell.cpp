#include "hostwork/cell.h"

#include <utility>

#include "hostwork/state.h"

namespace graft::hostwork {

PayloadCell::~PayloadCell() {
  for (Entry& entry : entries_) drop_later(entry.value);
}

PyObject* PayloadCell::set(std::int64_t first, PyObject* value, std::uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty() || entries_.back().first < first) {
    entries_.push_back({first, value, address});
    return nullptr;
  }
  // No replay was launched in between: nobody has seen the value.
  entries_.back().address = address;
  return std::exchange(entries_.back().value, value);
}

PayloadCell::Payload PayloadCell::pick(std::int64_t replay) {
  std::deque<PyObject*> passed;
  Payload out{nullptr, 0};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (entries_.size() > 1 && entries_[1].first <= replay) {
      passed.push_back(entries_.front().value);
      entries_.pop_front();
    }
    if (!entries_.empty()) out = {entries_.front().value, entries_.front().address};
  }
  for (PyObject* value : passed) drop_later(value);
  return out;
}

void PayloadCell::restart() {
  std::deque<PyObject*> passed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (entries_.size() > 1) {
      passed.push_back(entries_.front().value);
      entries_.pop_front();
    }
    if (!entries_.empty()) entries_.front().first = 0;
  }
  for (PyObject* value : passed) drop_later(value);
}

std::size_t PayloadCell::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

}  // namespace graft::hostwork
