// A mailbox: the device posts a request, a persistent thread of ours answers, the device goes on.
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
  std::vector<int> cpus;   // cores the thread may run on; empty: any
  bool spin = false;       // never sleep while a replay is in flight
  double spin_s = 50e-6;   // otherwise spin so long,
  double sleep_s = 50e-6;  // then sleep so long between looks
  std::string name;
};

// A thread and the ports it serves. It parks while no launch of any of its graphs is in flight
// (M7), and ends when the last owner of this object is gone.
//
// Made by std::make_shared only, like GraphState: whoever drops the last owner, the worker's own
// thread too, then takes no GIL.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker();

  void add(const std::shared_ptr<Port>& port);
  void remove(const Port* port) noexcept;
  void wake() noexcept;
  std::int64_t served() const;
  bool parked() const;  // does it wait for a launch now?
  // Is the thread inside a request that the watchdog has released?
  bool stuck() const;

  struct Core;  // shared with the thread

 private:
  const std::shared_ptr<Core> core_;
};

// Pinned words of one mailbox, each on a cache line of its own, private to one executable.
struct MailboxWords {
  std::uint32_t* request = nullptr;  // written by the device: number of the request; 0: none
  std::uint32_t* ack = nullptr;      // written by the host: 1, or the number with `gave_up`
  std::uint32_t* gave_up = nullptr;  // written by a spinning kernel at its own deadline; or null
};

// Where results go: the work fills `scratch`, whoever wins the answer copies it to `output`.
struct MailboxOutput {
  void* scratch = nullptr;
  void* output = nullptr;
  std::size_t bytes = 0;
};

struct MailboxLimits {
  double answer_s = 0;  // from the moment the request was seen
  double replay_s = 0;  // from the launch to the request; 0: none
};

// The host's side of one mailbox. Shared by its worker and the watchdog.
class Port final : public LaunchListener, public std::enable_shared_from_this<Port> {
 public:
  // Owns `record`.
  Port(HostRecord* record, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
       MailboxWords words, MailboxOutput output, MailboxLimits limits);
  ~Port() override;

  // Called by the worker: does the work of a request that it has not seen yet, and answers it.
  // Returns whether there was one, and tells whether another is coming.
  bool look(bool* more) noexcept;
  // Called by the watchdog only: releases what is overdue. Returns whether it must look again.
  bool check(std::int64_t now_ns);
  // Notes what the device stored when it went on without an answer. Any thread.
  void hear_device();

  void launched() noexcept override;
  // Is a worker still inside a request that the watchdog has released?
  bool overrun() const override;
  const std::shared_ptr<Worker>& worker() const { return worker_; }
  double shortest_limit_s() const;

 private:
  enum Who : std::uint64_t { kOpen = 0, kWorker = 1, kWatchdog = 2 };
  static std::uint64_t pack(std::uint32_t seq, Who who) { return std::uint64_t{seq} << 2 | who; }
  static std::uint32_t seq_of(std::uint64_t owner) {
    return static_cast<std::uint32_t>(owner >> 2);
  }

  void serve(std::uint32_t seq) noexcept;
  void open(std::uint32_t seq) noexcept;
  bool claim(std::uint32_t seq, Who who) noexcept;
  void acknowledge(std::uint32_t seq) noexcept;
  void release(std::uint32_t seq, const std::string& why);
  void fail(std::uint32_t seq, std::string why) noexcept;
  std::uint32_t closed() const;
  // Number of the request that is posted now; 0: none.
  std::uint32_t request() const { return __atomic_load_n(words_.request, __ATOMIC_ACQUIRE); }
  // Is a request coming that is newer than `last` and than the last one answered?
  bool expecting(std::uint32_t last) const;
  std::int64_t replay_of(std::uint32_t seq) const { return state_->base() + before_ + seq; }

  HostRecord* const record_;
  const std::shared_ptr<GraphState> state_;
  const std::shared_ptr<Worker> worker_;
  const MailboxWords words_;
  const MailboxOutput output_;
  const MailboxLimits limits_;
  const std::int64_t before_;  // launches of the definition before this step was part of it
  std::atomic<std::uint64_t> owner_{kWorker};  // (request 0, answered)
  std::atomic<bool> inside_{false};            // is the worker in serve()?
  std::atomic<std::int64_t> due_since_ns_{0};  // since when the next request is expected
  std::uint32_t seen_ = 0;                     // by the worker
  // The watchdog's own notes.
  std::uint32_t watched_ = 0;
  std::int64_t watched_since_ns_ = 0;
};

// Keeps a port on its worker for as long as the graph can run.
class PortHold final : public Record {
 public:
  explicit PortHold(std::shared_ptr<Port> port) : Record(nullptr), port_(std::move(port)) {}
  void reap(std::vector<PyObject*>& references) noexcept override;

 private:
  std::shared_ptr<Port> port_;
};

// Where work that this thread runs for a mailbox with an output puts its results; null elsewhere.
void* current_output();

// The one thread that keeps deadlines (no GIL, no driver call).
void watch(const std::shared_ptr<Port>& port);
void wake_watchdog() noexcept;
// Every mailbox's hear_device(): after a wait for the device nothing that it gave up is untold.
void hear_devices();

// After a context fault no request comes any more: workers and watchdog park for good.
void abandon_mailboxes();
bool mailboxes_abandoned();

}  // namespace graft::hostwork
