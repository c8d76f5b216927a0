// Checking memory operations, and their entry points (W5).
#include <algorithm>

#include "capture.h"
#include "graphs.h"
#include "memops.h"

namespace softcuda {
namespace {

constexpr unsigned kMostOps = 255;  // "must be less than 256"

CUresult refuse_op(unsigned i, CUresult code, const std::string& why) {
  return refuse(code, "memory operation " + std::to_string(i) + ": " + why);
}

// The word of an operation: `bytes` that the device may follow, aligned to their size.
CUresult find_word(unsigned i, CUdeviceptr address, size_t bytes, Target* out) {
  if (address % bytes != 0) {
    return refuse_op(i, CUDA_ERROR_INVALID_VALUE,
                     hex(address) + " is not aligned to " + std::to_string(bytes) + " bytes");
  }
  std::string why;
  if (!resolve_for_device(address, bytes, out, &why))
    return refuse_op(i, CUDA_ERROR_INVALID_VALUE, why);
  if (out->owner && out->owner->host && (out->owner->flags & CU_MEMHOSTALLOC_WRITECOMBINED) != 0) {
    return refuse_op(i, CUDA_ERROR_INVALID_VALUE, "the word is in write-combined memory");
  }
  return CUDA_SUCCESS;
}

CUresult check_wait(unsigned i, const CUstreamMemOpWaitValueParams& p, Memop* out) {
  const unsigned known = 3u | CU_STREAM_WAIT_VALUE_FLUSH;
  if ((p.flags & ~known) != 0) {
    return refuse_op(i, CUDA_ERROR_INVALID_VALUE, "unknown wait flags " + hex(p.flags));
  }
  if ((p.flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0 && device_attribute(98) == 0) {
    return refuse_op(i, CUDA_ERROR_NOT_SUPPORTED, "flushing remote writes (attribute 98 is 0)");
  }
  if ((p.flags & 3u) == CU_STREAM_WAIT_VALUE_NOR && device_attribute(123) == 0) {
    return refuse_op(i, CUDA_ERROR_NOT_SUPPORTED, "a NOR wait (attribute 123 is 0)");
  }
  out->flags = p.flags;
  out->value = out->wide ? p.value64 : p.value;
  return find_word(i, p.address, out->wide ? 8 : 4, &out->word);
}

CUresult check_write(unsigned i, const CUstreamMemOpWriteValueParams& p, Memop* out) {
  if (p.flags == CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) {
    return refuse_op(i, CUDA_ERROR_NOT_SUPPORTED, "NO_MEMORY_BARRIER belongs to the old API");
  }
  if (p.flags != 0) {
    return refuse_op(i, CUDA_ERROR_INVALID_VALUE, "unknown write flags " + hex(p.flags));
  }
  out->value = out->wide ? p.value64 : p.value;
  return find_word(i, p.address, out->wide ? 8 : 4, &out->word);
}

CUresult check_reduction(unsigned i, const CUstreamMemOpAtomicReductionParams& p, Memop* out) {
  if (device_attribute(148) == 0) {
    return refuse_op(i, CUDA_ERROR_NOT_SUPPORTED, "an atomic reduction (attribute 148 is 0)");
  }
  const bool known = p.reductionOp == CU_STREAM_ATOMIC_REDUCTION_OP_ADD ||
                     p.reductionOp == CU_STREAM_ATOMIC_REDUCTION_OP_AND ||
                     p.reductionOp == CU_STREAM_ATOMIC_REDUCTION_OP_OR;
  if (p.flags != 0 || !known ||
      (p.dataType != CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32 &&
       p.dataType != CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64)) {
    return refuse_op(i, CUDA_ERROR_INVALID_VALUE, "unknown flags, operation or data type");
  }
  out->wide = p.dataType == CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64;
  out->reduction = p.reductionOp;
  out->value = p.value;
  return find_word(i, p.address, out->wide ? 8 : 4, &out->word);
}

CUresult check_op(unsigned i, const CUstreamBatchMemOpParams& p, Memop* out) {
  out->operation = p.operation;
  out->wide = p.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 ||
              p.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
  if (out->wide && device_attribute(122) == 0) {
    return refuse_op(i, CUDA_ERROR_NOT_SUPPORTED, "a 64-bit operation (attribute 122 is 0)");
  }
  switch (p.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      return check_wait(i, p.waitValue, out);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return check_write(i, p.writeValue, out);
    case CU_STREAM_MEM_OP_ATOMIC_REDUCTION:
      return check_reduction(i, p.atomicReduction, out);
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      if (device_attribute(98) == 0) {
        return refuse_op(i, CUDA_ERROR_NOT_SUPPORTED, "flushing remote writes (attribute 98 is 0)");
      }
      return p.memoryBarrier.flags == 0 ? CUDA_SUCCESS
                                        : refuse_op(i, CUDA_ERROR_INVALID_VALUE, "unknown flags");
    case CU_STREAM_MEM_OP_BARRIER:
      return p.memoryBarrier.flags <= 1 ? CUDA_SUCCESS
                                        : refuse_op(i, CUDA_ERROR_INVALID_VALUE, "unknown flags");
  }
  return refuse_op(i, CUDA_ERROR_INVALID_VALUE, "unknown operation " + std::to_string(p.operation));
}

CUresult enqueue_ops(CUstream handle, unsigned count, const CUstreamBatchMemOpParams* ops,
                     unsigned flags) {
  std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  CUDA_BATCH_MEM_OP_NODE_PARAMS params{primary_context(), count,
                                       const_cast<CUstreamBatchMemOpParams*>(ops), flags};
  Work work;
  if (CUresult r = memop_work(&params, &work); r != CUDA_SUCCESS) return r;
  if (auto r = capture_work(handle, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, work)) return *r;
  enqueue(*stream, std::move(work));
  return CUDA_SUCCESS;
}

CUresult stream_op(CUstream stream, const CUstreamBatchMemOpParams& op) {
  return enqueue_ops(stream, 1, &op, 0);
}

CUstreamBatchMemOpParams wait_params(CUstreamBatchMemOpType type, CUdeviceptr address,
                                     uint64_t value, unsigned flags) {
  CUstreamBatchMemOpParams p{};
  p.waitValue.operation = type;
  p.waitValue.address = address;
  p.waitValue.value64 = value;
  p.waitValue.flags = flags;
  return p;
}

}  // namespace

bool same_operations(const Work& a, const Work& b) {
  const auto same = [](const CUstreamBatchMemOpParams& x, const CUstreamBatchMemOpParams& y) {
    return x.operation == y.operation;
  };
  return std::equal(a.memop->given.begin(), a.memop->given.end(), b.memop->given.begin(),
                    b.memop->given.end(), same);
}

CUresult memop_work(const CUDA_BATCH_MEM_OP_NODE_PARAMS* p, Work* out) {
  if (!settings().memops) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "memory operations are switched off (SOFTCUDA_MEMOPS)");
  }
  if (p == nullptr || p->flags != 0 || p->count == 0 || p->paramArray == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (p->count > kMostOps) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  std::to_string(p->count) + " memory operations; a batch has less than 256");
  }
  auto work = std::make_shared<MemopWork>();
  work->given.assign(p->paramArray, p->paramArray + p->count);
  work->ops.resize(p->count);
  for (unsigned i = 0; i < p->count; ++i) {
    if (CUresult r = check_op(i, work->given[i], &work->ops[i]); r != CUDA_SUCCESS) return r;
  }
  out->kind = WorkKind::memop;
  out->memop = std::move(work);
  return CUDA_SUCCESS;
}

}  // namespace softcuda

using namespace softcuda;

SC_EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count,
                                         CUstreamBatchMemOpParams* ops, unsigned flags) {
  SC_API(cuStreamBatchMemOp, 0);
  return enqueue_ops(stream, count, ops, flags);
}

#define STREAM_OP(name, bits, OPERATION)                                                         \
  SC_EXPORT CUresult name##bits##_v2(CUstream stream, CUdeviceptr address, uint##bits##_t value, \
                                     unsigned flags) {                                           \
    SC_API(name##bits, 0);                                                                       \
    return stream_op(stream, wait_params(OPERATION, address, value, flags));                     \
  }
STREAM_OP(cuStreamWaitValue, 32, CU_STREAM_MEM_OP_WAIT_VALUE_32)
STREAM_OP(cuStreamWaitValue, 64, CU_STREAM_MEM_OP_WAIT_VALUE_64)
STREAM_OP(cuStreamWriteValue, 32, CU_STREAM_MEM_OP_WRITE_VALUE_32)
STREAM_OP(cuStreamWriteValue, 64, CU_STREAM_MEM_OP_WRITE_VALUE_64)
