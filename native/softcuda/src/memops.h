// Batches of memory operations: wait for a word, write a word, barriers (invariants W1-W5).
#pragma once

#include <vector>

#include "scheduler.h"

namespace softcuda {

// One checked operation; the word's allocation is held by `word`.
struct Memop {
  CUstreamBatchMemOpType operation;
  Target word;
  uint64_t value = 0;
  unsigned flags = 0;
  bool wide = false;
};

// Immutable; shared by definitions and executables.
struct MemopWork {
  std::vector<Memop> ops;
};

std::shared_ptr<const MemopWork> make_memops(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params);

// Runs a batch from its first operation. True: it is finished. False: it waits for a word, and the
// poller completes `op` later.
bool start_memops(Op* op);

// With SOFTCUDA_QUEUES=1 everything that becomes ready while a wait is pending is kept back until
// the wait is over, as behind a wait in a single hardware queue. True: `op` was kept.
bool queue_blocked(Op* op);

}  // namespace softcuda
