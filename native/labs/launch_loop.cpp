// Replays of a graph from a thread that never needs the GIL, beside a thread that keeps it busy:
// graft.native._native.labs, what the laboratories need outside of Python.
//
// A busy Python thread gives the GIL away whenever somebody asks for it. A launcher in Python asks
// for it between any two replays, so that callbacks meet a GIL that was just let go. Here nothing
// but a callback asks: the busy thread says by `tick` that it runs, and a replay is launched when
// it has ticked again since the last one.
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

constexpr std::size_t kMostGaps = 1 << 16;
constexpr std::uint64_t kGapNs = 5000;
constexpr std::uint64_t kPatienceNs = 1000000000;  // a busy thread that is silent so long is none
constexpr unsigned kLookUs = 20;

std::atomic<std::uint64_t> ticks{0};
std::mutex gaps_mutex;
std::vector<std::pair<std::uint64_t, std::uint64_t>> gap_list;
std::uint64_t last_tick = 0;  // under the GIL

std::uint64_t now_ns() { return static_cast<std::uint64_t>(monotonic_ns()); }

// The busy thread is in bytecode. Called by it with the GIL.
void tick() {
  const std::uint64_t now = now_ns();
  if (now - last_tick > kGapNs) {
    const std::lock_guard<std::mutex> lock(gaps_mutex);
    if (gap_list.size() < kMostGaps) gap_list.emplace_back(last_tick, now);
  }
  last_tick = now;
  ticks.fetch_add(1);
}

// Spans that were longer than kGapNs: the busy thread keeps the GIL from a tick of its own until
// somebody asks for it.
std::vector<std::pair<std::uint64_t, std::uint64_t>> gaps() {
  const std::lock_guard<std::mutex> lock(gaps_mutex);
  return std::exchange(gap_list, {});
}

// Until the busy thread has ticked twice: it holds the GIL, and is not about to give it up.
void await_busy_thread() {
  const std::uint64_t begun = now_ns(), wanted = ticks.load() + 2;
  while (ticks.load() < wanted && now_ns() - begun < kPatienceNs) usleep(kLookUs);
}

struct Replays {
  hostwork::Exec* exec;  // graft's executable; or null:
  std::uint64_t handle;  // a CUgraphExec of anybody's
  std::uint64_t stream;
  std::size_t callbacks;        // host steps of a replay
  const std::uint64_t* stamps;  // device time before and after them, written by each replay
  std::uint64_t hops;           // softcuda_hops, or 0
  const std::uint64_t* said;    // what native bodies write, a word each; or null
  bool busy;                    // wait for the busy thread before each launch
};

struct Samples {
  Times launched;  // (launched, ended) of each replay, CLOCK_MONOTONIC
  Times join;      // ns between the stamps
  Times hops;      // (entered, returned) of each host step of each replay
  Times said;
};

// Replays `count` times, one at a time. Returns the driver's code; without the GIL.
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

// Nanoseconds from waking a thread that sleeps on a condition until it runs, `count` times.
Times wake_ups(std::size_t count) {
  std::mutex mutex;
  std::condition_variable rung;
  std::uint64_t rung_at = 0;  // 0: go on sleeping
  Times took;
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

}  // namespace
}  // namespace graft::labs

void bind_labs(nb::module_& m) {
  using namespace graft::labs;  // NOLINT
  nb::module_ labs = m.def_submodule("labs", "What the laboratories need outside of Python.");
  labs.def("tick", &tick, "Say that the calling thread keeps the GIL busy.");
  labs.def("gaps", &gaps,
           "Spans (first, last) in ns of CLOCK_MONOTONIC without a tick; forgets them.");
  labs.def("wake_ups", &wake_ups, nb::arg("count"), nb::call_guard<graft::hostwork::GilRelease>(),
           "Nanoseconds that a sleeping thread takes to wake up, `count` times.");
  labs.def(
      "replay",
      [](graft::hostwork::Exec* exec, std::uint64_t handle, std::uint64_t stream,
         std::size_t callbacks, std::uint64_t stamps, std::uint64_t hops, std::uint64_t said,
         bool busy, std::size_t count) {
        Samples out;
        const Replays what{exec,
                           handle,
                           stream,
                           callbacks,
                           reinterpret_cast<const std::uint64_t*>(stamps),
                           hops,
                           reinterpret_cast<const std::uint64_t*>(said),
                           busy};
        int code;
        {
          const graft::hostwork::GilRelease release;
          code = replay(what, count, &out);
        }
        return std::make_tuple(code, out.launched, out.join, out.hops, out.said);
      },
      nb::arg("exec").none(), nb::arg("handle"), nb::arg("stream"), nb::arg("callbacks"),
      nb::arg("stamps"), nb::arg("hops"), nb::arg("said"), nb::arg("busy"), nb::arg("count"),
      "Replay without the GIL; (code, launched, join, hops, said), see Replays and Samples.");
}
