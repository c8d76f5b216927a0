// Mailboxes: the device posts a request, and a persistent host thread runs the work and answers.
//
// A worker is such a thread. The watchdog is a thread that answers in place of a worker that
// exceeds its deadline. A port is the host side of one mailbox. INVARIANTS.md states the rules M1
// to M10 for them.
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
  bool spin = false;       // whether to poll continuously while a replay is in flight
  double spin_s = 50e-6;   // without `spin`: time of continuous polling after a request
  double sleep_s = 50e-6;  // without `spin`: sleep between two polls after that time
  std::string name;
};

// A thread and the ports that it serves. The thread sleeps while no launch of any of its graphs is
// in flight (INVARIANTS.md M7). It ends after the last owner of this object is gone.
//
// Created by std::make_shared only. The deleter of a control block that nanobind creates acquires
// the GIL (see GraphState in state.h). The worker's own thread may drop the last reference, and
// must not need the GIL for that.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker();

  void add(const std::shared_ptr<Port>& port);
  void remove(const Port* port) noexcept;
  void wake() noexcept;
  // Returns the number of requests whose work was run, including work that missed its deadline.
  std::int64_t served() const;
  // Returns whether the thread sleeps until the next launch.
  bool parked() const;
  // Returns whether the thread still runs work whose request the watchdog has already answered,
  // because the work missed its deadline.
  bool stuck() const;

  struct Core;  // state that this object and its thread share

 private:
  const std::shared_ptr<Core> core_;
};

// Pinned words of one mailbox, each on its own cache line, private to one graph definition.
struct MailboxWords {
  // Number of the posted request, which the device stores; 0: none.
  std::uint32_t* request = nullptr;
  // Answer, which the host stores: the number of the answered request if a spinning kernel waits,
  // and 1 if a batch-memory-operation node waits. Until the first launch, the word has another
  // content: the number from which the device counts the requests.
  std::uint32_t* ack = nullptr;
  // Number of the last request whose spinning kernel ended at its own deadline; 0: none. The
  // pointer is null if the mailbox has no spinning kernel.
  std::uint32_t* timed_out = nullptr;
  // Number of completed launches, which the device counts. If the pointer is null, each launch
  // posts one request; otherwise a launch may post any number of requests. No launch that the word
  // counts may be in flight while the mailbox is added to the graph.
  const std::uint32_t* completed = nullptr;
};

// Buffers for the results of the work. The work fills `scratch`. If the worker answers in time, it
// copies `scratch` to `output`.
struct MailboxOutput {
  void* scratch = nullptr;
  void* output = nullptr;
  std::size_t bytes = 0;
};

struct MailboxLimits {
  double answer_s = 0;  // maximum time from the request to the answer
  double replay_s = 0;  // maximum time from the launch to the request; 0: no limit
};

// The host side of one mailbox. Shared by its worker and the watchdog.
//
// Both the worker and the watchdog may answer a request. The thread that claims the request first
// answers it (INVARIANTS.md M5).
class Port final : public LaunchListener, public std::enable_shared_from_this<Port> {
 public:
  // Takes ownership of `record`.
  Port(HostRecord* record, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
       MailboxWords words, MailboxOutput output, MailboxLimits limits);
  ~Port() override;

  // If there is a new request, runs its work and answers it. Returns whether there was a new
  // request. Sets `expecting_more` to true if a launch in flight will post another request. Called
  // by the worker.
  bool poll(bool* expecting_more) noexcept;
  // Answers requests that are overdue, so that the device stops waiting. Returns whether the port
  // must be checked again. Called by the watchdog.
  bool check_deadlines(std::int64_t now_ns);
  // Fails the replay if the spinning kernel of this mailbox has ended at its own deadline. Any
  // thread may call this function.
  void check_device_timeout();

  void launching() noexcept override;
  // Returns whether the worker still runs work whose request the watchdog has already answered,
  // because the work missed its deadline.
  bool overrun() const override;
  const std::shared_ptr<Worker>& worker() const { return worker_; }
  double shortest_limit_s() const;

 private:
  enum Claimant : std::uint64_t { kOpen = 0, kWorker = 1, kWatchdog = 2 };
  // A claim consists of the number of a request (32 bits), the lowest 30 bits of the number of the
  // launch that posted the request, and the thread that has claimed the request, or kOpen if no
  // thread has claimed it yet. The thread that claims a request answers it.
  static std::uint64_t pack(std::uint32_t seq, std::int64_t launch, Claimant claimant) {
    return std::uint64_t{seq} << 32 | (static_cast<std::uint64_t>(launch) << 2 & 0xfffffffc) |
           claimant;
  }
  static std::uint32_t seq_of(std::uint64_t claim) {
    return static_cast<std::uint32_t>(claim >> 32);
  }
  static Claimant claimant_of(std::uint64_t claim) { return static_cast<Claimant>(claim & 3); }
  static bool is_open(std::uint64_t claim, std::uint32_t seq) {
    return seq_of(claim) == seq && claimant_of(claim) == kOpen;
  }

