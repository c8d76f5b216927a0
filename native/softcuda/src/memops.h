// Stream memory operations: batches of waits for a value in memory, writes of a value, and barriers
// (INVARIANTS.md W1 to W6).
#pragma once

#include <vector>

#include "scheduler.h"

namespace softcuda {

// One operation whose parameters were checked. `word` is the resolved address and keeps a reference
// to the allocation; `wide` says that the operation is a 64-bit one.
struct Memop {
  CUstreamBatchMemOpType operation;
  Target word;
  uint64_t value = 0;
  unsigned flags = 0;
  bool wide = false;
};

// A batch of operations. It is immutable and shared by graph definitions and executables.
struct MemopWork {
  std::vector<CUstreamBatchMemOpParams> params;  // the caller's values
  std::vector<Memop> ops;
};

// Called when the work `now` of a node of an executable graph is replaced with `after`. If the work
// is a batch, refuses the call if the number or the kinds of its operations change.
void check_same_operations(const Work& now, const Work& after);

// Checks the parameters of a batch and returns its work.
std::shared_ptr<const MemopWork> make_memops(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params);

// Starts a batch. Returns true if the batch is complete. Returns false if it has reached an
// unsatisfied wait; the poller completes `op` later.
bool start_memops(Op* op);

// With SOFTCUDA_QUEUES=1, holds back an operation that becomes ready while a wait is pending or a
// kernel polls memory, as a wait at the head of a single hardware queue would do (INVARIANTS.md
// W4). Returns whether `op` was held back.
bool hold_behind_wait(Op* op);
// Tells hold_behind_wait() that a kernel polls memory, as long as the object exists. Created with
// SOFTCUDA_QUEUES=1 only.
class PollingKernel {
 public:
  PollingKernel();
  ~PollingKernel();
  PollingKernel(const PollingKernel&) = delete;
  PollingKernel& operator=(const PollingKernel&) = delete;
};

}  // namespace softcuda
