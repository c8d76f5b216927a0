// The guide's lock-free parts between the thread that publishes and the thread that works.
#pragma once

#include <chrono>
#include <cstdio>
#include <thread>

#include "driver_calls.h"
#include "guide/counters.h"
#include "guide/snapshots.h"

namespace stress {

// Publishes and retires snapshots while a worker reads them, and times its steps; a
// third thread reads what may be read at any time. Every value says what it must be.
inline int rings(double seconds) {
  using namespace graft::guide;
  constexpr int kEntries = 4;
  SnapshotRing ring(kEntries, 8);
  Timeline timeline(3);
  std::atomic<int64_t> worked{0}, last{INT64_MAX};
  std::atomic<bool> over{false};

  std::thread worker([&] {
    for (int64_t replay = 1; replay <= last.load(); ++replay) {
      const Snapshot* snapshot = nullptr;
      while ((snapshot = ring.find(replay)) == nullptr) {
        if (replay > last.load()) return;
        std::this_thread::yield();
      }
      WANT(snapshot->requests.size() == static_cast<size_t>(replay % 8));
      for (const Request& request : snapshot->requests) WANT(request.epoch == replay % 1000);
      timeline.record(replay, static_cast<int>(replay % 3), replay, 2 * replay);
      worked.store(replay);
    }
  });
  std::thread reader([&] {
    while (!over.load()) {
      for (const Timeline::Span& span : timeline.read()) {
        WANT(span.step == span.replay % 3);
        WANT(span.start_ns == span.replay && span.end_ns == 2 * span.replay);
      }
      std::this_thread::yield();
    }
  });

  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t replay = 0;
  while (std::chrono::steady_clock::now() < end) {
    ++replay;
    if (replay > kEntries) {
      while (worked.load() < replay - kEntries) std::this_thread::yield();
      WANT(ring.retire(replay - kEntries));
    }
    Request request;
    request.epoch = static_cast<int32_t>(replay % 1000);
    WANT(ring.publish(replay, std::vector<Request>(static_cast<size_t>(replay % 8), request)));
  }
  last.store(replay);
  worker.join();
  over.store(true);
  reader.join();
  std::printf("%ld replays\n", static_cast<long>(replay));
  return 0;
}

}  // namespace stress
