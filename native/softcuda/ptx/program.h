// The executable form of a PTX kernel, and the state of its execution. Handlers (handlers_*.cpp)
// execute one instruction for one warp; the runner (runner.cpp) schedules warps.
//
// Registers are arrays of 32 lanes. A warp's registers lie in one buffer, and operands are byte
// offsets in it (INVARIANTS.md P1 to P3).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "interface.h"
#include "syntax.h"

namespace softcuda {
namespace ptx {

struct Block;
struct BlockStores;
struct Instr;
class LaunchCounts;
struct LaunchState;
struct Races;
struct Warp;

// The soft device that has loaded this library.
const softcuda_ptx_device& device();
std::string hex(unsigned long long value);

// An allocation of the soft device that device code has accessed.
struct Memory : softcuda_memory {
  explicit Memory(const softcuda_memory& memory) : softcuda_memory(memory) {}
  ~Memory() { device().release(reference); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  bool live() const { return device().is_live(reference) != 0; }
};

constexpr unsigned kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Executes an instruction for the active lanes of a warp and returns the next instruction.
using HandlerFunction = const Instr*(Warp& w, const Instr* in);
using Handler = HandlerFunction*;

// A decoded instruction. The meaning of the fields depends on the handler.
struct Instr {
  Handler run = nullptr;
  // The handler of the instruction itself. If the instruction has a guard predicate, `run` is
  // run_guarded(), which calls `guarded` for the lanes whose predicate is true.
  Handler guarded = nullptr;
  // Operands: byte offsets in Warp::regs or, if bit 0 (kConstant) is set, in Warp::constants. Bit 1
  // (kNegated) is set for a negated predicate.
  int32_t op[6] = {};
  int64_t imm = 0;     // offset of a memory operand, target of a branch, ...
  int32_t guard = -1;  // register of the guard predicate; -1: none
  uint32_t aux = 0;    // modifiers that the handler reads at run time
  uint32_t site = 0;   // number of the memory access in the kernel, see Block::sites
  uint16_t count = 0;  // number of vector elements, or bytes
  uint16_t kind = 0;
};

// Bits of Instr::aux in instructions that access memory and in fences.
constexpr uint32_t kWide = 1;           // the address has 64 bits
constexpr uint32_t kStrong = 2;         // atomic, volatile, relaxed, acquire or release
constexpr uint32_t kAcquire = 4;        // orders later accesses after this one
constexpr uint32_t kRelease = 8;        // orders earlier accesses before this one
constexpr uint32_t kDeviceScope = 16;   // scope .gpu or .sys
constexpr uint32_t kSystemScope = 32;   // scope .sys
constexpr uint32_t kBuffered = 64;      // a weak ld or st, which uses the store buffers
constexpr uint32_t kNonCoherent = 128;  // ld.nc, which may read from a cache of read-only data
// From this bit on, Instr::aux contains the state space, for handlers that read it at run time.
constexpr unsigned kSpaceShift = 8;

constexpr int32_t kConstant = 1;
constexpr int32_t kNegated = 2;
constexpr int32_t kNoRegister = -1;

// Base addresses of the three windows of generic addresses. A generic address minus the base of its
// window is an offset in the shared memory of the block, in the local memory of the thread or in
// the kernel's parameters. No address of global memory has these high bits.
constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
constexpr uint64_t kLocalWindow = uint64_t{2} << 56;
constexpr uint64_t kParamWindow = uint64_t{3} << 56;
// Base of the addresses of device functions: function n has the address kFunctionWindow + 16 * n.
constexpr uint64_t kFunctionWindow = uint64_t{4} << 56;
constexpr uint64_t kWindowSize = uint64_t{1} << 32;
// The first shared address. Address 0 is invalid, so that null pointers are detected.
constexpr unsigned kSharedBase = 1024;
constexpr unsigned kLocalBase = 64;

// The special registers that a kernel reads. They have slots among the registers of a warp.
enum class Special : uint8_t {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  nwarpid,
  smid,
  nsmid,
  gridid,
  lanemask_eq,
  lanemask_le,
  lanemask_lt,
  lanemask_ge,
  lanemask_gt,
  dynamic_smem_size,
  total_smem_size,
  zero,
  one,
  count_
};

// How mma.sync adds products (SOFTCUDA_PTX_MMA in PTX.md).
enum class Accumulation : uint8_t { sequential, exact, hardware };

struct Options {
  bool adversarial = false;
  uint64_t seed = 0;
  bool racecheck = false;
  Accumulation accumulation = Accumulation::sequential;
  uint64_t max_steps = 0;  // instructions per warp; 0: no limit
  std::string count_file;  // file to which the counts of launches are appended; "": none
};
const Options& options();

// Memory of a module: its .global and .const variables.
struct ModuleMemory : softcuda_memory {
  // Throws std::bad_alloc if the device has not enough memory.
  explicit ModuleMemory(size_t bytes);
  ~ModuleMemory() { device().free_variables(reference); }
  ModuleMemory(const ModuleMemory&) = delete;
  ModuleMemory& operator=(const ModuleMemory&) = delete;
};

// Classes of instructions that are counted (counts.cpp).
enum class Category : uint8_t {
  integer,
  floating,
  special,
  convert,
  compare,
  move,
  load,
  store,
  copy,
  atomic,
  warp,
  mma,
  barrier,
  fence,
  control,
  count_
};

// An instruction of a kernel whose instructions are counted.
struct CountedInstr {
  Handler run = nullptr;  // the instruction's own handler
  Category category = Category::integer;
  std::vector<int32_t> reads, writes;  // registers: offset / 4
};

// A kernel in executable form.
struct Kernel : softcuda_ptx_kernel {
  Kernel() : softcuda_ptx_kernel{} {}
  std::string name;
  unsigned target = 0;
  std::vector<Instr> code;
  // By instruction: the line in the PTX text and the location in the source.
  std::vector<unsigned> lines;
  std::vector<Location> locations;
  // If several PTX texts were linked: for each instruction, the number of its text.
  std::vector<uint16_t> texts;
  bool linked = false;  // whether several texts were linked
  // Names of source files. The key is the number of the PTX text and the number of the file in the
  // .file directives of this text.
  std::map<std::pair<unsigned, unsigned>, std::string> files;
  std::vector<std::string> text;  // by instruction: opcode, for error messages
  // The constant operands of instructions (kConstant), each with one value per lane.
  std::unique_ptr<char[]> constant_memory;
  const char* constants = nullptr;
  size_t constant_bytes = 0;
  size_t register_bytes = 0;
  std::vector<std::pair<Special, int32_t>> specials;
  unsigned local_bytes = 0;  // local memory per thread
  unsigned param_bytes = 0;
  unsigned sites = 0;
  unsigned max_threads = 0;
  std::vector<int32_t> operand_pool;
  std::vector<CountedInstr> counted;  // by instruction; empty if instructions are not counted
  // Whether the kernel has recursive calls. Such a call saves the thread's registers, which
  // `saved_registers` lists as pairs of offset and bytes per lane. A predicate has 0 bytes.
  bool recursive = false;
  std::vector<std::pair<int32_t, unsigned>> saved_registers;
  std::vector<unsigned> param_sizes, param_offsets;
  std::vector<unsigned char> param_pointers;
  std::shared_ptr<ModuleMemory> memory;
  // Describes an instruction: "PTX line 12 (scale.cu:3): add.f32".
  std::string where(const Instr* in) const;
};

// A group of lanes of a warp that are at the same instruction, which they execute next.
struct Group {
  const Instr* pc;
  uint32_t mask;
  enum State : uint8_t { ready, at_warp_sync, at_barrier } state;
  uint8_t barrier;
};

// Why run_warp() stopped executing instructions of a group.
enum class Stop : uint8_t { none, exited, warp_sync, barrier, yielded, failed };

// State of a warp. Its lanes form groups; `mask`, `why`, `barrier` and `stop` belong to the group
// that is running.
struct Warp {
  char* regs = nullptr;
  const char* constants = nullptr;
  uint32_t mask = 0;  // active lanes
  Stop why = Stop::none;
  uint8_t barrier = 0;          // barrier at which the group stopped
  const Instr* stop = nullptr;  // the group runs until it is at or after this instruction
  Block* block = nullptr;
  uint32_t exists = 0;  // lanes that have a thread; the last warp of a block may have fewer than 32
  uint32_t exited = 0;
  unsigned index = 0;  // number of the warp in the block
  unsigned group_count = 0;
  uint64_t steps = 0;  // executed instructions
  // Whether this warp has executed griddepcontrol.wait, or has passed a barrier after another warp
  // of the block executed it.
  bool waited_for_grid = false;
  Group groups[kLanes];
  uint32_t live() const { return exists & ~exited; }
};

// The address range of the allocation that an instruction accessed last (INVARIANTS.md P7).
struct Site {
  uint64_t from = 1;
  uint64_t span = 0;
  int64_t delta = 0;  // storage address minus device address
  bool host = false;  // whether the allocation is in host memory
};

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;  // 0: all threads that have not exited
  unsigned count = 0;     // arrived threads whose predicate is true
  bool used = false;
};

// A cp.async instruction that a warp has executed, but whose copies have not been made yet.
struct AsyncCopy {
  uint32_t mask;
  unsigned bytes;  // of the destination
  unsigned group;  // number of the commit group
  const Instr* in;
  uint32_t to[kLanes];
  unsigned valid[kLanes];  // bytes to copy; the rest of the destination is filled with zeros
  const char* from[kLanes];
};

// A recursive call of one thread that has not returned.
struct Frame {
  const Instr* call;
  std::vector<char> saved;  // registers, then parameter memory
};

// State of a block, which one worker executes.
struct Block {
  const Kernel* kernel = nullptr;
  const softcuda_ptx_work* work = nullptr;
  softcuda_dim3 index{};
  softcuda_dim3 size{};
  unsigned threads = 0;
  unsigned exited = 0;
  char* shared = nullptr;
  unsigned shared_end = 0;  // end of the block's shared addresses
  unsigned dynamic_bytes = 0;
  char* local = nullptr;
  const char* params = nullptr;
  std::vector<Site> sites;
  // Owners of the allocations in `sites`, because memory may be freed while a kernel runs
  // (INVARIANTS.md M5).
  std::vector<std::shared_ptr<Memory>> owners;
  Barrier barriers[16];
  std::vector<Warp> warps;
  std::vector<std::vector<AsyncCopy>> copies;  // by warp
  std::vector<unsigned> commits;               // by warp: number of committed groups
  std::vector<std::vector<Frame>> frames;      // by thread, in kernels with recursive calls
  size_t stack_limit = 0;
  std::vector<char> registers, shared_memory, local_memory;
  bool failed = false;
  bool adversarial = false;
  bool racecheck = false;
  // Whether accesses to global memory need one of the following in addition to the load or store:
  // race detection, the check against kernels that may still run (programmatic edges), counting,
  // and store buffers.
  bool checks_accesses = false;
  // Whether accesses to shared memory need race detection or counting.
  bool checks_shared = false;
  LaunchState* launch = nullptr;
  uint64_t random = 0;
  unsigned worker = 0;
  // State of race detection, see races.cpp. Null if it is off.
  Races* races = nullptr;
  // Stores that are not visible everywhere, see stores.cpp. Null without SOFTCUDA_PTX_SEED.
  BlockStores* stores = nullptr;
  LaunchCounts* counts = nullptr;  // null without SOFTCUDA_COUNT
  alignas(64) char scratch[128];   // memory that loads and stores access for inactive lanes

