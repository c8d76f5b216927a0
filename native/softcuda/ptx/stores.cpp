// Buffers of weak stores. A store moves from the buffer of its warp to the buffer of the block,
// from there to the buffer of the device if it is a store to host memory, and then to memory.
#include "stores.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "launch_state.h"

namespace softcuda {
namespace ptx {

namespace {

// Maximum number of buffered words per warp, per block, and of all ended blocks of a launch.
constexpr size_t kWarpWords = 64;
constexpr size_t kBlockWords = 1024;
constexpr size_t kPendingWords = 1 << 16;

// The mutexes of buffers that the thread's WriteLock objects hold: at most two, that of a launch's
// buffer and that of the device's buffer. If memory is freed while buffered words are written to
// it, the fault leaves the kernel by a jump that runs no destructors. unlock_stores() then releases
// these mutexes.
thread_local std::mutex* t_locked[2] = {};

class WriteLock {
 public:
  explicit WriteLock(std::mutex& mutex) : held_(t_locked[0] == nullptr ? t_locked : t_locked + 1) {
    mutex.lock();
    *held_ = &mutex;
  }
  ~WriteLock() { std::exchange(*held_, nullptr)->unlock(); }
  WriteLock(const WriteLock&) = delete;
  WriteLock& operator=(const WriteLock&) = delete;

