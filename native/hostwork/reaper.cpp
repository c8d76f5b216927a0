#include "hostwork/reaper.h"

#include <semaphore.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "hostwork/driver.h"
#include "hostwork/gate.h"
#include "hostwork/mailbox.h"

namespace graft::hostwork {

using Clock = std::chrono::steady_clock;

constexpr int kCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
// Interval at which the reaper checks whether device work has ended.
constexpr long kPollNs = 200'000;
// A driver may hold a lock of the context while it frees memory and waits for the device, so that
// other driver calls wait too. Memory is therefore freed when the streams are idle, but at the
// latest after this time, because the streams of a busy program may never be idle.
constexpr std::chrono::milliseconds kMaxDeferral{500};

// Tells the reaper about a new stream. The creator of the stream pushes this object to the reaper's
// list. The reaper handles the list in order, so it knows the stream before it frees memory that
// work on the stream uses.
class StreamCreation final : public Reapable {
 public:
  explicit StreamCreation(Handle created) : stream(created) {}
  void reap(std::vector<PyObject*>&) noexcept override;
  const Handle stream;
};

// The streams of graft, each with an event that shows which work on the stream has ended. Time is
// divided into numbered periods, so that a caller can ask whether all work has ended that was
// enqueued before a period began. Used by the reaper thread only.
class StreamFences {
 public:
  void add(Handle stream) { streams_.push_back({stream}); }
  void remove(Handle stream) {
    const auto it = std::find_if(streams_.begin(), streams_.end(),
                                 [&](const Fence& fence) { return fence.stream == stream; });
    if (it == streams_.end()) return;
    if (it->event != nullptr) driver().event_destroy(it->event);
    streams_.erase(it);
  }
  // Begins a period and returns its number.
  std::uint64_t next_period() { return ++period_; }
  // Records the event of each stream, unless its last record is still pending, and queries it.
  // Returns whether all streams are known to be idle.
  bool update() {
    bool idle = true;
    for (Fence& fence : streams_) {
      const bool recorded_now = !fence.pending;
      if (recorded_now) {
        const Recording recording = record(fence);
        fence.unknown = recording == Recording::kImpossible;
        if (recording == Recording::kFaulted) {
          fence.ended = period_;
          faulted_ = true;
        }
        idle = idle && !fence.unknown;
        if (recording != Recording::kDone) continue;
      }
      // The event of an idle stream is reached within microseconds.
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
      Result result = driver().event_query(fence.event);
      while (recorded_now && result == kNotReady && std::chrono::steady_clock::now() < end)
        result = driver().event_query(fence.event);
      fence.pending = result == kNotReady;
      faulted_ = faulted_ || is_context_fault(result);
      if (result == kSuccess || is_context_fault(result)) {
        fence.ended = fence.recorded;
      } else {
        fence.unknown = !fence.pending;
      }
      idle = idle && recorded_now && fence.ended == period_;
    }
    return idle;
  }
  // Returns whether the event of a stream could not be recorded or queried by update().
  bool has_unknown() const {
    return std::any_of(streams_.begin(), streams_.end(),
                       [](const Fence& fence) { return fence.unknown; });
  }
  // Returns whether update() has found a fault of the context.
  bool faulted() const { return faulted_; }
  // Returns the number of the latest period of which the following is known: all work that was
  // enqueued before this period began has ended, on all streams.
  std::uint64_t ended() const {
    std::uint64_t period = period_;
    for (const Fence& fence : streams_) period = std::min(period, fence.ended);
    return period;
  }

 private:
  struct Fence {
    Handle stream;
    Handle event = nullptr;
    bool pending = false;        // whether the event was recorded and is not known to be reached
    bool unknown = false;        // whether the last attempt to record or query the event failed
    std::uint64_t recorded = 0;  // period in which the event was recorded
    std::uint64_t ended = 0;     // the work from before this period has ended on the stream
  };

  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD.
  static bool is_capture_error(Result result) { return result >= 900 && result <= 908; }

  // Returns the result of the driver call. Stores in `capturing` whether the stream is capturing.
  static Result query_capture(Handle stream, bool* capturing) {
    int status = 0;
    std::uint64_t id = 0;
    const Result result =
        driver().stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
    *capturing = is_capture_error(result) || (result == kSuccess && status != 0);
    return result;
  }

