// Mailboxes: the device posts a request, a persistent host thread runs the work and answers.
//
// INVARIANTS.md states the rules: M1 to M10.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hostwork/record.h"

namespace graft::hostwork {

class Port;

struct WorkerOptions {
  std::vector<int> cpus;   // cores the thread may run on; empty: all
  bool spin = false;       // poll continuously while a replay is in flight
  double spin_s = 50e-6;   // otherwise: poll continuously for this time after a request,
  double sleep_s = 50e-6;  // then sleep for this time between two polls
  std::string name;
};

// A thread and the ports it serves. The thread sleeps while no launch of any of its graphs is in
// flight (M7), and ends after the last owner of this object is gone.
//
// Created by std::make_shared only, like GraphState: dropping the last reference, possibly on the
// worker's own thread, then acquires no GIL.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker();

  void add(const std::shared_ptr<Port>& port);
  void remove(const Port* port) noexcept;
  void wake() noexcept;
  // Number of requests whose work was run, in time or not.
  std::int64_t served() const;
  // Returns whether the thread sleeps until the next launch.
  bool parked() const;
  // Returns whether the thread is still in work whose wait the watchdog has released.
  bool stuck() const;

  struct Core;  // shared with the thread

 private:
  const std::shared_ptr<Core> core_;
};

// Pinned words of one mailbox, each on its own cache line, private to one executable.
struct MailboxWords {
  std::uint32_t* request = nullptr;    // written by the device: number of the request; 0: none
  std::uint32_t* ack = nullptr;        // written by the host: 1, or the number with `timed_out`
  std::uint32_t* timed_out = nullptr;  // written by a spinning kernel after its deadline; or null
};

// Buffers of the results: the work fills `scratch`; the winner of the claim copies it to `output`.
struct MailboxOutput {
  void* scratch = nullptr;
  void* output = nullptr;
  std::size_t bytes = 0;
};

struct MailboxLimits {
  double answer_s = 0;  // from the request to the answer
  double replay_s = 0;  // from the launch to the request; 0: none
};

// The host side of one mailbox. Shared by its worker and the watchdog.
//
// A request is answered by whoever claims it first, the worker or the watchdog (M5).
class Port final : public LaunchListener, public std::enable_shared_from_this<Port> {
 public:
  // Takes ownership of `record`.
  Port(HostRecord* record, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
       MailboxWords words, MailboxOutput output, MailboxLimits limits);
  ~Port() override;

  // Called by the worker: runs the work of a new request and answers it. Returns whether there was
  // a new request, and sets `expecting_more` if another one will come.
  bool poll(bool* expecting_more) noexcept;
  // Called by the watchdog: releases waits that are overdue. Returns whether it must check again.
  bool check_deadlines(std::int64_t now_ns);
  // Handles a spinning kernel that ended at its own deadline. Any thread.
  void check_device_timeout();

  void launched() noexcept override;
  // Returns whether the worker is still in work whose wait the watchdog has released.
  bool overrun() const override;
  const std::shared_ptr<Worker>& worker() const { return worker_; }
  double shortest_limit_s() const;

 private:
  enum Claimant : std::uint64_t { kOpen = 0, kWorker = 1, kWatchdog = 2 };
  // A claim is a request number and who has answered it; kOpen: not answered yet.
  static std::uint64_t pack(std::uint32_t seq, Claimant claimant) {
    return std::uint64_t{seq} << 2 | claimant;
  }
  static std::uint32_t seq_of(std::uint64_t claim) {
    return static_cast<std::uint32_t>(claim >> 2);
  }

  void serve(std::uint32_t seq) noexcept;
  void open_request(std::uint32_t seq) noexcept;
  bool try_claim(std::uint32_t seq, Claimant claimant) noexcept;
  void acknowledge(std::uint32_t seq) noexcept;
  void release(std::uint32_t seq, const std::string& reason);
  void fail(std::uint32_t seq, std::string reason) noexcept;
  // Number of the last request that was answered.
  std::uint32_t last_closed() const;
  // Number of the request that is posted now; 0: none.
  std::uint32_t request() const { return __atomic_load_n(words_.request, __ATOMIC_ACQUIRE); }
  // Returns whether a request will come that is newer than `last` and than the last answered one.
  bool expecting(std::uint32_t last) const;
  std::int64_t replay_of(std::uint32_t seq) const {
    return state_->base() + launches_before_ + seq;
  }

  HostRecord* const record_;
  const std::shared_ptr<GraphState> state_;
  const std::shared_ptr<Worker> worker_;
  const MailboxWords words_;
  const MailboxOutput output_;
  const MailboxLimits limits_;
  const std::int64_t launches_before_;         // of the definition, before this step was part of it
  std::atomic<std::uint64_t> claim_{kWorker};  // request 0, answered
  std::atomic<bool> serving_{false};           // the worker is in serve()
  std::atomic<std::int64_t> due_since_ns_{0};  // since when the next request is expected
  std::uint32_t last_seen_ = 0;                // by the worker
  // Used by the watchdog only: the request it watches, and since when.
  std::uint32_t watched_ = 0;
  std::int64_t watched_since_ns_ = 0;
};

// Keeps a port on its worker as long as the graph can run.
class PortKeeper final : public Record {
 public:
  explicit PortKeeper(std::shared_ptr<Port> port) : Record(nullptr), port_(std::move(port)) {}
  void reap(std::vector<PyObject*>& references) noexcept override;

 private:
  std::shared_ptr<Port> port_;
};

// Returns the result buffer of the mailbox whose work this thread runs; null without one.
void* current_output();

// Adds a port to the watchdog: the thread that enforces all deadlines, without GIL or driver calls.
void watch(const std::shared_ptr<Port>& port);
void wake_watchdog() noexcept;
// Calls check_device_timeout() of every port, so that no device timeout is unreported after a wait.
void check_device_timeouts();

// Called after a context fault: no request comes any more, and workers and watchdog sleep.
void abandon_mailboxes();
bool mailboxes_abandoned();

}  // namespace graft::hostwork
