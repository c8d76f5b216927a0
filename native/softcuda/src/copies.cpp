// Copies (memcpy) and fills (memset): parameter checks, execution and entry points (invariants C1
// and C2).
#include <cstring>

#include "capture.h"
#include "executor.h"

namespace softcuda {
namespace {

// Resolves the address of one side of a copy and checks its bounds (C2). `side` is "source" or
// "destination" and appears in the error text.
void resolve_end(const CopyEnd& end, size_t bytes, Target* target, const char* side) {
  const bool host = end.type == CU_MEMORYTYPE_HOST;
  const auto base = host ? reinterpret_cast<unsigned long long>(end.host) : end.device;
  const unsigned long long from = base + end.x_in_bytes;
  std::string why;
  if (host && is_alias(from)) why = hex(from) + " is a device address";
  const bool resolved = why.empty() && resolve(from, bytes, target, &why);
  const bool device = is_alias(from) || (target->owner && target->owner->unified());
  if (resolved && (device || end.type != CU_MEMORYTYPE_DEVICE)) return;
  if (resolved) why = hex(from) + " is not a device address";
  refuse(CUDA_ERROR_INVALID_VALUE, std::string("copy ") + side + ": " + why);
}

}  // namespace

std::shared_ptr<CopyWork> make_copy(const CUDA_MEMCPY3D& p) {
  require(p.src.type != CU_MEMORYTYPE_ARRAY && p.dst.type != CU_MEMORYTYPE_ARRAY && p.Height <= 1 &&
              p.Depth <= 1 && (p.src.y | p.src.z | p.dst.y | p.dst.z) == 0,
          CUDA_ERROR_NOT_SUPPORTED,
          "copies of arrays and of more than one row are not implemented");
  auto c = std::make_shared<CopyWork>();
  c->params = p;
  c->bytes = p.WidthInBytes;
  resolve_end(p.src, c->bytes, &c->src, "source");
  resolve_end(p.dst, c->bytes, &c->dst, "destination");
  return c;
}

std::shared_ptr<FillWork> make_fill(const CUDA_MEMSET_NODE_PARAMS& p) {
  if (p.elementSize != 1 && p.elementSize != 2 && p.elementSize != 4) {
    refuse(CUDA_ERROR_INVALID_VALUE,
           "memset element size " + std::to_string(p.elementSize) + " is not 1, 2 or 4");
  }
  auto f = std::make_shared<FillWork>();
  f->params = p;
  f->row_bytes = p.width * p.elementSize;
  f->rows = p.height == 0 ? 1 : p.height;
  require(f->rows == 1 || (p.pitch >= f->row_bytes && p.pitch % p.elementSize == 0),
          CUDA_ERROR_INVALID_VALUE,
          "the memset pitch is less than a row, or not a multiple of the element size");
  const size_t bytes = f->row_bytes == 0 ? 0 : (f->rows - 1) * p.pitch + f->row_bytes;
  require(p.dst % p.elementSize == 0, CUDA_ERROR_INVALID_VALUE,
          "the memset destination is not aligned to its element size");
  std::string why;
  if (!resolve(p.dst, bytes, &f->dst, &why) || (bytes > 0 && !f->dst.owner)) {
    refuse(CUDA_ERROR_INVALID_VALUE,
           "memset destination: " + (why.empty() ? hex(p.dst) + " is pageable host memory" : why));
  }
  return f;
}

bool run_copy(Executor* executor, const CopyWork& c) {
  for (const Target* target : {&c.src, &c.dst}) {
    if (target->live()) continue;
    fault(CUDA_ERROR_ILLEGAL_ADDRESS,
          "use after free: a copy accesses " + target->owner->describe());
    return false;
  }
  const char* from = c.staged.empty() ? c.src.address : c.staged.data();
  return executor->guarded("copy", [&] { std::memmove(c.dst.address, from, c.bytes); });
}

bool run_fill(Executor* executor, const FillWork& f) {
  if (!f.dst.live()) {
    fault(CUDA_ERROR_ILLEGAL_ADDRESS,
          "use after free: a memset accesses " + f.dst.owner->describe());
    return false;
  }
  const CUDA_MEMSET_NODE_PARAMS& p = f.params;
  return executor->guarded("memset", [&] {
    for (size_t row = 0; row < f.rows; ++row) {
      char* const at = f.dst.address + row * p.pitch;
      if (p.elementSize == 1) {
        std::memset(at, static_cast<int>(p.value), f.row_bytes);
        continue;
      }
      for (size_t x = 0; x < f.row_bytes; x += p.elementSize) {
        std::memcpy(at + x, &p.value, p.elementSize);
      }
    }
  });
}

namespace {

// Enqueues or captures a copy. The copy follows the driver's rules for pageable memory (C1). If the
// source is pageable, an asynchronous copy reads it before the call returns. If the destination is
// pageable, the copy is complete when the call returns. With `read_now`, any source is read before
// the call returns.
CUresult run(const std::shared_ptr<CopyWork>& c, CUstream handle, bool wait,
             bool read_now = false) {
  const auto stream = find_stream(handle);
  if (c->bytes == 0 || capture_work(handle, Work(c))) return CUDA_SUCCESS;
  if (!wait && (read_now || c->src.owner == nullptr)) {
    c->staged.assign(c->src.address, c->src.address + c->bytes);
  }
  wait = wait || c->dst.owner == nullptr;
  const OpRef op = enqueue(*stream, Work(c));
  return wait ? wait_op(op, "a copy to finish") : CUDA_SUCCESS;
}

// Implements all memcpy functions of one row.
CUresult copy(CopyEnd dst, CopyEnd src, size_t bytes, CUstream handle, bool wait) {
  find_stream(handle);
  return run(make_copy(CUDA_MEMCPY3D{src, dst, bytes, 1, 1}), handle, wait);
}

CUresult fill(CUdeviceptr dst, unsigned value, unsigned element, size_t count, CUstream handle,
              bool wait) {
  const auto stream = find_stream(handle);
  const auto f = make_fill(CUDA_MEMSET_NODE_PARAMS{dst, 0, value, element, count, 1});
  if (count == 0 || capture_work(handle, Work(f))) return CUDA_SUCCESS;
  const OpRef op = enqueue(*stream, Work(f));
  return wait ? wait_op(op, "a memset to finish") : CUDA_SUCCESS;
}

CopyEnd end_of(CUmemorytype type, const void* host, CUdeviceptr device) {
  CopyEnd end{};
  end.type = type;
  end.host = host;
  end.device = device;
  return end;
}
CopyEnd host(const void* p) { return end_of(CU_MEMORYTYPE_HOST, p, 0); }
CopyEnd device(CUdeviceptr p) { return end_of(CU_MEMORYTYPE_DEVICE, nullptr, p); }
CopyEnd unified(CUdeviceptr p) { return end_of(CU_MEMORYTYPE_UNIFIED, nullptr, p); }

}  // namespace
}  // namespace softcuda

