// Parameter checks and entry points of stream memory operations (INVARIANTS.md W5).
#include <algorithm>

#include "capture.h"
#include "memops.h"

namespace softcuda {
namespace {

constexpr unsigned kMaxOps = 255;  // the documentation requires fewer than 256

// Parameter checks of one operation of a batch. `index` is the operation's position in the batch,
// which error texts name.
struct Check {
  unsigned index;

  void that(bool condition, const char* reason, CUresult code = CUDA_ERROR_INVALID_VALUE) const {
    if (!condition) fail(code, reason);
  }
  // Refuses the call if the operation needs a feature whose device attribute is 0.
  void attribute(bool needed, int number, const char* feature) const {
    if (!needed || device_attribute(number) != 0) return;
    fail(CUDA_ERROR_NOT_SUPPORTED, std::string(feature) + " is not supported (device attribute " +
                                       std::to_string(number) + " is 0)");
  }
  [[noreturn]] void fail(CUresult code, const std::string& reason) const {
    refuse(code, "memory operation " + std::to_string(index) + ": " + reason);
  }

  // Resolves the address of a wait or write. It must be in device memory, or in pinned memory that
  // is not write-combined, and aligned to the operation's size.
  void word(CUdeviceptr address, Memop* out) const {
    const size_t bytes = out->wide ? 8 : 4;
    std::string why;
    if (address % bytes != 0) {
      why = hex(address) + " is not aligned to " + std::to_string(bytes) + " bytes";
    } else if (resolve_for_device(address, bytes, &out->word, &why)) {
      const Allocation* owner = out->word.owner.get();
      that(!owner || !owner->host || (owner->flags & CU_MEMHOSTALLOC_WRITECOMBINED) == 0,
           "the memory location is in write-combined memory");
      if (!owner || owner->kind != MemoryKind::reserved) return;
      int flags = 0;
      std::lock_guard<std::mutex> lock(virtual_mutex());
      if (find_mapping(out->word, bytes, &flags)) return;
      why = "no memory is mapped at " + hex(address);
    }
    fail(CUDA_ERROR_INVALID_VALUE, why);
  }

  // Checks the parameters of an operation and returns the operation.
  Memop operation(const CUstreamBatchMemOpParams& p) const {
    Memop out;
    out.operation = p.operation;
    out.wide = p.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 ||
               p.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
    attribute(out.wide, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "a 64-bit operation");
    switch (p.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        out.flags = p.waitValue.flags;
        that((out.flags & ~(3u | CU_STREAM_WAIT_VALUE_FLUSH)) == 0, "unknown wait flags");
        attribute((out.flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0,
                  CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, "flushing remote writes");
        attribute((out.flags & 3u) == CU_STREAM_WAIT_VALUE_NOR,
                  CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, "a NOR wait");
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        that(p.writeValue.flags != CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER,
             "the flag NO_MEMORY_BARRIER is not supported by the _v2 functions",
             CUDA_ERROR_NOT_SUPPORTED);
        that(p.writeValue.flags == 0, "unknown write flags");
        break;
      case CU_STREAM_MEM_OP_ATOMIC_REDUCTION:
        fail(CUDA_ERROR_NOT_SUPPORTED,
             "an atomic reduction is not supported (device attribute 148 is 0)");
      case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      case CU_STREAM_MEM_OP_BARRIER: {
        const bool flush = p.operation == CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES;
        attribute(flush, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, "flushing remote writes");
        that(p.memoryBarrier.flags <= (flush ? 0u : 1u), "unknown flags");
        return out;
      }
      default:
        fail(CUDA_ERROR_INVALID_VALUE, "unknown operation " + std::to_string(p.operation));
    }
    out.value = out.wide ? p.waitValue.value64 : p.waitValue.value;
    word(p.waitValue.address, &out);
    return out;
  }
};

void enqueue_ops(CUstream handle, unsigned count, CUstreamBatchMemOpParams* ops, unsigned flags) {
  const auto stream = find_stream(handle);
  Work work(make_memops({primary_context(), count, ops, flags}));
  if (!capture_work(handle, work)) enqueue(*stream, std::move(work));
}

}  // namespace

std::shared_ptr<const MemopWork> make_memops(const CUDA_BATCH_MEM_OP_NODE_PARAMS& p) {
  require(settings().memops, CUDA_ERROR_NOT_SUPPORTED,
          "stream memory operations are disabled (SOFTCUDA_MEMOPS=0)");
  require(p.flags == 0 && p.count != 0 && p.paramArray != nullptr);
  require(p.count <= kMaxOps, CUDA_ERROR_INVALID_VALUE,
          "a batch must have fewer than 256 operations");
  auto work = std::make_shared<MemopWork>();
  work->params.assign(p.paramArray, p.paramArray + p.count);
  for (unsigned i = 0; i < p.count; ++i) work->ops.push_back(Check{i}.operation(work->params[i]));
  return work;
}

void check_same_operations(const Work& now, const Work& after) {
  if (after.kind != WorkKind::memop) return;
  const auto same_kind = [](const Memop& a, const Memop& b) { return a.operation == b.operation; };
  const auto& old_ops = now.memop->ops;
  const auto& new_ops = after.memop->ops;
  require(std::equal(old_ops.begin(), old_ops.end(), new_ops.begin(), new_ops.end(), same_kind),
          CUDA_ERROR_INVALID_VALUE,
          "the number and the kinds of the operations of a batch cannot be changed");
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuStreamBatchMemOp_v2, 11070, 0, CUstream, stream, unsigned, count,
       CUstreamBatchMemOpParams*, ops, unsigned, flags) {
  enqueue_ops(stream, count, ops, flags);
}

#define STREAM_OP(symbol, T, OPERATION)                                                      \
  SC_API(symbol, 11070, 0, CUstream, stream, CUdeviceptr, word, T, value, unsigned, flags) { \
    CUstreamBatchMemOpParams p{};                                                            \
    p.waitValue.operation = OPERATION;                                                       \
    p.waitValue.address = word;                                                              \
    p.waitValue.value64 = value;                                                             \
    p.waitValue.flags = flags;                                                               \
    enqueue_ops(stream, 1, &p, 0);                                                           \
  }
STREAM_OP(cuStreamWaitValue32_v2, uint32_t, CU_STREAM_MEM_OP_WAIT_VALUE_32)
STREAM_OP(cuStreamWaitValue64_v2, uint64_t, CU_STREAM_MEM_OP_WAIT_VALUE_64)
STREAM_OP(cuStreamWriteValue32_v2, uint32_t, CU_STREAM_MEM_OP_WRITE_VALUE_32)
STREAM_OP(cuStreamWriteValue64_v2, uint64_t, CU_STREAM_MEM_OP_WRITE_VALUE_64)