  enum class Recording {
    kDone,        // the event was recorded
    kImpossible,  // the stream is capturing, or a driver call failed
    kFaulted,     // the context has a fault, after which no work runs
  };

  // Records the event of a stream. A capturing stream is left alone, because a query of captured
  // work would invalidate the capture. Another thread may begin a capture at any time. The event is
  // therefore queried only if the stream is still not capturing after the event was recorded.
  Recording record(Fence& fence) {
    constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
    const Driver& d = driver();
    bool capturing = false;
    Result result = query_capture(fence.stream, &capturing);
    if (capturing) return Recording::kImpossible;
    if (result == kSuccess && fence.event == nullptr) {
      Handle event = nullptr;
      result = d.event_create(&event, kDisableTiming);
      if (result == kSuccess) fence.event = event;
    }
    if (result == kSuccess) result = d.event_record(fence.event, fence.stream);
    if (result == kSuccess) result = query_capture(fence.stream, &capturing);
    if (is_context_fault(result)) return Recording::kFaulted;
    if (result != kSuccess || capturing) return Recording::kImpossible;
    fence.recorded = period_;
    return Recording::kDone;
  }

  std::vector<Fence> streams_;
  std::uint64_t period_ = 0;
  bool faulted_ = false;
};

class Reaper {
 public:
  Reaper() { sem_init(&wake_, 0, 0); }

  void push(Reapable* item) noexcept {
    pending_.fetch_add(1);
    item->next_ = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(item->next_, item)) {
    }
    sem_post(&wake_);
  }

  void run() {
    // CUDA considers freeing potentially unsafe during a stream capture and would invalidate the
    // capture. Nothing that is freed here belongs to captured work, so this thread opts out.
    int mode = kCaptureModeRelaxed;
    driver().thread_exchange_capture_mode(&mode);
    while (true) {
      wait();
      // Make the context current each time, because it may have been released and retained again.
      // While it is released, no driver resource exists, so drain() needs no context.
      const Handle context = primary_context();
      if (context != nullptr) driver().ctx_set_current(context);
      drain();
    }
  }

  void check_device() noexcept {
    check_device_.store(true);
    sem_post(&wake_);
  }

  std::int64_t pending() const { return pending_.load(); }
  // Returns how often the reaper has found that items wait for a stream whose event cannot be
  // recorded.
  std::uint64_t blocked_checks() const { return blocked_checks_.load(); }
  StreamFences& streams() { return streams_; }

 private:
  // Items that wait until device work has ended.
  struct Deferred {
    Reapable* items;
    std::uint64_t period;
    Clock::time_point since;
  };

  // Waits for a new item or, if items are deferred, until it is time to check them.
  void wait() {
    if (deferred_.empty()) {
      while (sem_wait(&wake_) != 0) {
      }
      return;
    }
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += kPollNs;
    if (until.tv_nsec >= 1000000000) {
      until.tv_nsec -= 1000000000;
      ++until.tv_sec;
    }
    sem_timedwait(&wake_, &until);
  }

  void drain() {
    Reapable* used = nullptr;  // new items that device work may use
    Reapable* const unused = split(reversed(head_.exchange(nullptr)), &used);
    finish(unused);
    const bool check = check_device_.exchange(false);
    if (used != nullptr) deferred_.push_back({used, streams_.next_period(), Clock::now()});
    if (deferred_.empty() && !check) return;
    const bool idle = !gate_open() || streams_.update();
    if (streams_.faulted()) abandon_mailboxes();
    while (!deferred_.empty()) {
      const Deferred& first = deferred_.front();
      const auto age = Clock::now() - first.since;
      const bool ended = !gate_open() || streams_.ended() >= first.period;
      if (!ended || !(idle || age >= kMaxDeferral)) break;
      Reapable* const items = first.items;
      deferred_.pop_front();
      finish(items);
    }
    if (!deferred_.empty() && streams_.has_unknown()) ++blocked_checks_;
  }

  void finish(Reapable* items) {
    std::int64_t count = 0;
    for (Reapable* item = items; item != nullptr; item = item->next_) ++count;
    if (gate_open()) free(items);  // else the process exits (INVARIANTS.md L4)
    pending_.fetch_sub(count);
  }

