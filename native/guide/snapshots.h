// The requests of each replay, published by the Python side before the replay is launched.
//
// 1. An entry belongs to the publisher until `replay` is stored with release order, then to the
//    worker until retire(). publish() refuses to overwrite an entry that was not retired.
// 2. Matchers in an entry are borrowed: the publisher keeps the Python references until it retires
//    the replay, so the worker never drops a reference.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "matcher.h"

namespace graft::guide {

struct Request {
  int32_t slot = 0;
  int32_t epoch = 0;
  int32_t position = 0;              // position of `last` when the request joined
  NativeMatcher* matcher = nullptr;  // null: unconstrained
};

struct Snapshot {
  std::atomic<int64_t> replay{0};  // 0: empty; replays count from 1
  std::vector<Request> requests;
};

class SnapshotRing {
 public:
  SnapshotRing(int entries, int slots) : ring_(static_cast<size_t>(entries)) {
    for (Snapshot& entry : ring_) entry.requests.reserve(static_cast<size_t>(slots));
  }

  bool publish(int64_t replay, const std::vector<Request>& requests) {
    Snapshot& entry = at(replay);
    if (entry.replay.load(std::memory_order_acquire) != 0) return false;
    entry.requests.assign(requests.begin(), requests.end());
    entry.replay.store(replay, std::memory_order_release);
    return true;
  }

  const Snapshot* find(int64_t replay) const {
    const Snapshot& entry = ring_[static_cast<size_t>(replay) % ring_.size()];
    return entry.replay.load(std::memory_order_acquire) == replay ? &entry : nullptr;
  }

  bool retire(int64_t replay) {
    Snapshot& entry = at(replay);
    if (entry.replay.load(std::memory_order_acquire) != replay) return false;
    entry.replay.store(0, std::memory_order_release);
    return true;
  }

 private:
  Snapshot& at(int64_t replay) { return ring_[static_cast<size_t>(replay) % ring_.size()]; }

  std::vector<Snapshot> ring_;
};

}  // namespace graft::guide
