// Race detection in global memory, between the blocks of a launch and the warps of a block. Blocks
// are ordered by fences and by words that one block writes and another one reads (PTX.md).
#include <algorithm>
#include <cstdio>

#include "races.h"

namespace softcuda {
namespace ptx {

namespace {

constexpr uint64_t kWordsPerPage = 256;
// Maximum number of pages of 1 KiB whose accesses are recorded in one launch. The records need up
// to 870 MB. Accesses of further pages are not checked.
constexpr size_t kMaxPages = 1 << 16;
// Maximum numbers of clocks that blocks publish by releases (INVARIANTS.md P12): in one word, and
// in all words of a launch. All clocks together need at most 12 MB.
constexpr size_t kMaxBlocks = 2048;
constexpr size_t kMaxClocks = 1 << 16;

uint64_t word_of(const char* storage) { return reinterpret_cast<uint64_t>(storage) / 4; }

void join_clocks(BlockClocks* to, uint32_t block, const Clocks& clocks) {
  Clocks& entry = (*to)[block];
  for (unsigned i = 0; i < kMaxWarps; ++i) entry[i] = std::max(entry[i], clocks[i]);
}

void join_clocks(BlockClocks* to, const BlockClocks& from) {
  for (const auto& item : from) join_clocks(to, item.first, item.second);
}

// Replaces a recorded access with `now`. If the same warp made both with the same clock, the record
// then stands for both: it covers the bytes of both, and is strong only if both are strong.
void replace(GlobalAccess* access, const GlobalAccess& now) {
  const bool same =
      access->clock == now.clock && access->block == now.block && access->warp == now.warp;
  const uint8_t bytes = same ? access->bytes : 0;
  const bool strong = !same || access->strong;
  *access = now;
  access->bytes = static_cast<uint8_t>(access->bytes | bytes);
  access->strong = access->strong && strong;
}

// Adds the clocks that were published in the words that the warp has read (WarpOrder::read) to the
// clocks that the warp knows. If `wide` is false, only clocks of the warp's own block are added,
// because the fence or acquire has scope .cta.
void learn(Races& races, unsigned warp, bool wide) {
  WarpOrder& order = races.orders[warp];
  for (const auto& item : order.read) {
    const bool own = (item.first & ~kOwnBlockOnly) == races.block;
    if (own) {
      for (unsigned i = 0; i < kMaxWarps; ++i) {
        races.clocks[warp][i] = std::max(races.clocks[warp][i], item.second[i]);
      }
    } else if (wide && (item.first & kOwnBlockOnly) == 0) {
      join_clocks(&order.known, item.first, item.second);
    }
  }
  if (wide) order.read.clear();
}

// Called at a fence or release. The warp's later strong writes publish WarpOrder::fenced: the
// clocks of all accesses that are ordered before the fence. Adds the clocks of the warp's own block
// and, with `wide`, the clocks of other blocks that the warp knows (WarpOrder::known).
void fence(Races& races, unsigned warp, bool wide) {
  WarpOrder& order = races.orders[warp];
  if (wide) join_clocks(&order.fenced, order.known);
  join_clocks(&order.fenced, wide ? races.block : races.block | kOwnBlockOnly, races.clocks[warp]);
  ++races.clocks[warp][warp];
}

}  // namespace

void WarpOrder::join(const WarpOrder& other) {
  if (other.empty()) return;
  join_clocks(&known, other.known);
  join_clocks(&read, other.read);
  join_clocks(&fenced, other.fenced);
}

void note_fence(Warp& w, const Instr* in) {
  Races& races = *w.block->races;
  const bool wide = (in->aux & kDeviceScope) != 0;
  learn(races, w.index, wide);
  fence(races, w.index, wide);
}

void note_strong_read(Warp& w, const Instr* in, char* const* at) {
  Block& b = *w.block;
  WarpOrder& order = b.races->orders[w.index];
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const char* storage = at[__builtin_ctz(left)];
    if (storage != nullptr) join_clocks(&order.read, b.launch->races->published(storage));
  }
  if ((in->aux & kAcquire) != 0) learn(*b.races, w.index, (in->aux & kDeviceScope) != 0);
}

bool note_global(Warp& w, const Instr* in, unsigned lane, uint64_t address, char* storage,
                 unsigned bytes, bool write) {
  Block& b = *w.block;
  GlobalRaces& global = *b.launch->races;
  if (write && (in->aux & kStrong) != 0) {
    // The clocks are published before the value is stored, so that no block reads the value without
    // the clocks.
    if ((in->aux & kRelease) != 0) fence(*b.races, w.index, (in->aux & kDeviceScope) != 0);
    const BlockClocks& fenced = b.races->orders[w.index].fenced;
    if (!fenced.empty()) global.publish(storage, fenced);
  }
  const std::string text = global.note(w, in, storage, bytes, write);
  if (text.empty()) return true;
  b.fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in,
         "race in global memory at " + hex(address) + ": " + text);
  return false;
}

// ---- accesses to words of memory ----------------------------------------------------------------

GlobalRaces::~GlobalRaces() {
  if (unchecked_ == 0) return;
  const std::string why =
      overflowed_ ? "more than " + std::to_string(kMaxBlocks) + " blocks published in a word, or " +
                        std::to_string(kMaxClocks) + " in all words"
                  : "the launch accesses more than " +
                        std::to_string(kMaxPages * kWordsPerPage * 4 >> 20) + " MB";
  std::fprintf(stderr,
               "softcuda: race detection did not check %llu accesses of kernel '%s' to global "
               "memory: %s\n",
               static_cast<unsigned long long>(unchecked_), kernel_.name.c_str(), why.c_str());
}

