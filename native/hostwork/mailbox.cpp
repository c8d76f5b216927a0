#include "hostwork/mailbox.h"

#include <time.h>

#include <cstring>
#include <utility>

#include "hostwork/driver.h"
#include "hostwork/mailbox_worker.h"

namespace graft::hostwork {
namespace {

std::atomic<bool> abandoned{false};
thread_local CurrentPart part_now;

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

}  // namespace

std::int64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

CurrentPart current_part() { return part_now; }
void* current_output() { return part_now.scratch; }

void abandon_mailboxes() { abandoned.store(true); }
bool mailboxes_abandoned() { return abandoned.load(std::memory_order_relaxed); }

Port::Port(HostRecord* record, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
           MailboxWords words, MailboxOutput output, MailboxLimits limits, int parts)
    : record_(record),
      state_(std::move(state)),
      worker_(std::move(worker)),
      words_(words),
      output_(output),
      limits_(limits),
      parts_(static_cast<std::uint64_t>(parts)),
      before_(captured() ? 0 : state_->launched()) {
  if (captured()) state_->add_status(words_.status);
}

Port::~Port() {
  if (captured()) state_->remove_status(words_.status);  // before the record lets go of them
  retire(record_);
}

std::uint32_t Port::closed() const {
  const std::uint64_t owner = owner_.load(std::memory_order_acquire);
  return (owner & 3) == kOpen ? seq_of(owner) - 1 : seq_of(owner);
}

bool Port::expecting(std::uint32_t last) const {
  if (mailboxes_abandoned()) return false;
  if (captured()) return true;
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
  if (!captured() && expecting(seq)) due_since_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  __atomic_store_n(words_.request, 0u, __ATOMIC_RELAXED);
  __atomic_store_n(words_.ack, words_.gave_up == nullptr ? 1u : seq, __ATOMIC_RELEASE);
}

bool Port::last_part(std::uint32_t seq) noexcept {
  std::uint64_t before = arrived_.load(std::memory_order_acquire);
  std::uint64_t after = 0;
  do {
    const auto counted = static_cast<std::uint32_t>(before >> 16);
    if (newer(counted, seq)) return false;  // overrun, while others do a later request
    const bool same = counted == seq;
    after = same ? before + 1 : (std::uint64_t{seq} << 16 | 1);
  } while (!arrived_.compare_exchange_weak(before, after, std::memory_order_acq_rel));
  return (after & 0xffff) == parts_;
}

void Port::serve(std::uint32_t seq, int part) noexcept {
  check_lease();
  inside_.fetch_add(1);  // before the claim is read: the watchdog then sees this thread (M8)
  open(seq);
  if (owner_.load() == pack(seq, kOpen)) {
    part_now = {part, static_cast<int>(parts_), output_.scratch};
    {
      const OwesAnswer owes;
      record_->run_as(replay_of(seq));
    }
    part_now = {};
    if (last_part(seq)) {
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
  }
  inside_.fetch_sub(1);
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
  return released && inside_.load() > 0;
}

void Port::fail(std::uint32_t seq, std::string why, StatusCode code) noexcept {
  state_->fail(code, Failure{record_->name(), replay_of(seq), nullptr, std::move(why)});
}

// Status first, then the answer (M5); who loses the claim writes nothing.
void Port::release(std::uint32_t seq, const std::string& why) {
  if (!claim(seq, kWatchdog)) return;
  fail(seq, why);
  acknowledge(seq);
}

// The device stored it before it went on without an answer (M11).
void Port::check_lease() noexcept {
  if (!captured() || __atomic_load_n(words_.refused, __ATOMIC_ACQUIRE) == 0) return;
  if (__atomic_exchange_n(words_.refused, 0, __ATOMIC_ACQ_REL) == 0) return;  // one tells
  fail(closed() + 1,
       "another executable of the captured graph was running, and its words are for one at a time",
       kStatusLease);
}

void Port::hear_device() {
  check_lease();
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
