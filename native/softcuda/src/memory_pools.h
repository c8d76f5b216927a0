// Memory pools, and memory that is allocated and freed in stream order or by graph nodes
// (INVARIANTS.md M7 to M9).
#pragma once

#include "scheduler.h"

namespace softcuda {

// A memory pool. It holds no memory, because each allocation is mapped when it is made. The pool
// only counts: its reserved size, which attributes report, is the size of the memory that a pool of
// NVIDIA's driver would hold (INVARIANTS.md M8).
struct MemoryPool {
  void* handle = nullptr;
  MemoryKind kind = MemoryKind::device;
  int type = CU_MEM_ALLOCATION_TYPE_PINNED;
  CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  size_t max_size = 0;  // 0: no limit
  // memory_mutex() guards the following data members.
  int reuse[3] = {1, 1, 1};
  uint64_t release_threshold = 0;
  uint64_t used = 0, used_high = 0, reserved = 0, reserved_high = 0;
  // Refuses the call if the pool would exceed its limit.
  void grow(size_t bytes);
  void shrink(size_t bytes);
  // Releases reserved memory that is not used, down to `keep` bytes.
  void trim(uint64_t keep);
};

// The work of an operation that allocates or frees memory. Only an allocation node of a graph
// allocates in an operation; cuMemAllocAsync allocates before it returns.
struct MemoryWork {
  std::shared_ptr<Allocation> allocation;
  // Allocation nodes only: the caller's parameters, and the array to which they point.
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  std::vector<CUmemAccessDesc> access;
  // Allocation nodes only: releases the address range when the last graph that contains the node is
  // destroyed (INVARIANTS.md M9).
  std::shared_ptr<void> lease;
};

// State of memory that an allocation node of a graph provides. Guarded by memory_mutex().
struct GraphMemory {
  const void* graph = nullptr;  // the graph with the allocation node; never dereferenced
  // Whether the memory will be allocated when all launches and frees submitted so far have run.
  bool allocated = false;
  bool has_free_node = false;    // whether the graph itself frees the memory
  bool freed_elsewhere = false;  // whether another graph has a free node for the memory
  bool counted = false;          // whether the graph memory attributes count the memory
  bool abandoned = false;        // whether the graphs with the allocation node were destroyed
};

// Runs an operation of kind mem_alloc or mem_free.
void run_memory(const Work& work);
// Checks the parameters of an allocation node and returns the node's work, which has no allocation
// yet. attach_memory() adds it when the node is added to a graph.
std::shared_ptr<MemoryWork> make_alloc(const CUDA_MEM_ALLOC_NODE_PARAMS& params);
// Returns the work of a node that frees the allocation that starts at an address.
std::shared_ptr<MemoryWork> make_free(CUdeviceptr p);
// Called when an allocation or free node with the work `work` is added to `graph`. Allocates the
// address range of the memory, or records that the memory has a free node. The caller holds
// graph_mutex.
void attach_memory(const void* graph, const Work& work);
// Records the effects of a launch of `program` on its graph memory (INVARIANTS.md M9). Refuses the
// launch if it would allocate memory that is not freed yet or free memory that is not allocated.
void submit_graph_memory(const Program& program, bool auto_free);
// Returns the kind of memory for an allocation type and a location. Refuses unknown values.
MemoryKind kind_of(int type, const CUmemLocation& location);

inline Handles<MemoryPool>& memory_pools =
    *new Handles<MemoryPool>(0x59000000000000, "the memory pool is unknown or was destroyed");

}  // namespace softcuda