  // Releases the resources of all items, then their Python references, and then deletes the items.
  // The items are deleted last, because released_records() counts a record as soon as it is
  // deleted.
  void free(Reapable* items) {
    std::vector<PyObject*> references;
    for (Reapable* item = items; item != nullptr; item = item->next_) item->reap(references);
    if (!references.empty()) {
      const PythonEntry python;
      for (std::size_t i = 0; python && i < references.size(); ++i) Py_DECREF(references[i]);
    }
    while (items != nullptr) {
      Reapable* next = items->next_;
      delete items;
      items = next;
    }
  }

  // Returns the list with the oldest item first.
  static Reapable* reversed(Reapable* head) {
    Reapable* out = nullptr;
    while (head != nullptr) {
      Reapable* next = head->next_;
      head->next_ = out;
      out = head;
      head = next;
    }
    return out;
  }

  // Moves the items that device work may use from the list to `used` and returns the list of the
  // others. Both lists keep their order.
  static Reapable* split(Reapable* items, Reapable** used) {
    Reapable* unused = nullptr;
    Reapable** used_end = used;
    Reapable** unused_end = &unused;
    while (items != nullptr) {
      Reapable**& end = items->used_by_device() ? used_end : unused_end;
      *end = items;
      end = &items->next_;
      items = items->next_;
    }
    *used_end = nullptr;
    *unused_end = nullptr;
    return unused;
  }

  std::atomic<Reapable*> head_{nullptr};
  std::atomic<std::int64_t> pending_{0};
  sem_t wake_;
  StreamFences streams_;
  std::deque<Deferred> deferred_;  // oldest first
  std::atomic<std::uint64_t> blocked_checks_{0};
  std::atomic<bool> check_device_{false};
};

namespace {

// The reaper is never destroyed, because its thread uses it until the process ends.
Reaper& reaper = *new Reaper;

}  // namespace

void StreamCreation::reap(std::vector<PyObject*>&) noexcept { reaper.streams().add(stream); }

void retire(Reapable* item) noexcept { reaper.push(item); }

bool flush(double timeout_s) {
  if (in_host_work()) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  const std::uint64_t first_check = reaper.blocked_checks();
  while (reaper.pending() != 0) {
    if (!gate_open() || std::chrono::steady_clock::now() >= end) return false;
    // A stream capture prevents the reaper from freeing objects. Do not wait for its end, because
    // the calling thread may be the one that has to end it. Only the second check counts: the first
    // one may have begun before this call.
    if (reaper.blocked_checks() >= first_check + 2) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void check_device() noexcept { reaper.check_device(); }

void start_reaper() {
  std::thread([] { reaper.run(); }).detach();
}

namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> failed{0};

Result destroy(ResourceKind kind, std::uint64_t handle) {
  const Driver& d = driver();
  Result (*const frees[])(Handle) = {d.mem_free,       d.mem_free_host, d.event_destroy,
                                     d.stream_destroy, d.module_unload, d.graph_destroy};
  return frees[static_cast<int>(kind)](reinterpret_cast<Handle>(handle));
}

}  // namespace

class ResourceRelease final : public Reapable {
 public:
  ResourceRelease(ResourceKind kind, std::uint64_t handle) : kind_(kind), handle_(handle) {}

  void reap(std::vector<PyObject*>&) noexcept override {
    if (kind_ == ResourceKind::kStream) reaper.streams().remove(reinterpret_cast<Handle>(handle_));
    // After a context fault, this call fails, and the driver frees the handle together with the
    // context.
    if (owned && destroy(kind_, handle_) != kSuccess) failed.fetch_add(1);
    live.fetch_sub(1);
  }

  bool used_by_device() const noexcept override {
    return kind_ == ResourceKind::kDeviceMemory || kind_ == ResourceKind::kPinnedMemory ||
           kind_ == ResourceKind::kModule || kind_ == ResourceKind::kStream;
  }

  bool owned = true;  // changed only before the object is retired

 private:
  const ResourceKind kind_;
  const std::uint64_t handle_;
};

Resource::Resource(ResourceKind kind, std::uint64_t handle)
    : release_(new ResourceRelease(kind, handle)), handle_(handle) {
  live.fetch_add(1);
  if (kind == ResourceKind::kStream) retire(new StreamCreation(reinterpret_cast<Handle>(handle)));
}

Resource::~Resource() = default;
void Resource::disown() noexcept { release_->owned = false; }

std::int64_t live_resources() { return live.load(); }
std::int64_t failed_frees() { return failed.load(); }

}  // namespace graft::hostwork
