// Waiting without holding the GIL, without blocking in the driver, and with a way out.
#pragma once

#include <nanobind/nanobind.h>
#include <sched.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <thread>

#include "hostwork/gate.h"
#include "hostwork/relax.h"

namespace graft::hostwork {

using PollClock = std::chrono::steady_clock;

// Spins for 20 us, yields until 200 us, then sleeps: a machine with two cores needs them for the
// work that is being waited for. Without the GIL. True when `done()` became true before `until`.
template <typename Done>
bool poll_slice(Done&& done, PollClock::time_point begin, PollClock::time_point until) {
  while (true) {
    if (done()) return true;
    const auto now = PollClock::now();
    if (now >= until) return false;
    const auto waited = now - begin;
    if (waited < std::chrono::microseconds(20)) {
      for (int i = 0; i < 32; ++i) cpu_relax();
    } else if (waited < std::chrono::microseconds(200)) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(
          std::chrono::microseconds(waited < std::chrono::milliseconds(2) ? 20 : 100));
    }
  }
}

// Polls until `done()` or the deadline (no value: none). Called with the GIL held; the GIL is
// released while polling and taken now and then, so that Ctrl-C raises KeyboardInterrupt here.
template <typename Done>
bool poll_until(Done&& done, std::optional<double> timeout_s) {
  const auto begin = PollClock::now();
  // 100 years stand for "no deadline": the clock's arithmetic must not overflow.
  const double limit = timeout_s ? std::min(*timeout_s, 3.0e9) : 3.0e9;
  const auto end =
      begin + std::chrono::duration_cast<PollClock::duration>(std::chrono::duration<double>(limit));
  while (true) {
    bool finished;
    {
      const GilRelease release;
      const auto slice = PollClock::now() + std::chrono::milliseconds(20);
      finished = poll_slice(done, begin, std::min(slice, end));
    }
    if (finished) return true;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (PollClock::now() >= end) return false;
  }
}

}  // namespace graft::hostwork
