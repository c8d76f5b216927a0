// Payloads that change between replays: INVARIANTS.md A1 to A3.
#pragma once

#include <Python.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "hostwork/reaper.h"

namespace graft::hostwork {

// One value per replay: the youngest that was set for it or for an earlier one. Values that no
// later run can pick are let go when a run picks a younger one.
//
// Made by std::make_shared only, see GraphState.
class PayloadCell : public std::enable_shared_from_this<PayloadCell> {
 public:
  PayloadCell() = default;
  ~PayloadCell();
  PayloadCell(const PayloadCell&) = delete;
  PayloadCell& operator=(const PayloadCell&) = delete;

  // For replays from `first` on. Takes over a reference; `address` is what native work gets.
  // Returns a value that it replaced before any replay could see it, which is the caller's then: a
  // million of them at once would only queue up for the reaper.
  [[nodiscard]] PyObject* set(std::int64_t first, PyObject* value, std::uint64_t address);

  struct Payload {
    PyObject* value;  // borrowed: it lives until a later replay picks
    std::uint64_t address;
  };
  Payload pick(std::int64_t replay);

  // Replays are numbered anew: the youngest value is for all of them.
  void restart();
  std::size_t size();

 private:
  struct Entry {
    std::int64_t first;
    ReferenceEnd* value;  // made with the entry: letting go of it allocates nothing
    std::uint64_t address;
  };
  // Takes out the values before entry `kept`. The mutex is held.
  void drop_before(std::size_t kept) noexcept;

  std::mutex mutex_;  // never held while taking the GIL
  std::deque<Entry> entries_;
};

}  // namespace graft::hostwork
