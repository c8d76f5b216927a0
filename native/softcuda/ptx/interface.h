// The interface between the soft device and the PTX library. The two may be built by different
// compilers, and a library that was built earlier may still be in a cache. The interface therefore
// has plain C layouts only, no exception crosses it, and the device checks SOFTCUDA_PTX_ABI when it
// loads the library. Increment SOFTCUDA_PTX_ABI with every change of a layout or of its meaning.
#pragma once

#include <cstddef>

#include "softcuda_abi.h"
#include "softcuda_errors.h"

#define SOFTCUDA_PTX_ABI 1u

extern "C" {

// An allocation that device code accesses.
struct softcuda_memory {
  void* reference;             // keeps the allocation until it is passed to release()
  unsigned long long address;  // the first address, as the device code sees it
  char* storage;               // the host memory behind `address`
  size_t size;
  int host_readable;  // whether host code may read `storage`
};

// Functions of the soft device that the PTX library calls.
struct softcuda_ptx_device {
  unsigned workers;  // number of worker threads
  // Reports a fault of device code, which becomes the sticky error.
  void (*fault)(int code, const char* text);
  // CU_LIMIT_STACK_SIZE: bytes per thread for recursive calls.
  size_t (*stack_limit)();
  // Finds the allocation that contains an address range. Returns 0 if device code may not access
  // all of the range. Otherwise, `out` receives a reference.
  int (*find_memory)(unsigned long long address, size_t bytes, softcuda_memory* out);
  // Explains why find_memory() failed. The explanation in `text` is appended to the error text
  // "illegal read at 0x...". `out` receives the address and size of the allocation that was
  // probably meant, or the size 0.
  void (*explain)(unsigned long long address, size_t bytes, softcuda_memory* out, char* text,
                  size_t text_size);
  int (*is_live)(const void* reference);  // whether the memory has not been freed
  void (*release)(void* reference);
  // Allocates memory for the variables of a module, with a reference that free_variables() drops.
  // Returns an error code.
  int (*allocate_variables)(size_t bytes, softcuda_memory* out);
  void (*free_variables)(void* reference);
  // Whether the value is a handle of a conditional node: the address of a softcuda_condition.
  int (*is_condition)(unsigned long long handle);
};

// A kernel of a module. The library derives a structure from it that also has the instructions.
struct softcuda_ptx_kernel {
  softcuda_entry entry;     // `run` is null
  unsigned shared_bytes;    // bytes of static shared memory
  unsigned waits_for_grid;  // whether the PTX target has griddepcontrol.wait (sm_90 or later)
};

struct softcuda_ptx_variable {
  const char* name;
  unsigned long long address;
  size_t bytes;
};

// The result of load(). If `error` is not 0, `text` describes the error and the module is empty.
struct softcuda_ptx_module {
  int error;
  const char* text;
  unsigned kernel_count;
  const softcuda_ptx_kernel* const* kernels;
  unsigned variable_count;
  const softcuda_ptx_variable* variables;
};

// A launch of a kernel.
struct softcuda_ptx_work {
  const softcuda_ptx_kernel* kernel;
  softcuda_dim3 grid, block;
  unsigned shared_bytes;   // bytes of dynamic shared memory
  const char* parameters;  // the caller's parameter bytes
};

// The library derives structures from these two. softcuda_ptx_log: the words of global memory that
// a kernel has read and written. softcuda_ptx_launch: the state of a launch, which is shared by the
// workers that run its blocks.
struct softcuda_ptx_log {};
struct softcuda_ptx_launch {};

// The functions of the PTX library. The library exports this structure as `softcuda_ptx_library_v`.
// open() must be called once, before all other functions.
struct softcuda_ptx_library {
  unsigned abi;
  void (*open)(const softcuda_ptx_device* device);
  // Parses and links PTX texts. The caller passes the result to free_module(), also after an error.
  const softcuda_ptx_module* (*load)(const char* const* texts, const size_t* sizes, unsigned count);
  // Only checks the syntax of a text. The module of the result is empty.
  const softcuda_ptx_module* (*check_syntax)(const char* text, size_t size);
  void (*free_module)(const softcuda_ptx_module* module);
  // Whether accesses to memory are checked or counted: SOFTCUDA_RACECHECK, SOFTCUDA_PTX_SEED or
  // SOFTCUDA_COUNT is set. If not, logs and launch states are not needed.
  int (*checks_accesses)();
  softcuda_ptx_log* (*make_log)(const softcuda_ptx_kernel* kernel);
  void (*free_log)(softcuda_ptx_log* log);
  // Begins a launch before its first block runs. The launch's accesses are added to `log`, which
  // may be null. `preceding` are the logs of kernels that, on a GPU, could still run until this
  // kernel executes griddepcontrol.wait. The caller keeps all logs until end_launch(), which it
  // calls after the last block.
  softcuda_ptx_launch* (*begin_launch)(const softcuda_ptx_kernel* kernel, softcuda_ptx_log* log,
                                       softcuda_ptx_log* const* preceding, unsigned count);
  void (*end_launch)(softcuda_ptx_launch* launch);
  // Runs the blocks [first, last) of a launch on a worker. `launch` is null if accesses are not
  // checked. Returns 0 after a fault.
  int (*run_blocks)(const softcuda_ptx_work* work, softcuda_ptx_launch* launch, unsigned worker,
                    unsigned long long first, unsigned long long last);
  // Releases the mutexes that the calling thread has locked in run_blocks(). The device calls this
  // function if a signal ended run_blocks().
  void (*recover)();
};

}  // extern "C"
