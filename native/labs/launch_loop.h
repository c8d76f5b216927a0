// Replays of a graph from a thread that never needs the GIL, beside a thread that keeps it busy.
//
// A busy Python thread gives the GIL away whenever somebody asks for it. A launcher in Python asks
// for it between any two replays, so that callbacks meet a GIL that was just let go. Here nothing
// but a callback asks: the busy thread says by `tick` that it runs, and a replay is launched when
// it has ticked again since the last one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hostwork/exec.h"

namespace graft::labs {

std::uint64_t now_ns();

// The busy thread is in bytecode. Called by it with the GIL.
void tick();

// Spans (first, last) in ns of CLOCK_MONOTONIC without a tick that were longer than kGapNs. The
// busy thread keeps the GIL from a tick of its own until somebody asks for it.
constexpr std::uint64_t kGapNs = 5000;
std::vector<std::pair<std::uint64_t, std::uint64_t>> gaps();

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
  std::vector<std::uint64_t> launched;  // (launched, ended) of each replay, CLOCK_MONOTONIC
  std::vector<std::uint64_t> join;      // ns between the stamps
  std::vector<std::uint64_t> hops;      // (entered, returned) of each host step of each replay
  std::vector<std::uint64_t> said;
};

// Replays `count` times, one at a time. Returns the driver's code; without the GIL.
int replay(const Replays& what, std::size_t count, Samples* out);

// Nanoseconds from waking a thread that sleeps on a condition until it runs, `count` times.
std::vector<std::uint64_t> wake_ups(std::size_t count);

}  // namespace graft::labs
