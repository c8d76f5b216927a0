// One request's place in its grammar, as the worker drives it, whichever backend stands behind it.
//
// 1. A matcher is used by one thread at a time. No call prints or throws, nor takes the GIL, but
//    for those of a matcher in Python.
// 2. accept() answers kNo, and changes nothing, for any id that cannot be taken: illegal, no text,
//    out of range, or after termination.
// 3. fill() is not called after termination. Bits at and beyond the vocabulary's size are 0.
// 4. rollback() undoes the last `tokens` accepted ones; a stop token counts as one.
// 5. kFailed is an internal error of the backend: its text is kept, and the matcher is used no
// more.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>

namespace graft::guide {

// The result of a call that may fail inside a backend.
enum class Answer { kNo = 0, kYes = 1, kFailed = -1 };

// What fill() made of a row.
enum class Filled { kMask, kFree, kFailed };  // kFree: no constraint here, the row is not written

// First failure's text, kept without allocating.
struct ErrorText {
  char text[256] = {};

  void keep(const char* message, size_t size) noexcept {
    if (text[0] != '\0') return;
    if (size > sizeof(text) - 1) {  // cut between characters: Python reads it as UTF-8
      size = sizeof(text) - 1;
      while (size > 0 && (message[size] & 0xC0) == 0x80) --size;
    }
    std::memcpy(text, message, size);
    text[size] = '\0';
  }
  void keep(const char* message) noexcept { keep(message, std::strlen(message)); }
};

// Whether a grammar's work may be done by the step itself although there is a budget. Handing an
// order over and waiting for it costs some 50 microseconds. A grammar whose orders have all been in
// time is trusted after a few; the first that is not ends the trust for good. So a grammar holds a
// round up once at most, and where all are trusted a budget costs nothing.
//
// Of one grammar, noted by all threads that serve matchers of it.
class Pace {
 public:
  static constexpr int kProof = 32;  // orders in time

  bool trusted() const { return in_time_.load(std::memory_order_relaxed) >= kProof; }
  void note(bool in_time) {
    if (!in_time) {
      in_time_.store(INT_MIN, std::memory_order_relaxed);
    } else if (const int known = in_time_.load(std::memory_order_relaxed); known >= 0) {
      // a note lost to another thread's delays the trust; one of distrust is not overwritten
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

  virtual Answer accept(int32_t token, ErrorText* error) noexcept = 0;
  virtual Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept = 0;
  virtual Answer rollback(int32_t tokens, ErrorText* error) noexcept = 0;
  virtual Answer is_terminated(ErrorText* error) noexcept = 0;

  std::shared_ptr<Pace> pace;  // of its grammar, or null: never trusted
};

// Bits of a row's last word that stand for an id.
inline int32_t last_word_bits(int64_t vocab_size) {
  return static_cast<int32_t>(~0u >> (31 - (vocab_size - 1) % 32));
}

}  // namespace graft::guide
