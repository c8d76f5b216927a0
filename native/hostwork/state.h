// What the host steps of one graph share: its replay status, its first failure, and the payloads
// that change between replays (INVARIANTS.md A1 to A3, E1 to E3).
#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hostwork/reaper.h"

namespace graft::hostwork {

// Values of status word 0; word 1 holds the low 31 bits of the replay that failed first.
enum StatusCode : std::int32_t {
  kStatusOk = 0,
  kStatusPython = 1,    // a Python callable raised
  kStatusNative = 2,    // a native function reported failure or threw
  kStatusShutdown = 3,  // the interpreter is shutting down: Python is not entered any more
  kStatusDeadline = 4,  // a mailbox was not answered, or not reached, in time
};

struct Failure {
  std::string node;
  std::int64_t replay = 0;        // 0: eager work, which has no replay
  PyObject* exception = nullptr;  // owned; null for native failures
  std::string message;
};

// Hears of every launch of a definition; called without the GIL.
class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  virtual void launched() noexcept = 0;
  // Is host work of an ended replay still running?
  virtual bool overrun() const = 0;
};

// The status stays set until clear(), so every later replay stands down as well.
//
// Made by std::make_shared only, like PayloadCell: with enable_shared_from_this nanobind hands out
// that very owner; otherwise it would make one whose deleter takes the GIL, on whatever thread.
class GraphState : public std::enable_shared_from_this<GraphState> {
 public:
  // `status` points to two pinned int32 words that outlive this object, or is null.
  explicit GraphState(std::int32_t* status);
  ~GraphState();
  GraphState(const GraphState&) = delete;
  GraphState& operator=(const GraphState&) = delete;

  bool failed() const {
    if (failed_.load(std::memory_order_acquire)) return true;
    const GraphState* parent = parent_.load(std::memory_order_acquire);
    return parent != nullptr && parent->failed();
  }

  // Failures count as the parent's too, its failures stop the host steps here, and its launches are
  // launches of this state's graph, which became a child graph. False: it has another parent.
  bool set_parent(const std::shared_ptr<GraphState>& parent);
  // Called with each first failure of a state without a parent, on the failing thread.
  void report_to(void (*report)(GraphState&)) { report_ = report; }

  // Takes ownership of failure.exception. The first failure wins.
  void fail(StatusCode code, Failure failure) noexcept;

  // A copy of the first failure; its exception is a new reference (GIL held). Somebody was told
  // then.
  bool pending(Failure* out) const;
  void clear();

  // What is added to a record's count of runs to give the replay number of the executable.
  std::int64_t base() const;
  void set_base(std::int64_t base) { base_.store(base, std::memory_order_release); }

  // Launches of the definition by all of its executables.
  std::int64_t launched() const;
  void count_launch() noexcept;

  void add_listener(std::weak_ptr<LaunchListener> listener);
  // Is host work of a released replay still running? Replays must not begin before it is over.
  bool overrun() const;

 private:
  void add_status(std::int32_t* words);
  bool note(StatusCode code, Failure failure) noexcept;
  void store_status(std::int32_t code, std::int64_t replay) noexcept;

  const std::uint64_t id_;             // among all states there ever were
  const Reference end_;                // allocated up front: the destructor must not allocate
  std::vector<std::int32_t*> status_;  // guarded by the mutex
  std::atomic<bool> failed_{false};
  std::atomic<std::int64_t> base_{0};
  std::atomic<std::int64_t> launched_{0};
  std::atomic<GraphState*> parent_{nullptr};
  std::shared_ptr<GraphState> keep_parent_;
  std::int64_t joined_at_ = 0;  // launches of the parent before this became its child
  void (*report_)(GraphState&) = nullptr;
  mutable std::mutex listeners_mutex_;
  std::vector<std::weak_ptr<LaunchListener>> listeners_;
  mutable std::mutex mutex_;  // never held while taking the GIL
  Failure first_;
};

// One value per replay: the youngest that was set for it or for an earlier one. Values that no
// later run can pick are let go when a run picks a younger one.
class PayloadCell : public std::enable_shared_from_this<PayloadCell> {
 public:
  // Takes over a reference; `address` is what native work gets.
  PayloadCell(PyObject* value, std::uint64_t address) { (void)set(0, value, address); }

  // For replays from `first` on. Takes over a reference, and returns a value that it replaced
  // before any replay could see it, which is the caller's then: a million of them at once would
  // only queue up for the reaper.
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
    Reference value;  // letting go of it allocates nothing
    std::uint64_t address;
  };
  std::mutex mutex_;           // never held while taking the GIL
  std::deque<Entry> entries_;  // never empty
};

// First failures that no pending() gave out yet, without their exceptions; empties the list.
std::vector<Failure> take_unreported_failures();

}  // namespace graft::hostwork