  // Records a fault of device code. `lane` is -1 if no single thread caused the fault.
  void fail(CUresult code, const Warp* w, int lane, const Instr* in, const std::string& text);
  uint64_t next_random() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  }
};

// Returns the host address of global memory that a lane accesses. Reports a fault and returns null
// if the `bytes` bytes at `address` are not inside one allocation.
char* resolve_global(Warp& w, const Instr* in, unsigned lane, uint64_t address, unsigned bytes,
                     bool write);
// Reports an access outside of shared, local or parameter memory.
void bad_window_access(Warp& w, const Instr* in, unsigned lane, const char* space, uint64_t address,
                       unsigned bytes, bool write);
void misaligned(Warp& w, const Instr* in, unsigned lane, uint64_t address, unsigned bytes);
// Stops the running group at a warp-synchronous operation, because lanes of its member mask have
// not arrived yet.
const Instr* wait_for_lanes(Warp& w, const Instr* in);
// Stops the running group after the current instruction, so that other warps run.
inline void yield_turn(Warp& w) {
  w.why = Stop::yielded;
  w.stop = nullptr;
}
// The lanes `lanes` arrive at a barrier of the block; those in `predicate` contribute a true
// predicate to its reduction. `threads` is the number of threads that the barrier waits for, or 0
// for all threads. With `wait`, the lanes wait until the barrier is complete.
const Instr* arrive_at_barrier(Warp& w, const Instr* in, uint32_t lanes, unsigned barrier,
                               unsigned threads, bool wait, uint32_t predicate);
// Values of Instr::kind in barrier instructions: the reduction that the barrier computes.
enum BarrierKind : uint16_t { kBarrier, kBarrierCount, kBarrierAnd, kBarrierOr };
// Records that lanes have exited, which may complete barriers.
void lanes_exited(Warp& w, uint32_t lanes);
// cp.async: queues copies of the active lanes, commits groups and waits for them (runner.cpp).
bool queue_copy(Warp& w, const AsyncCopy& copy);
void commit_copies(Warp& w);
bool land_copies(Warp& w, const Instr* in, unsigned groups_left);
// Store buffers (stores.cpp). publish_stores makes the earlier stores of a warp visible in a scope:
// 0 for the block, kDeviceScope, or kDeviceScope | kSystemScope.
void publish_stores(Warp& w, uint32_t scope);
// Lets the loads of the warp's block that follow an acquire operation of `scope` read newer values.
void acquire_loads(Warp& w, uint32_t scope);
// The next functions are called only with SOFTCUDA_PTX_SEED. `at` contains the host address of each
// active lane's access. forward_stores redirects the addresses of a load to copies that include the
// values in the buffers, and of old values of host memory (loads.h). begin_stores redirects the
// addresses of a store to temporary memory, from which end_stores moves the values to the buffer of
// the warp.
void forward_stores(Warp& w, const Instr* in, char** at, unsigned bytes);
void begin_stores(Warp& w, char** at);
void end_stores(Warp& w, unsigned bytes);
// Recursive calls (recursion.cpp). Functions are inlined, and a recursive call jumps back to the
// beginning of an inlined copy. push_frame is called at the jump, and returns false after a fault.
// pop_frame is called at the end of the copy with the number `instance`. It returns the instruction
// after the call, or null if the thread entered this copy without a recursive call.
bool push_frame(Warp& w, const Instr* in, unsigned lane);
const Instr* pop_frame(Warp& w, unsigned lane, int32_t instance);
// Race detection (races.cpp, global_races.cpp). These functions are called only if it is on.
// note_shared checks an access to shared memory and reports a race. note_strong_read is called
// after a strong read of global memory, with the host addresses that the active lanes have read.
void note_shared(Warp& w, const Instr* in, unsigned lane, uint32_t address, unsigned bytes,
                 bool write);
void note_strong_read(Warp& w, const Instr* in, char* const* at);
void note_fence(Warp& w, const Instr* in);
// Records that a thread arrives at the mbarrier object at `storage` or, if `arrives` is false, that
// it has waited until a phase of the object was complete.
void note_mbarrier(Warp& w, const char* storage, bool arrives);

}  // namespace ptx
}  // namespace softcuda
