// Stream memory operations: batches of waits on a memory location, writes to one, and barriers
// (invariants W1-W6).
#pragma once

#include <vector>

#include "scheduler.h"

namespace softcuda {

// One checked operation. `word` holds a reference to the allocation of the memory location.
struct Memop {
  CUstreamBatchMemOpType operation;
  Target word;
  uint64_t value = 0;
  unsigned flags = 0;
  bool wide = false;
};

// A batch. Immutable; shared by graph definitions and executables.
struct MemopWork {
  std::vector<Memop> ops;
};

std::shared_ptr<const MemopWork> make_memops(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params);

// Starts a batch. Returns true if it is complete, and false if it reached an unsatisfied wait; the
// poller then completes `op` later.
bool start_memops(Op* op);

// With SOFTCUDA_QUEUES=1 holds back an operation that becomes ready while a wait is pending, like a
// wait at the head of a single hardware queue (W4). Returns whether `op` was held back.
bool hold_behind_wait(Op* op);

}  // namespace softcuda
