// The thread that keeps the deadlines of all mailboxes. It takes no GIL and makes no driver call:
// a stuck wait is released by a plain store, whatever the driver or Python are doing (M5).
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

constexpr double kShortestTick = 0.5e-3, kLongestTick = 20e-3;

// Leaked on purpose: a detached thread waits in it until the process ends.
struct Watchdog {
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::weak_ptr<Port>> ports;
  std::uint64_t kicks = 0;
  bool started = false;
};
Watchdog& watchdog = *new Watchdog;

// The ports that still live; forgets the others.
std::vector<std::shared_ptr<Port>> living(std::uint64_t* kicks) {
  std::vector<std::shared_ptr<Port>> out;
  const std::lock_guard<std::mutex> lock(watchdog.mutex);
  *kicks = watchdog.kicks;
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

void watch_forever() {
  pthread_setname_np(pthread_self(), "graft-watchdog");
  while (true) {
    std::uint64_t kicks = 0;
    bool again = false;
    double tick = kLongestTick;
    {
      const std::vector<std::shared_ptr<Port>> ports = living(&kicks);
      const std::int64_t now = monotonic_ns();
      for (const auto& port : ports) {
        again = port->check(now) || again;
        tick = std::min(tick, port->shortest_limit_s() / 8);
      }
    }
    if (again && !mailboxes_abandoned()) {
      sleep_s(std::max(tick, kShortestTick));
      continue;
    }
    std::unique_lock<std::mutex> lock(watchdog.mutex);
    watchdog.wake.wait(lock, [&] { return watchdog.kicks != kicks; });
  }
}

}  // namespace

void watch(const std::shared_ptr<Port>& port) {
  {
    const std::lock_guard<std::mutex> lock(watchdog.mutex);
    watchdog.ports.push_back(port);
    if (!watchdog.started) std::thread(watch_forever).detach();
    watchdog.started = true;
  }
  wake_watchdog();  // nobody announces the launches of captured graphs
}

void hear_devices() {
  std::uint64_t kicks = 0;
  for (const auto& port : living(&kicks)) port->hear_device();
}

void wake_watchdog() noexcept {
  {
    const std::lock_guard<std::mutex> lock(watchdog.mutex);
    ++watchdog.kicks;
  }
  watchdog.wake.notify_one();
}

}  // namespace graft::hostwork
