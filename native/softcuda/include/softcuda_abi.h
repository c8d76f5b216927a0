// What a kernel image and the soft device agree on. Included by the shim (kernel side) and by the
// device; plain C layouts, no standard header. Raise SOFTCUDA_ABI with every change of layout.
#pragma once

#define SOFTCUDA_ABI 4u

extern "C" {

struct softcuda_dim3 {
  unsigned x, y, z;
};

// The running thread's view of its block. One per image copy, and one image copy per worker, so
// these are plain variables: no thread-local storage, no lock.
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
  unsigned tracked;  // nonzero once a thread of this block has been suspended
  void* dynamic_shared;
  unsigned dynamic_bytes;
  void* executor;  // the device's own
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

struct softcuda_hooks {
  int (*barrier)(softcuda_block*, unsigned op, int predicate);
  // `arg` is the source lane, delta or lane mask; `width` the sub-warp of a shuffle.
  unsigned long long (*warp)(softcuda_block*, unsigned op, unsigned mask, unsigned long long value,
                             unsigned arg, unsigned width);
  unsigned (*active_mask)(softcuda_block*);
  void (*thread_exit)(softcuda_block*);
  void (*trap)(softcuda_block*, int code, const char* message);
  unsigned long long (*globaltimer)();
};

struct softcuda_entry {
  const char* name;
  void (*run)(softcuda_block*, void** params);  // starts threads until none is left
  unsigned nparams;
  unsigned max_threads;  // __launch_bounds__, 0 = unbounded
  const unsigned* sizes;
  const unsigned* offsets;
  const unsigned char* is_pointer;
};

struct softcuda_image {
  unsigned abi;
  unsigned nentries;
  const softcuda_entry* const* entries;
  softcuda_block* block;
  const softcuda_hooks** hooks;
  unsigned checks_alignment;  // an illegal instruction is a misaligned access
};

}  // extern "C"
