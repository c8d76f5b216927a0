#include "hostwork/mailbox.h"

#include <cstring>
#include <utility>

#include "stacks/stacks.h"
#include "threads.h"

namespace graft::hostwork {
namespace {

std::atomic<bool> abandoned{false};
thread_local void* output_now = nullptr;

// While it lives the calling thread owes the device an answer; the soft device then refuses every
// driver call of this thread (M6).
class OwesAnswer {
 public:
  OwesAnswer() : tell_(driver().owe_answer) {
    if (tell_ != nullptr) tell_(1);
  }
  ~OwesAnswer() {
    if (tell_ != nullptr) tell_(0);
  }
  OwesAnswer(const OwesAnswer&) = delete;
  OwesAnswer& operator=(const OwesAnswer&) = delete;

 private:
  void (*const tell_)(int);
};

bool newer(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

std::string seconds(double value) {
  std::string text = std::to_string(value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// Where the threads stand that run this record now: lines to follow a message. No GIL.
std::string native_stacks_of(const HostRecord* record) {
  constexpr double kAnswerLimitS = 1.0;
  std::string out;
  for (const Running& running : running_host_work()) {
    if (running.record != record) continue;
    const stacks::Frames frames = stacks::of_thread(running.tid, kAnswerLimitS);
    if (frames.empty()) continue;
    out += "\nit ran in thread " + std::to_string(running.tid) +
           ", native stack, innermost first:\n" + stacks::format(frames, "  ");
    out.pop_back();
  }
  return out;
}

}  // namespace

void* current_output() { return output_now; }

void abandon_mailboxes() { abandoned.store(true); }
bool mailboxes_abandoned() { return abandoned.load(std::memory_order_relaxed); }

Port::Port(HostRecord* record, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
           MailboxWords words, MailboxOutput output, MailboxLimits limits)
    : record_(record),
      state_(std::move(state)),
      worker_(std::move(worker)),
      words_(words),
      output_(output),
      limits_(limits),
      before_(state_->launched()) {}

Port::~Port() { retire(record_); }

std::uint32_t Port::closed() const {
  const std::uint64_t owner = owner_.load(std::memory_order_acquire);
  return (owner & 3) == kOpen ? seq_of(owner) - 1 : seq_of(owner);
}

bool Port::expecting(std::uint32_t last) const {
  if (mailboxes_abandoned()) return false;
  const auto launched = static_cast<std::uint32_t>(state_->launched() - before_);
  const std::uint32_t done = closed();
  return newer(launched, newer(last, done) ? last : done);
}

double Port::shortest_limit_s() const {
  return limits_.replay_s > 0 && limits_.replay_s < limits_.answer_s ? limits_.replay_s
                                                                     : limits_.answer_s;
}

// The first to see a request opens it; a request that was never answered (the device gave up by
// itself) loses its claim to the next one.
void Port::open(std::uint32_t seq) noexcept {
  std::uint64_t owner = owner_.load(std::memory_order_acquire);
  while (newer(seq, seq_of(owner))) {
    if (!owner_.compare_exchange_weak(owner, pack(seq, kOpen))) continue;
    if ((owner & 3) == kOpen) fail(seq_of(owner), "the device went on without an answer");
    return;
  }
}

bool Port::claim(std::uint32_t seq, Who who) noexcept {
  std::uint64_t expected = pack(seq, kOpen);
  return owner_.compare_exchange_strong(expected, pack(seq, who));
}

// Only the winner of the claim comes here, once per request: the request is taken back before the
// device can go on and post the next one.
void Port::acknowledge(std::uint32_t seq) noexcept {
  if (expecting(seq)) due_since_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  __atomic_store_n(words_.request, 0u, __ATOMIC_RELAXED);
  __atomic_store_n(words_.ack, words_.gave_up == nullptr ? 1u : seq, __ATOMIC_RELEASE);
}

bool Port::look(bool* more) noexcept {
  const std::uint32_t seq = request();
  const bool fresh = seq != 0 && seq != seen_;
  if (fresh) serve(seen_ = seq);
  *more = *more || expecting(seen_);
  return fresh;
}

void Port::serve(std::uint32_t seq) noexcept {
  inside_.store(true);  // before the claim is read: the watchdog then sees this thread (M8)
  open(seq);
  if (owner_.load() == pack(seq, kOpen)) {
    output_now = output_.scratch;
    {
      const OwesAnswer owes;
      record_->run_as(replay_of(seq));
    }
    output_now = nullptr;
    if (words_.gave_up != nullptr && __atomic_load_n(words_.gave_up, __ATOMIC_ACQUIRE) == seq) {
      if (claim(seq, kWatchdog)) {
        fail(seq, "the waiting kernel gave up before the answer came");
        acknowledge(seq);
      }
    } else if (claim(seq, kWorker)) {
      if (output_.bytes != 0 && !state_->failed()) {
        std::memcpy(output_.output, output_.scratch, output_.bytes);
      }
      acknowledge(seq);
    }
  }
  inside_.store(false);
}

void Port::launched() noexcept {
  // Called after the launch was counted: one launch ahead of the answers means this one.
  const auto ahead = static_cast<std::uint32_t>(state_->launched() - before_) - closed();
  if (ahead <= 1) due_since_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  worker_->wake();
  wake_watchdog();
}

bool Port::overrun() const {
  const bool released = (owner_.load() & 3) == kWatchdog;
  return released && inside_.load();
}

void Port::fail(std::uint32_t seq, std::string why) noexcept {
  state_->fail(kStatusDeadline, Failure{record_->name(), replay_of(seq), nullptr, std::move(why)});
}

// Status first, then the answer (M5); who loses the claim writes nothing.
void Port::release(std::uint32_t seq, const std::string& why) {
  if (!claim(seq, kWatchdog)) return;
  fail(seq, why);
  acknowledge(seq);
}

void Port::hear_device() {
  if (words_.gave_up == nullptr) return;
  const std::uint32_t seq = __atomic_load_n(words_.gave_up, __ATOMIC_ACQUIRE);
  if (seq == 0 || newer(closed(), seq)) return;
  open(seq);  // the device may have given up before any thread of ours saw the request
  if (owner_.load() != pack(seq, kOpen)) return;
  release(seq, "the waiting kernel gave up at its own deadline" + native_stacks_of(record_));
}

bool Port::check(std::int64_t now_ns) {
  hear_device();
  const std::uint32_t seq = request();
  if (seq != 0 && newer(seq, closed())) {
    if (watched_ != seq) {
      watched_ = seq;
      watched_since_ns_ = now_ns;
      open(seq);
    }
    const double waited = static_cast<double>(now_ns - watched_since_ns_) * 1e-9;
    if (waited >= limits_.answer_s) {
      // Taken before the release, after which the work may end.
      const std::string where = native_stacks_of(record_);
      release(seq,
              "no answer within " + seconds(limits_.answer_s) + "; the wait was released" + where);
    } else if (state_->failed() && worker_->stuck()) {
      release(seq, "its worker is stuck in an earlier step");
    }
    return true;
  }
  const std::uint32_t done = closed();
  if (!expecting(done)) return false;
  const double due = static_cast<double>(now_ns - due_since_ns_.load()) * 1e-9;
  if (limits_.replay_s > 0 && due >= limits_.replay_s && !state_->failed()) {
    fail(done + 1, "the device did not reach this step within " + seconds(limits_.replay_s) +
                       " of its launch");
  }
  return true;
}

void PortHold::reap(std::vector<PyObject*>& references) noexcept {
  port_->worker()->remove(port_.get());
  port_.reset();
  Record::reap(references);
}

}  // namespace graft::hostwork
