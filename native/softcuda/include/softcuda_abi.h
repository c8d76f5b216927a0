// The ABI between kernel images and the soft device. Included by both sides: by the shim, which is
// compiled into images, and by the device. Plain C layouts without standard headers. Increment
// SOFTCUDA_ABI with every change of a layout.
#pragma once

#define SOFTCUDA_ABI 4u

extern "C" {

struct softcuda_dim3 {
  unsigned x, y, z;
};

// State of the block that runs, and of its running thread. There is one per image copy and one
// image copy per worker, so access needs neither thread-local storage nor a lock.
struct softcuda_block {
  softcuda_dim3 thread_idx;
  softcuda_dim3 block_idx;
  softcuda_dim3 block_dim;
  softcuda_dim3 grid_dim;
  unsigned next;  // linear index of the next thread to start
  softcuda_dim3 next_idx;
  unsigned count;    // threads in the block
  unsigned current;  // linear index of the running thread
  unsigned exited;   // threads that have returned
  unsigned tracked;  // nonzero after the first suspension of a thread of this block
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
  // `arg` is the source lane, delta or lane mask of a shuffle; `width` is its number of lanes.
  unsigned long long (*warp)(softcuda_block*, unsigned op, unsigned mask, unsigned long long value,
                             unsigned arg, unsigned width);
  unsigned (*active_mask)(softcuda_block*);
  void (*thread_exit)(softcuda_block*);
  void (*trap)(softcuda_block*, int code, const char* message);
  unsigned long long (*globaltimer)();
};

// One kernel of an image.
struct softcuda_entry {
  const char* name;
  void (*run)(softcuda_block*, void** params);  // runs threads until all have been started
  unsigned nparams;
  unsigned max_threads;  // from __launch_bounds__; 0 without it
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
  unsigned checks_alignment;  // nonzero: an illegal instruction reports a misaligned access
};

}  // extern "C"