 private:
  std::mutex** const held_;
};

// The buffer of stores to host memory that are visible to all blocks of the device, but not yet to
// the host.
struct DeviceStores {
  std::mutex mutex;
  StoreBuffer words;
  std::vector<std::shared_ptr<Memory>> owners;
  std::atomic<bool> used{false};  // whether `words` may contain words
};
DeviceStores& device_stores() {
  static DeviceStores& stores = *new DeviceStores;
  return stores;
}

bool host_can_read(const Memory* memory) { return memory->host_readable != 0; }

uint64_t word_at(const char* storage) { return reinterpret_cast<uint64_t>(storage) / 8; }

template <class T>
void write_part(char* to, const StoredWord& w, unsigned offset) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char*>(&w.value) + offset, sizeof value);
  __atomic_store_n(reinterpret_cast<T*>(to + offset), value, __ATOMIC_RELAXED);
}

// Writes the stored bytes of a word to memory, with as few aligned atomic stores as possible.
void write_word(uint64_t word, const StoredWord& w) {
  if (!w.owner->live()) return;
  char* to = reinterpret_cast<char*>(word * 8);
  if (w.mask == 0xff) return write_part<uint64_t>(to, w, 0);
  for (unsigned i = 0; i < 8;) {
    const unsigned left = w.mask >> i;
    if (i % 4 == 0 && (left & 15) == 15) {
      write_part<uint32_t>(to, w, i);
      i += 4;
    } else if (i % 2 == 0 && (left & 3) == 3) {
      write_part<uint16_t>(to, w, i);
      i += 2;
    } else {
      if ((left & 1) != 0) write_part<uint8_t>(to, w, i);
      ++i;
    }
  }
}

void keep_owners(const std::vector<std::shared_ptr<Memory>>& from,
                 std::vector<std::shared_ptr<Memory>>* to) {
  for (const auto& owner : from) {
    if (std::find(to->begin(), to->end(), owner) == to->end()) to->push_back(owner);
  }
}

// Makes a word of the device's buffer visible to the host.
void flush_device_word(uint64_t word) {
  DeviceStores& device = device_stores();
  if (!device.used.load(std::memory_order_acquire)) return;
  const WriteLock lock(device.mutex);
  StoredWord bytes;
  if (device.words.take(word, &bytes)) write_word(word, bytes);
}

void flush_device() {
  DeviceStores& device = device_stores();
  if (!device.used.load(std::memory_order_acquire)) return;
  const WriteLock lock(device.mutex);
  for (const auto& item : device.words.take_all()) write_word(item.first, item.second);
  device.owners.clear();
  device.used.store(false, std::memory_order_release);
}

// Called after a stored word has left the buffers of its block.
void note_left_block(BlockStores& stores, uint64_t word, const StoredWord& bytes) {
  if (!host_can_read(bytes.owner)) return;
  stores.loads.forget(word);
  count_host_change();
}

// Makes a word visible everywhere. Its older values become visible first.
void flush_word(Warp& w, uint64_t word) {
  BlockStores& stores = *w.block->stores;
  flush_device_word(word);
  for (StoreBuffer* buffer : {&stores.block, &stores.warps[w.index]}) {
    StoredWord bytes;
    if (!buffer->take(word, &bytes)) continue;
    write_word(word, bytes);
    note_left_block(stores, word, bytes);
  }
}

// Makes the stores of a warp, and those stores of its block that it may have read, visible in
// `scope`, which has the same meaning as for publish_stores().
void publish(Warp& w, uint32_t scope) {
  Block& b = *w.block;
  BlockStores& stores = *b.stores;
  for (const auto& item : stores.warps[w.index].take_all()) {
    stores.block.put(item.first, item.second);
  }
  if ((scope & kDeviceScope) != 0 && !stores.block.empty()) {
    DeviceStores& device = device_stores();
    const WriteLock lock(device.mutex);
    for (const auto& item : stores.block.take_all()) {
      if (host_can_read(item.second.owner)) {
        device.words.put(item.first, item.second);
      } else {
        write_word(item.first, item.second);
      }
      note_left_block(stores, item.first, item.second);
    }
    if (!device.words.empty()) {
      keep_owners(b.owners, &device.owners);
      device.used.store(true, std::memory_order_release);
    }
  }
  if ((scope & kSystemScope) != 0) flush_device();
}

// Returns whether the store buffer of the warp, of its block or of the device contains stores to
// host memory, which the host does not see yet.
bool host_words_wait(Warp& w) {
  const BlockStores& stores = *w.block->stores;
  return stores.warps[w.index].has_host_memory() || stores.block.has_host_memory() ||
         device_stores().used.load(std::memory_order_acquire);
}

const Memory* owner_of(const Block& b, const char* storage) {
  for (const auto& owner : b.owners) {
    if (storage >= owner->storage && storage < owner->storage + owner->size) return owner.get();
  }
  return nullptr;
}

// Whether an address is in global memory, not in memory of the block.
bool is_global(const Block& b, const char* p) {
  const size_t local = size_t{b.kernel->local_bytes} * b.warps.size() * kLanes;
  return (p < b.shared || p >= b.shared + b.shared_end) && (p < b.local || p >= b.local + local) &&
         (p < b.params || p >= b.params + b.kernel->param_bytes);
}

void flush_pending(PendingStores& pending, uint64_t random) {
  const auto words = pending.words.take_all();
  size_t hosts = 0;
  for (const auto& item : words) hosts += host_can_read(item.second.owner) ? 1 : 0;
  // The kernel had no fence between these stores, so the host may see some of them and not others.
  // A random pause between two words makes this likely.
  size_t pause = hosts > 1 && random % 4 == 0 ? 1 + random / 4 % (hosts - 1) : 0;
  for (const auto& item : words) {
    flush_device_word(item.first);
    write_word(item.first, item.second);
    if (pause != 0 && host_can_read(item.second.owner) && --pause == 0) usleep(100);
  }
  if (hosts != 0) count_host_change();
  pending.owners.clear();
}

}  // namespace

// ---- buffers ------------------------------------------------------------------------------------

void StoreBuffer::put(uint64_t word, const StoredWord& bytes) {
  StoredWord& to = words_[word];
  for (unsigned i = 0; i < 8; ++i) {
    if ((bytes.mask >> i & 1) == 0) continue;
    const uint64_t byte = uint64_t{0xff} << 8 * i;
    to.value = (to.value & ~byte) | (bytes.value & byte);
  }
  to.mask |= bytes.mask;
  to.owner = bytes.owner;
}

