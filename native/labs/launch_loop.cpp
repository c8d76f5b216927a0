// graft.native._native.labs: replay loops without the GIL, for latency measurements of host work.
//
// The measurement shows how long Python callbacks wait for the GIL while a busy Python thread holds
// it. The busy thread releases the GIL whenever another thread requests it. A launcher in Python
// would itself request the GIL between two replays, and the callbacks would find a GIL that was
// just released. In this loop only the callbacks request the GIL. The busy thread calls tick() to
// report that it holds the GIL, and the loop launches a replay only after such a report.
#include <dlfcn.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "hostwork/exec.h"
#include "hostwork/gate.h"
#include "threads.h"

namespace nb = nanobind;

namespace graft::labs {
namespace {

using Times = std::vector<std::uint64_t>;

constexpr std::size_t kMaxGaps = 1 << 16;
constexpr std::uint64_t kGapNs = 5000;                // a longer time between two ticks is a gap
constexpr std::uint64_t kTickTimeoutNs = 1000000000;  // maximum time in await_busy_thread()
constexpr unsigned kPollUs = 20;

std::atomic<std::uint64_t> ticks{0};
std::mutex gaps_mutex;
std::vector<std::pair<std::uint64_t, std::uint64_t>> gap_list;
std::uint64_t last_tick = 0;  // guarded by the GIL

std::uint64_t now_ns() { return static_cast<std::uint64_t>(monotonic_ns()); }

// Reports that the calling thread is running bytecode, and records a gap if the last report is more
// than kGapNs ago. Called by the busy thread with the GIL held.
void tick() {
  const std::uint64_t now = now_ns();
  if (now - last_tick > kGapNs) {
    const std::lock_guard<std::mutex> lock(gaps_mutex);
    if (gap_list.size() < kMaxGaps) gap_list.emplace_back(last_tick, now);
  }
  last_tick = now;
  ticks.fetch_add(1);
}

// Returns the recorded gaps and clears the list. A gap is a time longer than kGapNs without a call
// of tick(). Outside the gaps the busy thread held the GIL.
std::vector<std::pair<std::uint64_t, std::uint64_t>> gaps() {
  const std::lock_guard<std::mutex> lock(gaps_mutex);
  return std::exchange(gap_list, {});
}

// Waits until the busy thread has called tick() twice. It has then run bytecode between the two
// calls, and therefore holds the GIL.
void await_busy_thread() {
  const std::uint64_t begin = now_ns();
  const std::uint64_t target = ticks.load() + 2;
  while (ticks.load() < target && now_ns() - begin < kTickTimeoutNs) usleep(kPollUs);
}

struct ReplayOptions {
  hostwork::Exec* exec;  // executable of graft, or null
  std::uint64_t handle;  // CUgraphExec of another library, if `exec` is null
  std::uint64_t stream;
  std::size_t callbacks;              // host steps per replay
  const std::uint64_t* stamps;        // device times before and after the host steps of a replay
  std::uint64_t hops;                 // address of softcuda_hops() (times of host steps), or 0
  const std::uint64_t* body_written;  // times that the native host steps have written; or null
  bool busy;                          // wait for the busy thread before each launch
};

struct Samples {
  Times launched;      // times of launch and end of each replay, CLOCK_MONOTONIC
  Times join;          // ns between the two stamps of each replay
  Times hops;          // entry and return time of each host step of each replay
  Times body_written;  // copies of ReplayOptions::body_written, taken after each replay
};

// Launches `count` replays, waits after each of them and appends its times to `out`. Returns the
// driver's result code. The caller must not hold the GIL.
int replay(const ReplayOptions& options, std::size_t count, Samples* out) {
  using Wait = int (*)(void* stream);
  using Hops = std::size_t (*)(std::uint64_t* out, std::size_t n);
  constexpr int kNotFound = 500;                                   // CUDA_ERROR_NOT_FOUND
  void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);  // never closed
  if (library == nullptr) return kNotFound;
  const auto wait = reinterpret_cast<Wait>(dlsym(library, "cuStreamSynchronize"));
  const auto hops = reinterpret_cast<Hops>(options.hops);
  if (wait == nullptr) return kNotFound;
  for (std::size_t i = 0; i < count; ++i) {
    if (options.busy) await_busy_thread();
    out->launched.push_back(now_ns());
    const auto stream = reinterpret_cast<void*>(options.stream);
    int code;
    if (options.exec != nullptr) {
      code = options.exec->launch(options.stream).first;
    } else {
      const auto handle = reinterpret_cast<void*>(options.handle);
      code = hostwork::driver().graph_launch(handle, stream);
    }
    if (code == 0) code = wait(stream);
    out->launched.push_back(now_ns());
    if (code != 0) return code;
    out->join.push_back(options.stamps[1] - options.stamps[0]);
    if (hops != nullptr) {
      out->hops.resize(out->hops.size() + 2 * options.callbacks);
      hops(out->hops.data() + out->hops.size() - 2 * options.callbacks, options.callbacks);
    }
    if (options.body_written != nullptr) {
      out->body_written.insert(out->body_written.end(), options.body_written,
                               options.body_written + options.callbacks);
    }
  }
  // A gap (a long time without a call of tick()) is recorded by the call that ends it. Wait for
  // this call, so that the last gap is recorded.
  if (options.busy) await_busy_thread();
  return 0;
}

// Measures `count` times how many nanoseconds pass between the notification of a thread that sleeps
// on a condition variable and the time at which the thread runs.
Times wake_ups(std::size_t count) {
  std::mutex mutex;
  std::condition_variable condition;
  std::uint64_t notified_ns = 0;  // 0: sleep
  Times latencies;
  std::thread sleeper([&] {
    for (std::size_t i = 0; i < count; ++i) {
      std::unique_lock<std::mutex> lock(mutex);
      condition.wait(lock, [&] { return notified_ns != 0; });
      latencies.push_back(now_ns() - notified_ns);
      notified_ns = 0;
    }
  });
  for (std::size_t i = 0; i < count;) {
    usleep(500);  // let the thread fall asleep
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (notified_ns != 0) continue;
      notified_ns = now_ns();
    }
    condition.notify_one();
    ++i;
  }
  sleeper.join();
  return latencies;
}

}  // namespace
}  // namespace graft::labs

