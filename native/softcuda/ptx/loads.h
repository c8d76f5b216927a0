// Values of host memory that device code has loaded and may load again although the host has stored
// newer values (INVARIANTS.md P16). With SOFTCUDA_PTX_SEED, a program therefore fails if it polls
// host memory with weak loads, or reads host memory after a flag without an acquire operation.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "program.h"

namespace softcuda {
namespace ptx {

// A cache of the host memory that a block has loaded. Weak loads of the block return the cached
// values until an acquire operation of one of its warps clears the cache.
class HostLoads {
 public:
  void clear();
  // Called before each access to host memory. Loads the words around `storage`, so that later weak
  // loads of these words may read values from before this access.
  void load_around(const char* storage);
  // Copies the values of `bytes` bytes at `storage` to `out`.
  void read(const char* storage, unsigned bytes, char* out);
  // Lets the next load of a word read memory again. The key of a word is its host address divided
  // by 8.
  void forget(uint64_t word);
  // Called after an acquire operation of the given scope.
  void acquire(uint32_t scope);

 private:
  static constexpr unsigned kPageWords = 64;
  struct Page {
    uint64_t words[kPageWords];
    uint64_t loaded = 0;  // bit i is set if `words` contains the value of word i
  };
  std::unordered_map<uint64_t, Page> pages_;  // by the host address divided by the page size
  uint64_t changes_ = 0;                      // number of changes when `pages_` was empty
};

// Counts a change that other blocks may see after an acquire operation of scope .gpu: a store of
// device code to host memory, or an acquire operation of scope .sys.
void count_host_change();

}  // namespace ptx
}  // namespace softcuda
