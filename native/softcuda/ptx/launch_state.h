// State of one launch, shared by the workers that run its blocks. It contains the memory accesses
// of this launch and of the launches before it that may still run (programmatic edges,
// INVARIANTS.md P13), and the records from which races between blocks are detected (INVARIANTS.md
// P12).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "counts.h"

namespace softcuda {
namespace ptx {

class GlobalRaces;
struct PendingStores;

// The words of global memory that a launch has read and written.
class AccessLog : public softcuda_ptx_log {
 public:
  explicit AccessLog(std::string kernel) : kernel_(std::move(kernel)) {}
  void add(const char* storage, unsigned bytes, bool write);
  // writes() returns whether the launch has written a word of the range, and accesses() whether it
  // has read or written one. Both are valid only after the launch has completed.
  bool writes(const char* storage, unsigned bytes) const;
  bool accesses(const char* storage, unsigned bytes) const;
  const std::string& kernel() const { return kernel_; }

 private:
  // Accesses to 2 KiB of memory, one bit per word. Pages are found by storage address / 2048.
  struct Page {
    uint64_t read[8] = {};
    uint64_t written[8] = {};
  };
  template <class Test>
  bool any_word(const char* storage, unsigned bytes, const Test& test) const;

  std::string kernel_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Page> pages_;
};

struct LaunchState : softcuda_ptx_launch {
  LaunchState();
  ~LaunchState();
  // Log of this launch's accesses; null if no kernel can follow over a programmatic edge.
  AccessLog* log = nullptr;
  // The accesses of the kernels that precede this one over programmatic edges. These kernels may
  // still run before griddepcontrol.wait.
  std::vector<const AccessLog*> unordered;
  std::unique_ptr<GlobalRaces> races;      // null: race detection is off
  std::unique_ptr<PendingStores> pending;  // null: SOFTCUDA_PTX_SEED is not set
  std::unique_ptr<LaunchCounts> counts;    // null: SOFTCUDA_COUNT is not set
};

}  // namespace ptx
}  // namespace softcuda
