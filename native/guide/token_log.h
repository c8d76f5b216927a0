// The tokens a slot has committed, from which its matcher can be rebuilt.
//
// 1. The worker appends and clears; it never allocates: reserve() is called beforehand by the
//    publishing thread, for more tokens than the replays in flight can commit.
// 2. Any thread may read: chunks are never moved or freed before the log dies, and `size` is stored
//    with release order after the token. A restart makes `version_` odd, changes owner and size,
//    and makes it even again: a reader that saw it odd, or changed, reads again. So nobody gets one
//    owner's tokens under another's name.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace graft::guide {

class TokenLog {
 public:
  static constexpr int64_t kChunk = 4096;
  static constexpr int64_t kChunks = 512;  // two million tokens

  ~TokenLog() {
    for (auto& chunk : chunks_) delete[] chunk.load();
  }

  // Room for `more` tokens past the present size. False when the log cannot grow that far.
  bool reserve(int64_t more) {
    const int64_t needed = (size_.load(std::memory_order_acquire) + more + kChunk - 1) / kChunk;
    if (needed > kChunks) return false;
    for (int64_t i = 0; i < needed; ++i) {
      std::atomic<Token*>& chunk = chunks_[static_cast<size_t>(i)];
      if (chunk.load(std::memory_order_relaxed) == nullptr) {
        chunk.store(new Token[kChunk], std::memory_order_release);
      }
    }
    return true;
  }

  void restart(int32_t owner) {
    version_.fetch_add(1, std::memory_order_acq_rel);
    size_.store(0, std::memory_order_release);
    owner_.store(owner, std::memory_order_release);
    version_.fetch_add(1, std::memory_order_release);
  }

  // False when nothing was reserved: the log then no longer equals the matcher.
  bool append(int32_t token) {
    const int64_t size = size_.load(std::memory_order_relaxed);
    if (size >= kChunk * kChunks) return false;
    Token* chunk = chunks_[static_cast<size_t>(size / kChunk)].load(std::memory_order_acquire);
    if (chunk == nullptr) return false;
    chunk[size % kChunk].store(token, std::memory_order_release);
    size_.store(size + 1, std::memory_order_release);
    return true;
  }

  std::vector<int32_t> read(int32_t* owner) const {
    std::vector<int32_t> tokens;
    for (;;) {
      const uint64_t version = version_.load(std::memory_order_acquire);
      *owner = owner_.load(std::memory_order_acquire);
      tokens.clear();
      const int64_t size = size_.load(std::memory_order_acquire);
      for (int64_t i = 0; i < size; ++i) {
        const Token* chunk = chunks_[static_cast<size_t>(i / kChunk)].load();
        tokens.push_back(chunk[i % kChunk].load(std::memory_order_acquire));
      }
      if (version % 2 == 0 && version == version_.load(std::memory_order_acquire)) return tokens;
    }
  }

 private:
  // A reader that sees a new owner's token sees the restart before it as well, and reads again.
  using Token = std::atomic<int32_t>;

  std::array<std::atomic<Token*>, kChunks> chunks_{};
  std::atomic<int64_t> size_{0};
  std::atomic<int32_t> owner_{0};
  std::atomic<uint64_t> version_{0};
};

}  // namespace graft::guide
