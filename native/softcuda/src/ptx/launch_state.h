// State of a launch that the workers running its blocks share: the writes of kernels that are
// connected by programmatic edges (invariant P13), and race detection between blocks (P12).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace softcuda {
namespace ptx {

class GlobalRaces;
struct PendingStores;

// The words of global memory that a launch has written.
class WriteLog {
 public:
  explicit WriteLog(std::string kernel) : kernel_(std::move(kernel)) {}
  void add(const char* storage, unsigned bytes);
  // Only valid after the launch has completed.
  bool contains(const char* storage, unsigned bytes) const;
  const std::string& kernel() const { return kernel_; }
  std::atomic<bool> known{false};  // see is_known()

 private:
  // One bit per word of 2 KiB, by the storage address divided by 2048.
  struct Page {
    uint64_t bits[8] = {};
  };
  std::string kernel_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Page> pages_;
};

struct LaunchState {
  LaunchState();
  ~LaunchState();
  // Null unless a kernel follows over a programmatic edge.
  std::shared_ptr<WriteLog> log;
  // The writes of the kernels that precede this one over programmatic edges. They are not visible
  // before griddepcontrol.wait.
  std::vector<std::shared_ptr<const WriteLog>> unordered;
  std::unique_ptr<GlobalRaces> races;      // null: race detection is off
  std::unique_ptr<PendingStores> pending;  // null: there is no seed
};

}  // namespace ptx
}  // namespace softcuda