bool StoreBuffer::read(const char* storage, unsigned bytes, char* out) const {
  if (words_.empty()) return false;
  bool any = false;
  for (uint64_t word = word_at(storage); word <= word_at(storage + bytes - 1); ++word) {
    const auto found = words_.find(word);
    if (found == words_.end()) continue;
    for (unsigned i = 0; i < 8; ++i) {
      const char* at = reinterpret_cast<const char*>(word * 8 + i);
      if ((found->second.mask >> i & 1) == 0 || at < storage || at >= storage + bytes) continue;
      out[at - storage] = static_cast<char>(found->second.value >> 8 * i);
      any = true;
    }
  }
  return any;
}

bool StoreBuffer::take(uint64_t word, StoredWord* out) {
  const auto found = words_.find(word);
  if (found == words_.end()) return false;
  *out = found->second;
  words_.erase(found);
  return true;
}

bool StoreBuffer::random_word(uint64_t random, uint64_t* word) const {
  if (words_.empty()) return false;
  size_t bucket = random % words_.bucket_count();
  while (words_.bucket_size(bucket) == 0) bucket = (bucket + 1) % words_.bucket_count();
  *word = words_.begin(bucket)->first;
  return true;
}

bool StoreBuffer::has_host_memory() const {
  return std::any_of(words_.begin(), words_.end(),
                     [](const auto& item) { return host_can_read(item.second.owner); });
}

std::unordered_map<uint64_t, StoredWord> StoreBuffer::take_all() {
  std::unordered_map<uint64_t, StoredWord> words;
  words.swap(words_);
  return words;
}

void load_host_words(uint64_t first, unsigned count, uint64_t* out) {
  const auto* from = reinterpret_cast<const uint64_t*>(first * 8);
  DeviceStores& device = device_stores();
  const WriteLock lock(device.mutex);
  for (unsigned i = 0; i < count; ++i) out[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
  device.words.read(reinterpret_cast<const char*>(from), count * 8, reinterpret_cast<char*>(out));
}

// ---- accesses -----------------------------------------------------------------------------------

void begin_block_stores(Block& b) {
  b.stores = nullptr;
  if (!b.adversarial) return;
  static thread_local BlockStores& stores = *new BlockStores;
  for (StoreBuffer& warp : stores.warps) warp.clear();
  stores.block.clear();
  stores.loads.clear();
  stores.delay = false;
  b.stores = &stores;
}

void end_block_stores(Block& b) {
  if (b.stores == nullptr) return;
  for (Warp& w : b.warps) publish_stores(w, 0);
  if (b.stores->block.empty()) return;
  PendingStores& pending = *b.launch->pending;
  const WriteLock lock(pending.mutex);
  for (const auto& item : b.stores->block.take_all()) pending.words.put(item.first, item.second);
  keep_owners(b.owners, &pending.owners);
  if (pending.words.size() > kPendingWords) flush_pending(pending, 0);
}

void unlock_stores() {
  for (std::mutex*& mutex : t_locked) {
    if (mutex != nullptr) std::exchange(mutex, nullptr)->unlock();
  }
}

void end_launch_stores(LaunchState& launch) {
  if (launch.pending == nullptr) return;
  flush_device();
  const WriteLock lock(launch.pending->mutex);
  static thread_local uint64_t random = options().seed;
  flush_pending(*launch.pending, random = random * 6364136223846793005u + 1442695040888963407u);
}

void publish_stores(Warp& w, uint32_t scope) {
  if (w.block->stores != nullptr) publish(w, scope);
}

void order_accesses(Warp& w, const Instr* in, char* storage, unsigned bytes, bool write) {
  if ((in->aux & kBuffered) != 0) return;
  HostLoads& loads = w.block->stores->loads;
  if (w.block->sites[in->site].host) loads.load_around(storage);
  for (uint64_t word = word_at(storage); word <= word_at(storage + bytes - 1); ++word) {
    flush_word(w, word);
    loads.forget(word);
  }
  if (!write || (in->aux & kStrong) == 0) return;
  const Memory* owner = owner_of(*w.block, storage);
  if (owner == nullptr || !host_can_read(owner) || !host_words_wait(w)) return;
  // The host may see this store before the earlier ones. age_stores() pauses, so that a host that
  // polls this word has time to read memory that the earlier stores have not reached.
  w.block->stores->delay = true;
  yield_turn(w);
}

void age_stores(Warp& w) {
  Block& b = *w.block;
  BlockStores& stores = *b.stores;
  const uint64_t random = b.next_random();
  if (stores.delay) {
    stores.delay = false;
    if (random % 2 == 0) usleep(50 + random / 2 % 500);
  }
  // In 1 of 1,024 turns, random words become visible, so that no store stays in a buffer forever.
  if ((random >> 8 & 1023) != 0) return;
  uint64_t word = 0;
  if (stores.warps[w.index].random_word(random >> 20, &word)) flush_word(w, word);
  if (stores.block.random_word(random >> 28, &word)) flush_word(w, word);
  if ((random >> 18 & 3) != 0) return;
  flush_device();
  PendingStores& pending = *b.launch->pending;
  const WriteLock lock(pending.mutex);
  flush_pending(pending, 0);
}

void forward_stores(Warp& w, const Instr* in, char** at, unsigned bytes) {
  Block& b = *w.block;
  BlockStores& stores = *b.stores;
  const StoreBuffer& own = stores.warps[w.index];
  const bool unused =
      own.empty() && stores.block.empty() && !device_stores().used.load(std::memory_order_acquire);
  if (unused && !b.sites[in->site].host) return;
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    if (!is_global(b, at[lane])) continue;
    char* to = stores.values[lane];
    const Memory* owner = owner_of(b, at[lane]);
    bool any = owner != nullptr && host_can_read(owner);
    if (any) {
      stores.loads.read(at[lane], bytes, to);
    } else {
      std::memcpy(to, at[lane], bytes);
    }
    any = stores.block.read(at[lane], bytes, to) || any;
    any = own.read(at[lane], bytes, to) || any;
    if (any) at[lane] = to;
  }
}

