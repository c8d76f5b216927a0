// Interface of a grammar matcher: the state of one request in its grammar, for any backend.
//
// Invariants
// 1. Only one thread uses a matcher at any time. Calls do not print, throw or take the GIL, except
//    that calls of a matcher written in Python take the GIL.
// 2. accept() returns kNo and changes nothing if the id is illegal, has no text or is out of range,
//    or if the matcher has terminated.
// 3. fill() is not called after termination. It sets the bits at and beyond the vocabulary size
//    to 0.
// 4. distance() is an upper bound D of the number of tokens, the stop token included, after which
//    the text can be complete. If D of a state is known, it is also known for every state that
//    follows a token which fill() allows with a budget. Known values satisfy: D = 0 after
//    termination; D = 1 where a stop token is legal; in any other state some legal token leads to a
//    state with a smaller D. Calls do not change the matcher.
// 5. With a budget r, fill() writes the legal tokens that lead to a state with D <= r - 1. This row
//    is not empty if D <= r. A matcher whose distance is unknown ignores the budget.
// 6. rollback() undoes the last `tokens` accepted tokens; a stop token counts as one.
// 7. accept_all() has the same results as calls of accept() until one does not return kYes.
// 8. kFailed reports an internal error of the backend. The caller keeps the message and stops using
//    the matcher.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>

namespace graft::guide {

// Result of a call that may fail inside the backend.
enum class Outcome { kNo = 0, kYes = 1, kFailed = -1 };

// Result of fill(). kNarrowed: the row was written, and the budget has excluded at least one legal
// token from it. kFree: every token is legal, and the row was not written.
enum class Filled { kMask, kNarrowed, kFree, kFailed };

// kNoBudget is the budget of fill() without a limit. kUnknownDistance is the result of
// distance() if the matcher does not know its distance or the call fails.
constexpr int32_t kNoBudget = INT32_MAX;
constexpr int32_t kUnknownDistance = -1;

// Message of the first failure, stored without allocation.
struct ErrorText {
  char text[256] = {};

  void keep(const char* message, size_t size) noexcept {
    if (text[0] != '\0') return;
    if (size > sizeof(text) - 1) {  // truncate between UTF-8 characters
      size = sizeof(text) - 1;
      while (size > 0 && (message[size] & 0xC0) == 0x80) --size;
    }
    std::memcpy(text, message, size);
    text[size] = '\0';
  }
  void keep(const char* message) noexcept { keep(message, std::strlen(message)); }
};

// Decides whether a grammar is trusted. Although a grammar step has a time budget, it serves the
// work orders of a trusted grammar on its own thread. A work order (`Order` in slot.h) is the work
// of one slot in one step. Handing an order to a pool thread and waiting for the thread costs about
// 50 microseconds. A grammar is trusted after kProof orders that finished within the budget, and
// never again after one that did not. A grammar can therefore delay a round at most once, and the
// budget adds no cost if all grammars are trusted.
//
// There is one object per grammar, used by all threads that serve its matchers.
class OrderTiming {
 public:
  static constexpr int kProof = 32;  // work orders within the budget until a grammar is trusted

  bool trusted() const { return in_time_.load(std::memory_order_relaxed) >= kProof; }
  void note(bool in_time) {
    if (!in_time) {
      in_time_.store(INT_MIN, std::memory_order_relaxed);
    } else if (const int known = in_time_.load(std::memory_order_relaxed); known >= 0) {
      // If another thread changes the count at the same time, this increment is lost, and the
      // grammar needs one more work order until it is trusted. INT_MIN, with which the grammar is
      // never trusted, is not overwritten.
      int expected = known;
      if (known < kProof) in_time_.compare_exchange_strong(expected, known + 1);
    }
  }

 private:
  std::atomic<int> in_time_{0};
};

class NativeMatcher {
 public:
  NativeMatcher() = default;
  NativeMatcher(const NativeMatcher&) = delete;
  NativeMatcher& operator=(const NativeMatcher&) = delete;
  virtual ~NativeMatcher() = default;

  virtual Outcome accept(int32_t token, ErrorText* error) noexcept = 0;
  // Accepts tokens one after the other until one is illegal. Returns the number of accepted tokens,
  // or -1 for an internal error. Backends override it if one call for all tokens is faster.
  virtual int accept_all(const int32_t* tokens, int count, ErrorText* error) noexcept {
    for (int i = 0; i < count; ++i) {
      const Outcome outcome = accept(tokens[i], error);
      if (outcome != Outcome::kYes) return outcome == Outcome::kFailed ? -1 : i;
    }
    return count;
  }
  // `budget` is the number of tokens that may still be written: the token that the row constrains,
  // all later ones and the stop token.
  virtual Filled fill(int32_t* row, int64_t words, int32_t budget, ErrorText* error) noexcept = 0;
  virtual int32_t distance(ErrorText*) noexcept { return kUnknownDistance; }
  virtual Outcome rollback(int32_t tokens, ErrorText* error) noexcept = 0;
  virtual Outcome is_terminated(ErrorText* error) noexcept = 0;

  std::shared_ptr<OrderTiming>
      timing;  // shared by all matchers of the grammar; null: never trusted
};

// Returns the last word of a mask row that allows all token ids.
inline int32_t last_word_bits(int64_t vocab_size) {
  return static_cast<int32_t>(~0u >> (31 - (vocab_size - 1) % 32));
}

}  // namespace graft::guide
