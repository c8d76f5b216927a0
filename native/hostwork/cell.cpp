#include "hostwork/cell.h"

#include <utility>

namespace graft::hostwork {

PayloadCell::~PayloadCell() {
  for (Entry& entry : entries_) retire(entry.value);
}

PyObject* PayloadCell::set(std::int64_t first, PyObject* value, std::uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty() || entries_.back().first < first) {
    auto end = std::make_unique<ReferenceEnd>();
    entries_.push_back({first, end.get(), address});
    end.release()->reference = value;
    return nullptr;
  }
  // No replay was launched in between: nobody has seen the value.
  entries_.back().address = address;
  return std::exchange(entries_.back().value->reference, value);
}

void PayloadCell::drop_before(std::size_t kept) noexcept {
  for (; kept > 0; --kept) {
    retire(entries_.front().value);
    entries_.pop_front();
  }
}

PayloadCell::Payload PayloadCell::pick(std::int64_t replay) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t kept = 0;
  while (kept + 1 < entries_.size() && entries_[kept + 1].first <= replay) ++kept;
  drop_before(kept);
  if (entries_.empty()) return {nullptr, 0};
  return {entries_.front().value->reference, entries_.front().address};
}

void PayloadCell::restart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty()) return;
  drop_before(entries_.size() - 1);
  entries_.front().first = 0;
}

std::size_t PayloadCell::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

}  // namespace graft::hostwork
