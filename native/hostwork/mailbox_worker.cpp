#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "hostwork/gate.h"
#include "hostwork/mailbox.h"
#include "threads.h"

namespace graft::hostwork {

struct Worker::Core {
  explicit Core(WorkerOptions o) : options(std::move(o)) {}
  const WorkerOptions options;
  mutable std::mutex mutex;
  std::condition_variable wake;
  // The mutex guards `ports`, `parked` and `stop`.
  std::vector<std::shared_ptr<Port>> ports;
  bool parked = false;
  bool stop = false;
  std::atomic<std::uint64_t> version{1};  // incremented by each change of `ports` or `stop`
  std::atomic<std::uint64_t> wakeups{0};
  std::atomic<std::int64_t> served{0};
};

namespace {

using Core = Worker::Core;

// Timer slack of the worker. The system's default of 50 us would double the length of a short
// sleep.
constexpr unsigned long kTimerSlackNs = 1000;

// Interval at which a worker that waits for a request has the device checked for a fault. After a
// fault, the request never comes.
constexpr std::int64_t kCheckDeviceNs = 100'000'000;

// Sets the name, scheduling and core affinity of the calling thread.
void configure_thread(Core& core) {
  pthread_setname_np(pthread_self(), core.options.name.substr(0, 15).c_str());
  ask_for_short_slice();
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  if (core.options.cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : core.options.cpus) CPU_SET(static_cast<std::size_t>(cpu), &set);
  // The result is ignored, because MailboxWorker in Python has checked that the cores exist.
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Copies the worker's list of ports to `ports`, and the version of the list to `version`. Returns
// false if the thread must end.
bool update_ports(Core& core, std::vector<std::shared_ptr<Port>>* ports, std::uint64_t* version) {
  // The old list is destroyed after the mutex is unlocked, because it may own the last reference to
  // a port.
  std::vector<std::shared_ptr<Port>> before = std::move(*ports);
  const std::lock_guard<std::mutex> lock(core.mutex);
  *version = core.version.load();
  *ports = core.ports;
  return !core.stop;
}

// Sleeps until the worker's counter of wake-ups differs from `wakeups`, a value that the caller has
// read earlier.
void park(Core& core, std::uint64_t wakeups) {
  std::unique_lock<std::mutex> lock(core.mutex);
  core.parked = true;
  core.wake.wait(lock, [&] { return core.wakeups.load() != wakeups; });
  core.parked = false;
}

void pause_polling(const WorkerOptions& options, std::int64_t idle_since_ns) {
  const double idle = static_cast<double>(monotonic_ns() - idle_since_ns) * 1e-9;
  if (options.spin || idle < options.spin_s) {
    for (int i = 0; i < 16; ++i) cpu_relax();
    return;
  }
  const double whole = std::floor(options.sleep_s);
  timespec t{static_cast<time_t>(whole), static_cast<long>((options.sleep_s - whole) * 1e9)};
  nanosleep(&t, nullptr);
}

void run_worker(const std::shared_ptr<Core>& shared) {
  Core& core = *shared;
  configure_thread(core);
  std::vector<std::shared_ptr<Port>> ports;
  std::uint64_t version = 0;
  std::int64_t idle_since = monotonic_ns();
  std::int64_t device_checked = idle_since;
  while (true) {
    const std::uint64_t wakeups = core.wakeups.load();
    if (version != core.version.load() && !update_ports(core, &ports, &version)) return;
    bool any = false, expecting = false;
    for (const auto& port : ports) {
      if (!port->poll(&expecting)) continue;
      core.served.fetch_add(1, std::memory_order_relaxed);
      any = true;
    }
    if (any) {
      idle_since = monotonic_ns();
    } else if (expecting) {
      const std::int64_t now = monotonic_ns();
      if (now - std::max(idle_since, device_checked) >= kCheckDeviceNs) {
        check_device();
        device_checked = now;
      }
      pause_polling(core.options, idle_since);
    } else {
      park(core, wakeups);
      idle_since = monotonic_ns();
    }
  }
}

// Calls `change` with the mutex held, then wakes the worker thread.
template <typename Change>
void update_and_wake(Core& core, const Change& change) {
  {
    const std::lock_guard<std::mutex> lock(core.mutex);
    change();
    core.wakeups.fetch_add(1);
  }
  core.wake.notify_all();
}

}  // namespace

Worker::Worker(WorkerOptions options) : core_(std::make_shared<Core>(std::move(options))) {
  std::thread([core = core_] { run_worker(core); }).detach();
}

Worker::~Worker() {
  // The gate is closed in a forked child, which has no worker thread. The thread may have held the
  // mutex during the fork, so the child must not lock the mutex (INVARIANTS.md L10).
  if (!gate_open()) return;
  update_and_wake(*core_, [this] {
    core_->stop = true;
    core_->version.fetch_add(1);
  });
}

void Worker::add(const std::shared_ptr<Port>& port) {
  update_and_wake(*core_, [&] {
    core_->ports.push_back(port);
    core_->version.fetch_add(1);
  });
}

void Worker::remove(const Port* port) noexcept {
  // The port is destroyed after the mutex is released, because the port may hold the last reference
  // to this worker.
  std::shared_ptr<Port> dropped;
  update_and_wake(*core_, [&] {
    auto& ports = core_->ports;
    const auto it =
        std::find_if(ports.begin(), ports.end(), [&](const auto& p) { return p.get() == port; });
    if (it == ports.end()) return;
    dropped = std::move(*it);
    ports.erase(it);
    core_->version.fetch_add(1);
  });
}

void Worker::wake() noexcept {
  update_and_wake(*core_, [] {});
}
std::int64_t Worker::served() const { return core_->served.load(); }

bool Worker::parked() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  return core_->parked;
}

bool Worker::stuck() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  return std::any_of(core_->ports.begin(), core_->ports.end(),
                     [](const auto& port) { return port->overrun(); });
}

}  // namespace graft::hostwork
