// State shared by the host steps of one graph: replay status, first failure, and the values that
// change between replays (INVARIANTS.md A1 to A3, E1 to E3).
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
  kStatusShutdown = 3,  // the interpreter is shutting down
  kStatusDeadline = 4,  // a mailbox was not answered, or not reached, in time
};

struct Failure {
  std::string node;
  std::int64_t replay = 0;        // 0: eager work, which has no replay
  PyObject* exception = nullptr;  // owned; null for native failures
  std::string message;
};

// Notified of every launch of a definition; called without the GIL.
class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  virtual void launched() noexcept = 0;
  // Returns whether host work of a replay that has ended is still running.
  virtual bool overrun() const = 0;
};

// Replay status and first failure of one graph. The status stays set until clear(), so that every
// later replay skips its host steps as well.
//
// Created by std::make_shared only, like PayloadCell. With enable_shared_from_this nanobind uses
// the same owner; otherwise it would create one whose deleter acquires the GIL on any thread.
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

  // Joins the state of the graph that this state's graph was moved into: failures are recorded in
  // the parent, its failures make host steps here be skipped, and its launches count as launches of
  // this graph. Returns false if the state already has another parent.
  bool set_parent(const std::shared_ptr<GraphState>& parent);
  // Sets the function that is called with the first failure of a state without a parent, on the
  // failing thread.
  void set_failure_callback(void (*report)(GraphState&)) { failure_callback_ = report; }

  // Records a failure, unless there is one already. Takes ownership of failure.exception.
  void fail(StatusCode code, Failure failure) noexcept;

  // Copies the first failure, whose exception is a new reference (GIL held), and marks it as
  // reported. Returns false if there is none.
  bool pending(Failure* out) const;
  void clear();

  // Difference between the replay number of the executable and a record's count of runs.
  std::int64_t base() const;
  void set_base(std::int64_t base) { base_.store(base, std::memory_order_release); }

  // Number of launches of the definition by all of its executables.
  std::int64_t launched() const;
  void count_launch() noexcept;

  void add_listener(std::weak_ptr<LaunchListener> listener);
  // Returns whether host work whose wait was released is still running. No replay may start before
  // it has ended.
  bool overrun() const;

 private:
  void add_status(std::int32_t* words);
  bool record_first(StatusCode code, Failure failure) noexcept;
  void store_status(std::int32_t code, std::int64_t replay) noexcept;

  const std::uint64_t id_;             // never reused
  const Reference release_;            // preallocated: the destructor must not allocate
  std::vector<std::int32_t*> status_;  // guarded by the mutex
  std::atomic<bool> failed_{false};
  std::atomic<std::int64_t> base_{0};
  std::atomic<std::int64_t> launched_{0};
  std::atomic<GraphState*> parent_{nullptr};
  std::shared_ptr<GraphState> parent_owner_;
  std::int64_t parent_launches_at_join_ = 0;  // before this graph was moved into it
  void (*failure_callback_)(GraphState&) = nullptr;
  mutable std::mutex listeners_mutex_;
  std::vector<std::weak_ptr<LaunchListener>> listeners_;
  mutable std::mutex mutex_;  // never held while acquiring the GIL
  Failure first_;
};

// A value per replay: the last one that was set for the replay or for an earlier one. Values that
// no later run can read are released when a run reads a newer one.
class PayloadCell : public std::enable_shared_from_this<PayloadCell> {
 public:
  // Steals the reference; `address` is the value for native work.
  PayloadCell(PyObject* value, std::uint64_t address) { (void)set(0, value, address); }

  // Sets the value for replays from `first` on. Steals the reference. Returns the value it replaces
  // if no replay can have read it; the caller then owns it. Retiring such values instead could
  // queue millions of them for the reaper.
  [[nodiscard]] PyObject* set(std::int64_t first, PyObject* value, std::uint64_t address);

  struct Payload {
    PyObject* value;  // borrowed; valid until a later replay calls pick()
    std::uint64_t address;
  };
  // Returns the value for a replay.
  Payload pick(std::int64_t replay);

  // Replays are numbered from 1 again: the last value applies to all of them.
  void restart();
  std::size_t size();

 private:
  struct Entry {
    std::int64_t first;
    Reference value;  // released without an allocation
    std::uint64_t address;
  };
  std::mutex mutex_;           // never held while acquiring the GIL
  std::deque<Entry> entries_;  // never empty
};

// Takes the first failures that pending() has not returned yet, without their exceptions.
std::vector<Failure> take_unreported_failures();

}  // namespace graft::hostwork
