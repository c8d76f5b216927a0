// What the worker did, readable from any thread at any time. One thread writes.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace graft::guide {

inline int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns.
inline int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

class Counter {
 public:
  void add(int64_t amount = 1) {
    // one writer: no read-modify-write needed
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

// What is counted; the names are in the same order.
namespace count {
enum : int {
  replays,
  missing_snapshots,
  joins,
  fills,
  accepts,
  rollbacks,
  commits,
  committed_tokens,
  refused_drafts,
  terminations,
  dead_ends,
  desyncs,
  errors,
  free_rows,
  probes,
  probe_misses,
  late_rows,
  budget_stalls,
  forced_rows,
  forced_tokens,
  kinds
};
constexpr const char* names[kinds] = {
    "replays",        "missing_snapshots", "joins",       "fills",
    "accepts",        "rollbacks",         "commits",     "committed_tokens",
    "refused_drafts", "terminations",      "dead_ends",   "desyncs",
    "errors",         "free_rows",         "probes",      "probe_misses",
    "late_rows",      "budget_stalls",     "forced_rows", "forced_tokens"};
}  // namespace count

struct Counters {
  Counter of[count::kinds];
  Counter step_calls[3], step_ns[3];  // open, commit, draft
};

// Start and end of each step of the last replays.
class Timeline {
 public:
  static constexpr int64_t kReplays = 256;

  struct Span {
    int64_t replay;
    int step;
    int64_t start_ns;
    int64_t end_ns;
  };

  explicit Timeline(int steps)
      : steps_(steps), cells_(static_cast<size_t>(kReplays) * static_cast<size_t>(steps)) {}

  void record(int64_t replay, int step, int64_t start_ns, int64_t end_ns) {
    Cell& cell = at(replay, step);
    cell.replay.store(0, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);
    cell.start.store(start_ns, std::memory_order_relaxed);
    cell.end.store(end_ns, std::memory_order_relaxed);
    cell.replay.store(replay, std::memory_order_release);
  }

  std::vector<Span> read() const {
    std::vector<Span> spans;
    for (size_t i = 0; i < cells_.size(); ++i) {
      const Cell& cell = cells_[i];
      Span span{cell.replay.load(std::memory_order_acquire),
                static_cast<int>(i % static_cast<size_t>(steps_)),
                cell.start.load(std::memory_order_relaxed),
                cell.end.load(std::memory_order_relaxed)};
      std::atomic_thread_fence(std::memory_order_acquire);
      // a cell that is being rewritten is left out
      if (span.replay != 0 && cell.replay.load(std::memory_order_relaxed) == span.replay) {
        spans.push_back(span);
      }
    }
    return spans;
  }

 private:
  struct Cell {
    std::atomic<int64_t> replay{0}, start{0}, end{0};
  };

  Cell& at(int64_t replay, int step) {
    return cells_[static_cast<size_t>((replay % kReplays) * steps_ + step)];
  }

  int steps_;
  std::vector<Cell> cells_;
};

}  // namespace graft::guide
