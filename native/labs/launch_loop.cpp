#include "labs/launch_loop.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace graft::labs {
namespace {

constexpr std::size_t kMostGaps = 1 << 16;
constexpr std::uint64_t kPatienceNs = 1000000000;  // a busy thread that is silent so long is none
constexpr unsigned kLookUs = 20;

std::atomic<std::uint64_t> ticks{0};
std::mutex gaps_mutex;
std::vector<std::pair<std::uint64_t, std::uint64_t>> gap_list;
std::uint64_t last_tick = 0;  // under the GIL

// Until the busy thread has ticked twice: it holds the GIL, and is not about to give it up.
void await_busy_thread() {
  const std::uint64_t begun = now_ns(), wanted = ticks.load() + 2;
  while (ticks.load() < wanted && now_ns() - begun < kPatienceNs) usleep(kLookUs);
}

}  // namespace

std::uint64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

void tick() {
  const std::uint64_t now = now_ns();
  if (now - last_tick > kGapNs) {
    const std::lock_guard<std::mutex> lock(gaps_mutex);
    if (gap_list.size() < kMostGaps) gap_list.emplace_back(last_tick, now);
  }
  last_tick = now;
  ticks.fetch_add(1);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> gaps() {
  const std::lock_guard<std::mutex> lock(gaps_mutex);
  return std::exchange(gap_list, {});
}

int replay(const Replays& what, std::size_t count, Samples* out) {
  using Wait = int (*)(void* stream);
  using Hops = std::size_t (*)(std::uint64_t* out, std::size_t n);
  void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);  // kept: the process uses it
  if (library == nullptr) return 500;                              // CUDA_ERROR_NOT_FOUND
  const auto wait = reinterpret_cast<Wait>(dlsym(library, "cuStreamSynchronize"));
  const auto hops = reinterpret_cast<Hops>(what.hops);
  if (wait == nullptr) return 500;
  for (std::size_t i = 0; i < count; ++i) {
    if (what.busy) await_busy_thread();
    out->launched.push_back(now_ns());
    const auto stream = reinterpret_cast<void*>(what.stream);
    int code = what.exec != nullptr
                   ? what.exec->launch(what.stream).first
                   : hostwork::driver().graph_launch(reinterpret_cast<void*>(what.handle), stream);
    if (code == 0) code = wait(stream);
    out->launched.push_back(now_ns());
    if (code != 0) return code;
    out->join.push_back(what.stamps[1] - what.stamps[0]);
    if (hops != nullptr) {
      out->hops.resize(out->hops.size() + 2 * what.callbacks);
      hops(out->hops.data() + out->hops.size() - 2 * what.callbacks, what.callbacks);
    }
    if (what.said != nullptr) {
      out->said.insert(out->said.end(), what.said, what.said + what.callbacks);
    }
  }
  if (what.busy) await_busy_thread();  // so that a span it is out for is known
  return 0;
}

std::vector<std::uint64_t> wake_ups(std::size_t count) {
  std::mutex mutex;
  std::condition_variable rung;
  std::uint64_t rung_at = 0;  // 0: go on sleeping
  std::vector<std::uint64_t> took;
  std::thread sleeper([&] {
    for (std::size_t i = 0; i < count; ++i) {
      std::unique_lock<std::mutex> lock(mutex);
      rung.wait(lock, [&] { return rung_at != 0; });
      took.push_back(now_ns() - rung_at);
      rung_at = 0;
    }
  });
  for (std::size_t i = 0; i < count;) {
    usleep(500);  // let it fall asleep
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (rung_at != 0) continue;
      rung_at = now_ns();
    }
    rung.notify_one();
    ++i;
  }
  sleeper.join();
  return took;
}

}  // namespace graft::labs