  void serve(std::uint32_t seq) noexcept;
  void open_request(std::uint32_t seq) noexcept;
  bool try_claim(std::uint32_t seq, Claimant claimant) noexcept;
  void acknowledge(std::uint32_t seq) noexcept;
  void release(std::uint32_t seq, const std::string& reason);
  void fail(std::int64_t launch, std::string reason) noexcept;
  // Returns the number of the last request that was answered.
  std::uint32_t last_closed() const;
  // Returns the number of the posted request; 0: none.
  std::uint32_t request() const { return __atomic_load_n(words_.request, __ATOMIC_ACQUIRE); }
  // Returns whether a launch in flight can still post a request after request `last`, the last one
  // that the caller has seen.
  bool expecting(std::uint32_t last) const;
  // Returns the number of completed launches that the device has counted.
  std::uint32_t completed() const {
    return words_.completed == nullptr ? 0 : __atomic_load_n(words_.completed, __ATOMIC_ACQUIRE);
  }
  // Returns the number of the request of launch `launch` of the graph. Requests are numbered up to
  // 2^32 - 1 and then from 1 again, because 0 means "no request".
  std::uint32_t number_of(std::int64_t launch) const {
    const std::int64_t count = first_ + launch - launches_before_;
    return count == 0 ? 0 : static_cast<std::uint32_t>((count - 1) % 0xffffffff + 1);
  }
  // Returns the distance from request `seq` to the request of launch `launch`: the number of
  // requests after `seq` up to this one; negative if `seq` is the request of a later launch.
  std::int64_t requests_after(std::uint32_t seq, std::int64_t launch) const {
    const std::uint32_t latest = number_of(launch);
    const auto difference = static_cast<std::int32_t>(latest - seq);
    const bool skips_zero = seq != 0 && (latest < seq) == (difference > 0) && latest != seq;
    if (!skips_zero) return difference;
    return difference > 0 ? difference - 1 : difference + 1;
  }
  // Returns the number of the launch that posts request `seq`. If a launch may post any number of
  // requests, `seq` must be the newest one, and the device must still wait for the answer: the
  // launch is then the oldest one in flight, because the launches of a definition run one after
  // another. After the device has continued, the result may be a later launch.
  std::int64_t launch_of(std::uint32_t seq) const {
    const std::int64_t latest = state_->announced();
    if (words_.completed == nullptr) return latest - requests_after(seq, latest);
    const auto in_flight = static_cast<std::int32_t>(
        static_cast<std::uint32_t>(latest - launches_before_) - (completed() - completed_before_));
    return in_flight > 0 ? latest - in_flight + 1 : latest;
  }
  // Returns the number of the launch that posted the request of a claim.
  std::int64_t launch_of_claim(std::uint64_t claim) const {
    const std::int64_t latest = state_->announced();
    // Moves the 30 bits of the launch to the top of a word, so that the difference has a sign.
    const auto bits = static_cast<std::uint32_t>(claim) & 0xfffffffc;
    return latest - static_cast<std::int32_t>((static_cast<std::uint32_t>(latest) << 2) - bits) / 4;
  }

  HostRecord* const record_;
  const std::shared_ptr<GraphState> state_;
  const std::shared_ptr<Worker> worker_;
  const MailboxWords words_;
  const MailboxOutput output_;
  const MailboxLimits limits_;
  const std::int64_t launches_before_;    // launches of the definition when this mailbox was added
  const std::uint32_t completed_before_;  // launches that the device had counted at that time
  const std::uint32_t first_;             // number from which the device counts the requests
  // The last opened request and its claimant. Initially, the worker has claimed the number
  // `first_`, which precedes the first request and needs no answer.
  std::atomic<std::uint64_t> claim_{pack(first_, 0, kWorker)};
  std::atomic<bool> serving_{false};           // whether the worker is in serve()
  std::atomic<std::int64_t> due_since_ns_{0};  // start of the replay deadline of the next request
  std::uint32_t last_seen_;                    // last request that the worker has seen
  // The request whose deadline the watchdog checks, and the time at which the watchdog first saw
  // this request. Used by the watchdog only.
  std::uint32_t watched_ = 0;
  std::int64_t watched_since_ns_ = 0;
};

// Keeps a port registered with its worker as long as the graph can run.
class PortKeeper final : public Record {
 public:
  explicit PortKeeper(std::shared_ptr<Port> port) : Record(nullptr), port_(std::move(port)) {}
  void reap(std::vector<PyObject*>& references) noexcept override;

 private:
  std::shared_ptr<Port> port_;
};

// Returns the result buffer of the mailbox whose work this thread runs; null if it has none.
void* current_output();

// Adds a port to the watchdog, which then enforces the port's deadlines.
void watch(const std::shared_ptr<Port>& port);
void wake_watchdog() noexcept;
// Calls check_device_timeout() of every port. Called after every wait of the host, so that a
// timeout on the device is recorded as a failure before the host checks for failures.
void check_device_timeouts();

// Makes workers and watchdog sleep permanently. Called after a context fault, because the device
// then posts no request any more.
void abandon_mailboxes();
bool mailboxes_abandoned();

}  // namespace graft::hostwork
