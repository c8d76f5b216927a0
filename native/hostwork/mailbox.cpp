#include "hostwork/mailbox.h"

#include <cstring>
#include <utility>

#include "stacks/stacks.h"
#include "threads.h"

namespace graft::hostwork {
namespace {

std::atomic<bool> abandoned{false};
thread_local void* thread_output = nullptr;

// While an object of this class exists, the soft device treats the calling thread as one that the
// device waits for, and rejects every driver call of the thread (INVARIANTS.md M6).
class AnswerScope {
 public:
  AnswerScope() : owe_answer_(driver().owe_answer) {
    if (owe_answer_ != nullptr) owe_answer_(1);
  }
  ~AnswerScope() {
    if (owe_answer_ != nullptr) owe_answer_(0);
  }
  AnswerScope(const AnswerScope&) = delete;
  AnswerScope& operator=(const AnswerScope&) = delete;

 private:
  void (*const owe_answer_)(int);
};

bool newer(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

std::string seconds(double value) {
  std::string text = std::to_string(value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// Returns the native stacks of the threads that run this record, as text to append to a message.
// The caller must not hold the GIL.
std::string native_stacks_of(const HostRecord* record) {
  constexpr double kAnswerLimitS = 1.0;
  std::string out;
  for (const RunningHostWork& running : running_host_work()) {
    if (running.record != record) continue;
    const stacks::Frames frames = stacks::of_thread(running.tid, kAnswerLimitS);
    if (frames.empty()) continue;
    out += "\nit ran in thread " + std::to_string(running.tid) +
           ", native stack, innermost frame first:\n" + stacks::format(frames, "  ");
    out.pop_back();
  }
  return out;
}

}  // namespace

void* current_output() { return thread_output; }

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
      launches_before_(state_->launched()),
      completed_before_(completed()),
      first_(*words_.ack),
      last_seen_(first_) {}

Port::~Port() { retire(record_); }

std::uint32_t Port::last_closed() const {
  const std::uint64_t claim = claim_.load(std::memory_order_acquire);
  return claimant_of(claim) == kOpen ? seq_of(claim) - 1 : seq_of(claim);
}

bool Port::expecting(std::uint32_t last) const {
  if (mailboxes_abandoned()) return false;
  const std::int64_t launch = state_->announced();
  if (words_.completed != nullptr) {
    const auto launched = static_cast<std::uint32_t>(launch - launches_before_);
    return newer(launched, completed() - completed_before_);
  }
  const std::uint32_t done = last_closed();
  return requests_after(newer(last, done) ? last : done, launch) > 0;
}

double Port::shortest_limit_s() const {
  return limits_.replay_s > 0 && limits_.replay_s < limits_.answer_s ? limits_.replay_s
                                                                     : limits_.answer_s;
}

// Opens request `seq`, so that a thread can claim it and then answer it. Called by the first thread
// that sees the request. A new request shows that the device no longer waits for the previous one.
// If the previous request has no answer yet, it fails and cannot be claimed any more.
void Port::open_request(std::uint32_t seq) noexcept {
  std::uint64_t claim = claim_.load(std::memory_order_acquire);
  while (newer(seq, seq_of(claim))) {
    if (!claim_.compare_exchange_weak(claim, pack(seq, launch_of(seq), kOpen))) continue;
    if (claimant_of(claim) == kOpen)
      fail(launch_of_claim(claim), "the device continued without an answer");
    return;
  }
}

bool Port::try_claim(std::uint32_t seq, Claimant claimant) noexcept {
  std::uint64_t claim = claim_.load(std::memory_order_acquire);
  return is_open(claim, seq) && claim_.compare_exchange_strong(claim, claim | claimant);
}

// Stores the answer to request `seq`. Called once, by the thread that has claimed the request. The
// request word is cleared before the answer is stored, because the device may post the next request
// as soon as it sees the answer. The word is cleared only if it still contains `seq`: if a spinning
// kernel ended at its own deadline, the device may already have posted the next request.
void Port::acknowledge(std::uint32_t seq) noexcept {
  if (expecting(seq)) due_since_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  std::uint32_t posted = seq;
  __atomic_compare_exchange_n(words_.request, &posted, 0u, false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  __atomic_store_n(words_.ack, words_.timed_out == nullptr ? 1u : seq, __ATOMIC_RELEASE);
}

bool Port::poll(bool* expecting_more) noexcept {
  const std::uint32_t seq = request();
  const bool is_new = seq != 0 && seq != last_seen_;
  if (is_new) {
    last_seen_ = seq;
    serve(seq);
  }
  *expecting_more = *expecting_more || expecting(last_seen_);
  return is_new;
}

void Port::serve(std::uint32_t seq) noexcept {
  // Set the flag before reading the claim: a watchdog that claims the request must see that this
  // thread may be running the work (INVARIANTS.md M8).
  serving_.store(true);
  open_request(seq);
  const std::uint64_t claim = claim_.load();
  if (is_open(claim, seq)) {
    const std::int64_t launch = launch_of_claim(claim);
    thread_output = output_.scratch;
    {
      const AnswerScope owes;
      record_->run_as(state_->base() + launch);
    }
    thread_output = nullptr;
    if (words_.timed_out != nullptr && __atomic_load_n(words_.timed_out, __ATOMIC_ACQUIRE) == seq) {
      if (try_claim(seq, kWatchdog)) {
        fail(launch, "the waiting kernel reached its deadline before the answer");
        acknowledge(seq);
      }
    } else if (try_claim(seq, kWorker)) {
      if (output_.bytes != 0 && !state_->failed()) {
        std::memcpy(output_.output, output_.scratch, output_.bytes);
      }
      acknowledge(seq);
    }
  }
  serving_.store(false);
}

void Port::launching() noexcept {
  // Each launch posts one request. If all earlier requests have been answered, the next one is that
  // of the launch that begins now, and its replay deadline starts now.
  const std::int64_t ahead = requests_after(last_closed(), state_->announced());
  if (ahead == 0 || ahead == 1) due_since_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  worker_->wake();
  wake_watchdog();
}

bool Port::overrun() const {
  const bool released = claimant_of(claim_.load()) == kWatchdog;
  return released && serving_.load();
}

void Port::fail(std::int64_t launch, std::string reason) noexcept {
  state_->fail(kStatusDeadline,
               Failure{record_->name(), state_->base() + launch, nullptr, std::move(reason)});
}

// Claims request `seq` for the watchdog and fails its replay with the message `reason`: stores the
// graph's status first and then the answer, which ends the device's wait (INVARIANTS.md M5). Does
// nothing if the worker has claimed the request.
void Port::release(std::uint32_t seq, const std::string& reason) {
  const std::int64_t launch = launch_of_claim(claim_.load());
  if (!try_claim(seq, kWatchdog)) return;
  fail(launch, reason);
  acknowledge(seq);
}

void Port::check_device_timeout() {
  if (words_.timed_out == nullptr) return;
  const std::uint32_t seq = __atomic_load_n(words_.timed_out, __ATOMIC_ACQUIRE);
  if (seq == 0 || newer(last_closed(), seq)) return;
  open_request(seq);  // this thread may be the first one that sees the request
  if (!is_open(claim_.load(), seq)) return;
  release(seq, "the waiting kernel reached its own deadline" + native_stacks_of(record_));
}

bool Port::check_deadlines(std::int64_t now_ns) {
  check_device_timeout();
  const std::uint32_t seq = request();
  if (seq != 0 && newer(seq, last_closed())) {
    if (watched_ != seq) {
      watched_ = seq;
      watched_since_ns_ = now_ns;
      open_request(seq);
    }
    const double waited = static_cast<double>(now_ns - watched_since_ns_) * 1e-9;
    if (waited >= limits_.answer_s) {
      // Take the native stack of the work before ending the device's wait. Afterwards the work may
      // end at any time.
      const std::string where = native_stacks_of(record_);
      release(seq,
              "no answer within " + seconds(limits_.answer_s) + "; the wait was released" + where);
    } else if (state_->failed() && worker_->stuck()) {
      release(seq, "its worker is still running an earlier step");
    }
    return true;
  }
  const std::uint32_t done = last_closed();
  if (!expecting(done)) return false;
  const double due = static_cast<double>(now_ns - due_since_ns_.load()) * 1e-9;
  const bool limited = limits_.replay_s > 0 && words_.completed == nullptr;
  if (limited && due >= limits_.replay_s && !state_->failed()) {
    fail(launch_of(done + 1), "the device did not reach this step within " +
                                  seconds(limits_.replay_s) + " of its launch");
  }
  return true;
}

void PortKeeper::reap(std::vector<PyObject*>& references) noexcept {
  port_->worker()->remove(port_.get());
  port_.reset();
  Record::reap(references);
}

}  // namespace graft::hostwork
