// State shared by the host steps of one graph: replay status, first failure, and payloads, which
// are values that change between replays (INVARIANTS.md A1 to A3, E1 to E3).
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

// Values of status word 0; word 1 holds the low 31 bits of the number of the first failed replay.
enum StatusCode : std::int32_t {
  kStatusOk = 0,
  kStatusPython = 1,    // a Python callable raised an exception
  kStatusNative = 2,    // a native function reported failure or threw
  kStatusShutdown = 3,  // the interpreter is shutting down
  kStatusDeadline = 4,  // a mailbox request was not posted or not answered in time
};

struct Failure {
  std::string node;
  std::int64_t replay = 0;        // 0: eager work, which has no replay
  PyObject* exception = nullptr;  // owned; null for native failures
  std::string message;
};

// Interface of objects that are notified of every launch of a graph definition. The ports of
// mailboxes implement it.
class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  // Called before every launch, because the driver may return from the launch call only after the
  // replay has ended. The caller does not hold the GIL.
  virtual void launching() noexcept = 0;
  // Returns whether host work that missed its deadline is still running although its replay has
  // ended.
  virtual bool overrun() const = 0;
};

// Replay status and first failure of one graph. The status stays set until clear(), so that every
// later replay skips its host steps as well.
//
// Created by std::make_shared only, like PayloadCell. Because of enable_shared_from_this, nanobind
// shares the existing control block. Otherwise it would create another one, whose deleter acquires
// the GIL on whatever thread drops the last reference.
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

  // Makes this state a child of `parent`. Called when the graph of this state is moved into the
  // graph of `parent`. From then on, a failure of either graph is recorded in `parent`, and the
  // host steps of both graphs are skipped. Launches of the parent count as launches of this graph.
  // Returns false if the state already has another parent.
  bool set_parent(const std::shared_ptr<GraphState>& parent);
  // Sets the function that is called on the failing thread after the first failure was recorded. It
  // is not called if the state has a parent.
  void set_failure_callback(void (*report)(GraphState&)) { failure_callback_ = report; }

  // Records a failure, unless there is one already. Takes ownership of failure.exception.
  void fail(StatusCode code, Failure failure) noexcept;

  // Copies the first failure to `out`, with a new reference to its exception, and marks the failure
  // as reported. Returns false if there is none. The caller must hold the GIL.
  bool pending(Failure* out) const;
  void clear();

  // Returns the number that is added to a record's run count to compute the replay number.
  std::int64_t base() const;
  void set_base(std::int64_t base) { base_.store(base, std::memory_order_release); }

  // Returns the number of launches of the definition by all of its executables.
  std::int64_t launched() const;
  // Returns the number of launches, including a launch whose driver call is in progress.
  std::int64_t announced() const;
  // The caller counts a launch in two steps. Before the driver call, it calls announce_launch(),
  // which also notifies the listeners. Afterwards, it calls confirm_launch() if the driver call
  // succeeded, and cancel_launch() if the call failed.
  void announce_launch() noexcept;
  void confirm_launch() noexcept { launched_.fetch_add(1); }
  void cancel_launch() noexcept { announced_.fetch_sub(1); }

  void add_listener(std::weak_ptr<LaunchListener> listener);
  // Returns whether host work that missed its deadline is still running. The device no longer waits
  // for this work, but no replay may start before it has ended.
  bool overrun() const;

 private:
  void add_status(std::int32_t* words);
  bool record_first(StatusCode code, Failure failure) noexcept;
  void store_status(std::int32_t code, std::int64_t replay) noexcept;

  const std::uint64_t id_;             // number that no other state of the process has
  const Reference release_;            // preallocated, because the destructor must not allocate
  std::vector<std::int32_t*> status_;  // guarded by mutex_
  std::atomic<bool> failed_{false};
  std::atomic<std::int64_t> base_{0};
  std::atomic<std::int64_t> launched_{0};
  std::atomic<std::int64_t> announced_{0};
  std::atomic<GraphState*> parent_{nullptr};
  std::shared_ptr<GraphState> parent_owner_;
  std::int64_t parent_launches_at_join_ = 0;  // launches of the parent before set_parent()
  void (*failure_callback_)(GraphState&) = nullptr;
  mutable std::mutex listeners_mutex_;
  std::vector<std::weak_ptr<LaunchListener>> listeners_;
  mutable std::mutex mutex_;  // never held while acquiring the GIL
  Failure first_;
};

// Stores the values of one payload. A payload is an argument of host steps whose value may change
// between replays. Each value is stored with the number of the first replay that receives it. Later
// replays receive the same value until another value was set. When a host step reads a value, all
// older values are released, because no later replay can receive them.
//
// Each value is stored in two forms: as a Python object, which Python work receives, and as an
// address, which native work receives (the object's host_ptr, or the object itself if it is an
// int).
class PayloadCell : public std::enable_shared_from_this<PayloadCell> {
 public:
  // Sets the initial value, with the same arguments as set().
  PayloadCell(PyObject* value, std::uint64_t address) { (void)set(0, value, address); }

  // Sets the value for the replays from `first` on. Python work receives `value`, whose reference
  // is stolen; native work receives `address`. If no replay can have read the previous value, the
  // function returns the previous value, and the caller must release it. Such values are not passed
  // to the reaper, because frequent changes could queue millions of them. Otherwise returns null.
  [[nodiscard]] PyObject* set(std::int64_t first, PyObject* value, std::uint64_t address);

  // Lets the replays from `first` on receive the value that was set for the replays after `first`,
  // because the launch that would have been replay `first` has failed.
  void bring_forward(std::int64_t first);

  struct Payload {
    PyObject* value;  // borrowed; valid until a later replay calls pick()
    std::uint64_t address;
  };
  // Returns the value for a replay.
  Payload pick(std::int64_t replay);

  // Adapts the stored values to a new executable, whose replays are numbered from 1 again. All of
  // its replays receive the value that was set last.
  void restart();
  std::size_t size();

 private:
  struct Entry {
    std::int64_t first;
    Reference value;  // releasing it allocates nothing
    std::uint64_t address;
  };
  std::mutex mutex_;           // never held while acquiring the GIL
  std::deque<Entry> entries_;  // never empty
};

// Returns the failures that neither pending() nor an earlier call of this function has returned.
// The process prints them at exit. The result contains at most one failure of each GraphState,
// namely the first one, and no exception objects.
std::vector<Failure> take_unreported_failures();

}  // namespace graft::hostwork
