// The ABI between kernel images and the soft device. Both sides include this file: the shim, which
// is compiled into images, and the device. It contains plain C layouts and uses no standard
// headers. Increment SOFTCUDA_ABI with every change of a layout.
#pragma once

#define SOFTCUDA_ABI 4u

extern "C" {

struct softcuda_dim3 {
  unsigned x, y, z;
};

// State of the running block and of its running thread. Each worker has its own copy of an image,
// and each copy has one such object, so access needs neither thread-local storage nor a lock.
struct softcuda_block {
  softcuda_dim3 thread_idx;
  softcuda_dim3 block_idx;
  softcuda_dim3 block_dim;
  softcuda_dim3 grid_dim;
  unsigned next;           // linear index of the next thread to start
  softcuda_dim3 next_idx;  // its threadIdx
  unsigned count;          // number of threads in the block
  unsigned current;        // linear index of the running thread
  unsigned exited;         // number of threads that have returned
  unsigned tracked;        // nonzero after a thread of this block has waited (INVARIANTS.md X2)
  void* dynamic_shared;
  unsigned dynamic_bytes;
  void* executor;  // softcuda::Executor
};

enum softcuda_warp_op : unsigned {
  SOFTCUDA_SYNCWARP,
  SOFTCUDA_SHFL_IDX,
  SOFTCUDA_SHFL_UP,
  SOFTCUDA_SHFL_DOWN,
  SOFTCUDA_SHFL_XOR,
  SOFTCUDA_BALLOT,
  SOFTCUDA_ANY,
  SOFTCUDA_ALL,
  SOFTCUDA_MATCH_ANY,
  SOFTCUDA_WARP_SUM,
  SOFTCUDA_WARP_MAX,
};

enum softcuda_barrier_op : unsigned {
  SOFTCUDA_BARRIER,
  SOFTCUDA_BARRIER_COUNT,
  SOFTCUDA_BARRIER_AND,
  SOFTCUDA_BARRIER_OR,
};

// Functions of the device that kernels call.
struct softcuda_hooks {
  int (*barrier)(softcuda_block*, unsigned op, int predicate);
  // For a shuffle, `arg` is the source lane, delta or lane mask, and `width` the number of lanes of
  // a segment.
  unsigned long long (*warp)(softcuda_block*, unsigned op, unsigned mask, unsigned long long value,
                             unsigned arg, unsigned width);
  unsigned (*active_mask)(softcuda_block*);
  void (*thread_exit)(softcuda_block*);
  void (*trap)(softcuda_block*, int code, const char* message);
  unsigned long long (*globaltimer)();
};

// Describes one kernel of an image. `sizes`, `offsets` and `is_pointer` have one element for each
// parameter.
struct softcuda_entry {
  const char* name;
  void (*run)(softcuda_block*, void** params);  // starts the remaining threads of a block
  unsigned nparams;
  unsigned max_threads;  // from __launch_bounds__; 0 if the kernel has none
  const unsigned* sizes;
  const unsigned* offsets;
  const unsigned char* is_pointer;
};

// The kernel table, which an image exports as `softcuda_image_v`.
struct softcuda_image {
  unsigned abi;
  unsigned nentries;
  const softcuda_entry* const* entries;
  softcuda_block* block;
  const softcuda_hooks** hooks;
  unsigned checks_alignment;  // nonzero if misaligned accesses raise SIGILL
};

}  // extern "C"