using namespace softcuda;

#define COPY(name, suffix, from, Dst, dst_end, Src, src_end)                                     \
  SC_API_CODE(name##suffix, from, kContext | kUnsafe, Dst, dst, Src, src, size_t, n) {           \
    return copy(dst_end(dst), src_end(src), n, nullptr, true);                                   \
  }                                                                                              \
  SC_API_CODE(name##Async##suffix, from, kContext, Dst, dst, Src, src, size_t, n, CUstream, s) { \
    return copy(dst_end(dst), src_end(src), n, s, false);                                        \
  }
COPY(cuMemcpy, , 4000, CUdeviceptr, unified, CUdeviceptr, unified)
COPY(cuMemcpyHtoD, _v2, 3020, CUdeviceptr, device, const void*, host)
COPY(cuMemcpyDtoH, _v2, 3020, void*, host, CUdeviceptr, device)
COPY(cuMemcpyDtoD, _v2, 3020, CUdeviceptr, device, CUdeviceptr, device)

#define FILL(name, T)                                                                        \
  SC_API_CODE(name##_v2, 3020, kContext | kUnsafe, CUdeviceptr, dst, T, v, size_t, n) {      \
    return fill(dst, v, sizeof v, n, nullptr, true);                                         \
  }                                                                                          \
  SC_API_CODE(name##Async, 3020, kContext, CUdeviceptr, dst, T, v, size_t, n, CUstream, s) { \
    return fill(dst, v, sizeof v, n, s, false);                                              \
  }
FILL(cuMemsetD8, unsigned char)
FILL(cuMemsetD16, unsigned short)
FILL(cuMemsetD32, unsigned)

// Checks the attributes of a copy. Returns whether the source must be read before the call returns.
// Locations and flags are hints, which have no effect.
static bool reads_now(const CUmemcpyAttributes* attributes) {
  if (attributes == nullptr) return false;
  require(attributes->srcAccessOrder >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
              attributes->srcAccessOrder <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
          CUDA_ERROR_INVALID_VALUE, "the source access order is invalid");
  require(attributes->flags <= 1, CUDA_ERROR_INVALID_VALUE, "unknown flags of a copy");
  return attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
}

SC_API_CODE(cuMemcpyWithAttributesAsync, 13020, kContext, CUdeviceptr, dst, CUdeviceptr, src,
            size_t, size, const CUmemcpyAttributes*, attributes, CUstream, stream) {
  const bool now = reads_now(attributes);
  return run(make_copy(CUDA_MEMCPY3D{unified(src), unified(dst), size, 1, 1}), stream, false, now);
}

// All copies are checked before the first one is enqueued.
SC_API_CODE(cuMemcpyBatchAsync_v2, 13000, kContext, const CUdeviceptr*, dsts, const CUdeviceptr*,
            srcs, const size_t*, sizes, size_t, count, const CUmemcpyAttributes*, attributes,
            const size_t*, first_copies, size_t, groups, CUstream, stream) {
  require(reinterpret_cast<uint64_t>(stream) > 1, CUDA_ERROR_INVALID_VALUE,
          "a batch of copies cannot be enqueued on the legacy stream");
  require(dsts != nullptr && srcs != nullptr && sizes != nullptr && count > 0);
  require(attributes != nullptr && first_copies != nullptr && groups > 0 && groups <= count &&
          first_copies[0] == 0);
  for (size_t i = 1; i < groups; ++i) {
    require(first_copies[i] > first_copies[i - 1] && first_copies[i] < count,
            CUDA_ERROR_INVALID_VALUE, "the first copies of the attributes do not ascend");
  }
  std::vector<std::pair<std::shared_ptr<CopyWork>, bool>> copies;
  size_t group = 0;
  for (size_t i = 0; i < count; ++i) {
    if (group + 1 < groups && first_copies[group + 1] == i) ++group;
    copies.emplace_back(
        make_copy(CUDA_MEMCPY3D{unified(srcs[i]), unified(dsts[i]), sizes[i], 1, 1}),
        reads_now(&attributes[group]));
  }
  for (auto& item : copies) {
    const CUresult result = run(item.first, stream, false, item.second);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
