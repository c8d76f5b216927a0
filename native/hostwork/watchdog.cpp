// The watchdog: a thread that enforces the deadlines of all mailboxes. It acquires no GIL and makes
// no driver call. The watchdog ends a wait of the device by a store to pinned memory, which works
// even if the driver or Python hangs (INVARIANTS.md M5).
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "hostwork/mailbox.h"
#include "threads.h"

namespace graft::hostwork {
namespace {

constexpr double kMinTickS = 0.5e-3;
constexpr double kMaxTickS = 20e-3;

// The only object of this type is leaked on purpose, because the detached watchdog thread uses it
// until the process ends.
struct Watchdog {
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::weak_ptr<Port>> ports;
  std::uint64_t wakeups = 0;
  bool started = false;
};
Watchdog& watchdog = *new Watchdog;

// Returns the ports that still exist, and removes destroyed ports from the list. Also stores in
// `wakeups` how often the watchdog has been woken.
std::vector<std::shared_ptr<Port>> live_ports(std::uint64_t* wakeups) {
  std::vector<std::shared_ptr<Port>> out;
  const std::lock_guard<std::mutex> lock(watchdog.mutex);
  *wakeups = watchdog.wakeups;
  auto keep = watchdog.ports.begin();
  for (auto& weak : watchdog.ports) {
    if (std::shared_ptr<Port> port = weak.lock()) {
      out.push_back(std::move(port));
      *keep++ = weak;
    }
  }
  watchdog.ports.erase(keep, watchdog.ports.end());
  return out;
}

void sleep_s(double seconds) {
  const timespec t{0, static_cast<long>(seconds * 1e9)};
  nanosleep(&t, nullptr);
}

void run_watchdog() {
  pthread_setname_np(pthread_self(), "graft-watchdog");
  while (true) {
    std::uint64_t wakeups = 0;
    bool again = false;
    double tick = kMaxTickS;
    {
      const std::vector<std::shared_ptr<Port>> ports = live_ports(&wakeups);
      const std::int64_t now = monotonic_ns();
      for (const auto& port : ports) {
        again = port->check_deadlines(now) || again;
        tick = std::min(tick, port->shortest_limit_s() / 8);
      }
    }
    if (again && !mailboxes_abandoned()) {
      sleep_s(std::max(tick, kMinTickS));
      continue;
    }
    std::unique_lock<std::mutex> lock(watchdog.mutex);
    watchdog.wake.wait(lock, [&] { return watchdog.wakeups != wakeups; });
  }
}

}  // namespace

void watch(const std::shared_ptr<Port>& port) {
  {
    const std::lock_guard<std::mutex> lock(watchdog.mutex);
    watchdog.ports.push_back(port);
    if (!watchdog.started) std::thread(run_watchdog).detach();
    watchdog.started = true;
  }
  // Exec wakes the watchdog at each launch. A graph may also be launched without Exec, so the
  // watchdog is woken here as well.
  wake_watchdog();
}

void check_device_timeouts() {
  std::uint64_t wakeups = 0;
  for (const auto& port : live_ports(&wakeups)) port->check_device_timeout();
}

void wake_watchdog() noexcept {
  {
    const std::lock_guard<std::mutex> lock(watchdog.mutex);
    ++watchdog.wakeups;
  }
  watchdog.wake.notify_one();
}

}  // namespace graft::hostwork