void acquire_loads(Warp& w, uint32_t scope) {
  if (w.block->stores != nullptr) w.block->stores->loads.acquire(scope);
}

void begin_stores(Warp& w, char** at) {
  BlockStores& stores = *w.block->stores;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const bool buffered = (w.mask >> lane & 1) != 0 && is_global(*w.block, at[lane]);
    stores.targets[lane] = buffered ? at[lane] : nullptr;
    if (buffered) at[lane] = stores.values[lane];
  }
}

void end_stores(Warp& w, unsigned bytes) {
  Block& b = *w.block;
  BlockStores& stores = *b.stores;
  StoreBuffer& own = stores.warps[w.index];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const char* to = stores.targets[lane];
    if (to == nullptr) continue;
    const Memory* owner = owner_of(b, to);
    for (unsigned done = 0; done < bytes;) {
      const auto offset = static_cast<unsigned>(reinterpret_cast<uint64_t>(to + done) % 8);
      const unsigned part = std::min(8 - offset, bytes - done);
      StoredWord word;
      std::memcpy(reinterpret_cast<char*>(&word.value) + offset, stores.values[lane] + done, part);
      word.mask = static_cast<uint8_t>(((1u << part) - 1) << offset);
      word.owner = owner;
      own.put(word_at(to + done), word);
      done += part;
    }
  }
  uint64_t word = 0;
  while (own.size() > kWarpWords && own.random_word(b.next_random(), &word)) flush_word(w, word);
  while (stores.block.size() > kBlockWords && stores.block.random_word(b.next_random(), &word)) {
    flush_word(w, word);
  }
}

}  // namespace ptx
}  // namespace softcuda
