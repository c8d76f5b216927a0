// Counts of the instructions, memory accesses and blocks of a launch (SOFTCUDA_COUNT in PTX.md).
#pragma once

#include <array>
#include <condition_variable>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace softcuda {
namespace ptx {

// Returns the class of an instruction from its opcode.
Category category_of(const std::string& opcode);

// The counts of instructions, memory accesses and blocks of one launch. Its blocks run one after
// another in the order of their numbers. The counts of a block therefore do not depend on the
// number of workers, even in a kernel in which the block that ends last does more work.
class LaunchCounts {
 public:
  explicit LaunchCounts(const Kernel& kernel) : kernel_(kernel) {}
  // Waits until all blocks before block `first` have ended, and begins to run blocks.
  void begin_blocks(const softcuda_ptx_work& work, uint64_t first);
  // Lets the worker that waits in begin_blocks() for block `next` continue.
  void end_blocks(uint64_t next);
  void begin_block(const Block& b);
  void end_block();
  // Counts an instruction that a warp has executed. `host_loads` is the value of host_loads()
  // before the instruction.
  void note_instruction(const Warp& w, const Instr* in, uint64_t host_loads);
  // Counts an access of one lane to global memory, `bytes` bytes at the address `storage` (or to
  // shared or local memory: note_window).
  void note_global(const Instr* in, const Site& site, const char* storage, unsigned bytes,
                   bool write);
  void note_window(const Instr* in, Space space, unsigned bytes, bool write);
  // Called when the warps that wait at a barrier continue. Each warp may then read what the others
  // have stored, so the function sets Chain::base of all these warps to the greatest base or stored
  // of any of them.
  void join_at_barrier(const Block& b, unsigned barrier);
  // Number of accesses so far that have read host memory.
  uint64_t host_loads() const { return host_loads_; }
  // Appends the counts to a file as a JSON object on one line, if all blocks have ended.
  void write(const std::string& path) const;

 private:
  // Kinds of memory whose accesses are counted separately.
  enum Part : uint8_t { global, host, shared, local, parts };
  using Bytes = std::array<uint64_t, parts>;

  // The bytes of 4 KiB of memory that the launch has loaded, and those that it has stored: one bit
  // per byte. `host` says whether the memory is host memory.
  struct Page {
    bool host = false;
    uint64_t loaded[64] = {};
    uint64_t stored[64] = {};
  };

  // The chains of loads of host memory on which a warp's next instruction depends. In a chain, each
  // load needs the result of the load before it. The depth of a value is the number of loads in the
  // longest chain that the value depends on.
  struct Chain {
    std::vector<uint32_t> depth;  // by register: offset / 4
    uint32_t base = 0;            // minimum depth of all later instructions
    uint32_t loaded = 0;          // maximum depth of the values that were loaded
    uint32_t stored = 0;          // maximum depth of the values that were stored
    // By Instr::site (load instruction): the last address in host memory that was loaded, and the
    // depth of the loaded value.
    std::unordered_map<uint32_t, std::pair<const char*, uint32_t>> last;
  };

  bool add_bytes(const Instr* in, Part part, unsigned bytes, bool write);
  void find_parameters(const softcuda_ptx_work& work);
  std::map<unsigned, uint64_t> loaded_by_parameter() const;
  void touch(const char* storage, unsigned bytes, bool write, bool is_host);
  Bytes distinct(bool stored) const;

  const Kernel& kernel_;
  std::mutex mutex_;
  std::condition_variable turn_;
  uint64_t next_block_ = 0;

  softcuda_dim3 grid_{}, block_{};
  uint64_t blocks_ = 0;
  std::array<uint64_t, static_cast<size_t>(Category::count_)> instructions_{};
  Bytes loaded_{}, stored_{};
  uint64_t atomics_ = 0;
  std::unordered_map<uint64_t, uint64_t> loaded_from_;  // by address of the allocation
  std::map<unsigned, uint64_t> parameters_;  // address of the allocation to which each one points
  uint64_t block_instructions_ = 0, block_loaded_ = 0;      // of the running block
  uint64_t longest_instructions_ = 0, longest_loaded_ = 0;  // maximum over the blocks
  std::unordered_map<uint64_t, Page> pages_;                // by storage address / 4096
  uint64_t last_page_ = ~uint64_t{0};
  Page* last_ = nullptr;
  uint64_t host_loads_ = 0;
  const char* host_address_ = nullptr;  // address of the last read of host memory
  uint32_t host_chain_ = 0;
  std::vector<Chain> chains_;  // by warp of the running block
};

// The handler of all instructions of a kernel whose instructions are counted. It calls the
// instruction's own handler.
HandlerFunction count_instruction;
// Called after a signal has ended the blocks that the calling thread ran. These blocks will not be
// counted, so workers that wait until they have been counted may continue.
void abandon_counts();

}  // namespace ptx
}  // namespace softcuda
