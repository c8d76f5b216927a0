#include "loads.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "stores.h"

namespace softcuda {
namespace ptx {

namespace {

// Maximum number of pages. A block that loads more of them may read newer values earlier.
constexpr size_t kMaxPages = 4096;

std::atomic<uint64_t> changes{0};

uint64_t word_at(const char* storage) { return reinterpret_cast<uint64_t>(storage) / 8; }

}  // namespace

void count_host_change() { changes.fetch_add(1, std::memory_order_acq_rel); }

void HostLoads::clear() {
  pages_.clear();
  changes_ = changes.load(std::memory_order_acquire);
}

void HostLoads::load_around(const char* storage) {
  const uint64_t number = word_at(storage) / kPageWords;
  if (pages_.count(number) != 0) return;
  if (pages_.size() == kMaxPages) clear();
  Page page;
  // The page lies within one page of the operating system, so all of it can be read.
  load_host_words(number * kPageWords, kPageWords, page.words);
  page.loaded = ~uint64_t{0};
  pages_[number] = page;
}

void HostLoads::read(const char* storage, unsigned bytes, char* out) {
  for (uint64_t word = word_at(storage); word <= word_at(storage + bytes - 1); ++word) {
    char* const from = reinterpret_cast<char*>(word * 8);
    load_around(from);
    Page& page = pages_[word / kPageWords];
    const unsigned i = word % kPageWords;
    if ((page.loaded >> i & 1) == 0) load_host_words(word, 1, page.words + i);
    page.loaded |= uint64_t{1} << i;
    const char* const begin = std::max<const char*>(from, storage);
    const char* const end = std::min<const char*>(from + 8, storage + bytes);
    std::memcpy(out + (begin - storage), reinterpret_cast<char*>(page.words + i) + (begin - from),
                static_cast<size_t>(end - begin));
  }
}

void HostLoads::forget(uint64_t word) {
  const auto found = pages_.find(word / kPageWords);
  if (found != pages_.end()) found->second.loaded &= ~(uint64_t{1} << word % kPageWords);
}

void HostLoads::acquire(uint32_t scope) {
  if ((scope & kSystemScope) != 0) {
    // After this operation, another block may synchronize with this one by an acquire operation of
    // scope .gpu. That operation compares the count and clears its block's cache too.
    count_host_change();
    clear();
  } else if ((scope & kDeviceScope) != 0 && changes.load(std::memory_order_acquire) != changes_) {
    clear();
  }
}

}  // namespace ptx
}  // namespace softcuda