BlockClocks GlobalRaces::published(const char* storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = published_.find(word_of(storage));
  return found == published_.end() ? BlockClocks() : found->second;
}

void GlobalRaces::publish(const char* storage, const BlockClocks& clocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  // A word keeps all clocks that were ever published in it, also after a later store has replaced
  // the released value. A strong read of the later value therefore counts as a read of the released
  // one, which hides races but never reports false ones.
  if (overflowed_) return;
  BlockClocks& word = published_[word_of(storage)];
  clocks_ -= word.size();
  join_clocks(&word, clocks);
  clocks_ += word.size();
  if (word.size() <= kMaxBlocks && clocks_ <= kMaxClocks) return;
  overflowed_ = true;
  published_.clear();
  pages_.clear();
}

GlobalRaces::Word* GlobalRaces::find(uint64_t word) {
  auto found = pages_.find(word / kWordsPerPage);
  if (found == pages_.end()) {
    if (pages_.size() >= kMaxPages) return nullptr;
    found = pages_.emplace(word / kWordsPerPage, std::make_unique<Page>()).first;
  }
  return &found->second->words[word % kWordsPerPage];
}

// If the access `now` races with the earlier access `then`, returns the text of the race; returns
// "" if the accesses are ordered or do not conflict. `write` and `wrote` say whether `now` and
// `then` write.
std::string GlobalRaces::conflict(const Warp& w, const GlobalAccess& now, const GlobalAccess& then,
                                  bool write, bool wrote) const {
  if (then.clock == 0 || (then.bytes & now.bytes) == 0) return "";
  const Races& races = *w.block->races;
  const bool own = then.block == now.block;
  if (then.strong && now.strong && (own || (then.wide && now.wide))) return "";
  if (own) {
    if (then.warp == now.warp || races.clocks[w.index][then.warp] >= then.clock) return "";
  } else {
    const BlockClocks& known = races.orders[w.index].known;
    const auto found = known.find(then.block);
    if (found != known.end() && found->second[then.warp] >= then.clock) return "";
  }
  const softcuda_dim3 grid = w.block->work->grid;
  const std::string block = "(" + std::to_string(then.block % grid.x) + "," +
                            std::to_string(then.block / grid.x % grid.y) + "," +
                            std::to_string(then.block / grid.x / grid.y) + ")";
  std::string text = std::string("this ") + (write ? "write" : "read") + " conflicts with a " +
                     (wrote ? "write" : "read") + " of block " + block + " warp " +
                     std::to_string(then.warp) + " at " +
                     kernel_.where(kernel_.code.data() + then.instruction);
  if (then.strong && now.strong) return text + ", and an atomic access has only scope .cta";
  return text + (own ? " without a barrier between them"
                     : ", and no synchronization orders the two blocks");
}

std::string GlobalRaces::non_coherent(const Instr* in, Word& word, bool write) const {
  const auto place = [this](int64_t i) { return kernel_.where(kernel_.code.data() + i); };
  if (write && word.non_coherent >= 0) {
    return "this launch has read the word with ld.nc at " + place(word.non_coherent);
  }
  if (write || (in->aux & kNonCoherent) == 0) return "";
  word.non_coherent = static_cast<int32_t>(in - kernel_.code.data());
  if (word.write.clock == 0) return "";
  return "ld.nc of a word that this launch has written at " + place(word.write.instruction);
}

std::string GlobalRaces::note(const Warp& w, const Instr* in, char* storage, unsigned bytes,
                              bool write) {
  const Races& races = *w.block->races;
  GlobalAccess now;
  now.block = races.block;
  now.clock = races.clocks[w.index][w.index];
  now.instruction = static_cast<uint32_t>(in - kernel_.code.data());
  now.warp = static_cast<uint8_t>(w.index);
  now.strong = (in->aux & kStrong) != 0;
  now.wide = (in->aux & kDeviceScope) != 0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (overflowed_) {
    ++unchecked_;
    return "";
  }
  const auto first = reinterpret_cast<uint64_t>(storage);
  for (uint64_t word = first / 4; word <= (first + bytes - 1) / 4; ++word) {
    Word* x = find(word);
    if (x == nullptr) {
      ++unchecked_;
      return "";
    }
    const uint64_t from = std::max(first, word * 4) - word * 4;
    const uint64_t to = std::min(first + bytes, word * 4 + 4) - word * 4;
    now.bytes = static_cast<uint8_t>((1u << to) - (1u << from));
    std::string text = non_coherent(in, *x, write);
    if (text.empty()) text = conflict(w, now, x->write, write, true);
    for (const GlobalAccess& reader : x->readers) {
      if (write && text.empty()) text = conflict(w, now, reader, write, false);
    }
    if (!text.empty()) return text;
    if (write) {
      replace(&x->write, now);
    } else {
      GlobalAccess& first_reader = x->readers[0];
      const bool use_first = first_reader.clock == 0 ||
                             (first_reader.block == now.block && first_reader.warp == now.warp);
      replace(use_first ? &first_reader : &x->readers[1], now);
    }
  }
  return "";
}

}  // namespace ptx
}  // namespace softcuda