void bind_labs(nb::module_& m) {
  using namespace graft::labs;  // NOLINT
  nb::module_ labs = m.def_submodule("labs", "Measurement loops that run without the GIL.");
  labs.def("tick", &tick, "Report that the calling thread holds the GIL and runs bytecode.");
  labs.def("gaps", &gaps,
           "Return and clear the intervals (begin, end) without a tick, in ns of CLOCK_MONOTONIC.");
  labs.def("wake_ups", &wake_ups, nb::arg("count"), nb::call_guard<graft::hostwork::GilRelease>(),
           "Measure `count` times how many nanoseconds a sleeping thread takes to wake up.");
  labs.def(
      "replay",
      [](graft::hostwork::Exec* exec, std::uint64_t handle, std::uint64_t stream,
         std::size_t callbacks, std::uint64_t stamps, std::uint64_t hops,
         std::uint64_t body_written, bool busy, std::size_t count) {
        Samples out;
        const ReplayOptions options{exec,
                                    handle,
                                    stream,
                                    callbacks,
                                    reinterpret_cast<const std::uint64_t*>(stamps),
                                    hops,
                                    reinterpret_cast<const std::uint64_t*>(body_written),
                                    busy};
        int code;
        {
          const graft::hostwork::GilRelease release;
          code = replay(options, count, &out);
        }
        return std::make_tuple(code, out.launched, out.join, out.hops, out.body_written);
      },
      nb::arg("exec").none(), nb::arg("handle"), nb::arg("stream"), nb::arg("callbacks"),
      nb::arg("stamps"), nb::arg("hops"), nb::arg("body_written"), nb::arg("busy"),
      nb::arg("count"),
      "Launch `count` replays without the GIL. Return the driver's result code and four lists of "
      "times in ns: launch and end of each replay; time between its two device stamps; entry and "
      "return of each host step; and the values of `body_written` after each replay.");
}
