// Copies and fills: building the work, running it, and the entry points (invariant C1, C2).
#include "copies.h"

#include <cstring>

#include "capture.h"
#include "executor.h"

namespace softcuda {

CUresult make_copy(const CUDA_MEMCPY3D& p, CopyWork* out) {
  if (p.srcMemoryType == CU_MEMORYTYPE_ARRAY || p.dstMemoryType == CU_MEMORYTYPE_ARRAY) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "array copies are not implemented");
  }
  CopyWork& c = *out;
  c.width = p.WidthInBytes;
  c.height = p.Height == 0 ? 1 : p.Height;
  c.depth = p.Depth == 0 ? 1 : p.Depth;
  const bool flat = c.height == 1 && c.depth == 1;
  c.src_pitch = flat || p.srcPitch == 0 ? c.width : p.srcPitch;
  c.dst_pitch = flat || p.dstPitch == 0 ? c.width : p.dstPitch;
  if (c.src_pitch < c.width || c.dst_pitch < c.width) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "a pitch is smaller than the width of a row");
  }
  c.src_slice = c.src_pitch * (p.srcHeight == 0 ? c.height : p.srcHeight);
  c.dst_slice = c.dst_pitch * (p.dstHeight == 0 ? c.height : p.dstHeight);
  const auto end = [&](Target* target, CUmemorytype type, const void* host, CUdeviceptr device,
                       size_t x, size_t y, size_t z, size_t pitch, size_t slice,
                       const char* who) -> CUresult {
    const auto base = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<unsigned long long>(host)
                                                 : static_cast<unsigned long long>(device);
    const size_t bytes =
        c.width == 0 ? 0 : (c.depth - 1) * slice + (c.height - 1) * pitch + c.width;
    const unsigned long long from = base + z * slice + y * pitch + x;
    std::string why;
    if (type == CU_MEMORYTYPE_DEVICE && !is_alias(from)) why = hex(from) + " is no device address";
    if (type == CU_MEMORYTYPE_HOST && is_alias(from)) why = hex(from) + " is a device address";
    if (why.empty() && resolve(from, bytes, target, &why)) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_VALUE, std::string("copy ") + who + ": " + why);
  };
  if (CUresult r = end(&c.src, p.srcMemoryType, p.srcHost, p.srcDevice, p.srcXInBytes, p.srcY,
                       p.srcZ, c.src_pitch, c.src_slice, "source");
      r != CUDA_SUCCESS) {
    return r;
  }
  return end(&c.dst, p.dstMemoryType, p.dstHost, p.dstDevice, p.dstXInBytes, p.dstY, p.dstZ,
             c.dst_pitch, c.dst_slice, "destination");
}

CUresult make_fill(const CUDA_MEMSET_NODE_PARAMS& p, FillWork* out) {
  FillWork& f = *out;
  if (p.elementSize != 1 && p.elementSize != 2 && p.elementSize != 4) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "fill element size " + std::to_string(p.elementSize) + " is not 1, 2 or 4");
  }
  f.value = p.value;
  f.element = p.elementSize;
  f.width = p.width;
  f.height = p.height == 0 ? 1 : p.height;
  f.pitch = f.height == 1 ? f.width * f.element : p.pitch;
  if (f.pitch < f.width * f.element) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "a pitch is smaller than the width of a row");
  }
  if (p.dst % p.elementSize != 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "fill destination is not aligned to its element");
  }
  std::string why;
  const size_t bytes = f.width == 0 ? 0 : (f.height - 1) * f.pitch + f.width * f.element;
  if (!resolve(p.dst, bytes, &f.dst, &why) || (bytes > 0 && !f.dst.owner)) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "fill destination: " + (why.empty() ? hex(p.dst) + " is pageable memory" : why));
  }
  return CUDA_SUCCESS;
}

bool run_copy(Executor* executor, const CopyWork& c) {
  for (const Target* target : {&c.src, &c.dst}) {
    if (target->live()) continue;
    fault(CUDA_ERROR_ILLEGAL_ADDRESS,
          "use after free: a copy touches " + target->owner->describe());
    return false;
  }
  const char* from = c.staged.empty() ? c.src.address : c.staged.data();
  return executor->guarded("copy", [&] {
    for (size_t z = 0; z < c.depth; ++z) {
      if (c.src_pitch == c.width && c.dst_pitch == c.width) {
        std::memmove(c.dst.address + z * c.dst_slice, from + z * c.src_slice, c.width * c.height);
        continue;
      }
      for (size_t y = 0; y < c.height; ++y) {
        std::memmove(c.dst.address + z * c.dst_slice + y * c.dst_pitch,
                     from + z * c.src_slice + y * c.src_pitch, c.width);
      }
    }
  });
}

bool run_fill(Executor* executor, const FillWork& f) {
  if (!f.dst.live()) {
    fault(CUDA_ERROR_ILLEGAL_ADDRESS, "use after free: a fill touches " + f.dst.owner->describe());
    return false;
  }
  return executor->guarded("fill", [&] {
    for (size_t y = 0; y < f.height; ++y) {
      char* row = f.dst.address + y * f.pitch;
      if (f.element == 1) {
        std::memset(row, static_cast<int>(f.value), f.width);
        continue;
      }
      for (size_t x = 0; x < f.width; ++x) std::memcpy(row + x * f.element, &f.value, f.element);
    }
  });
}

namespace {

CUDA_MEMCPY3D flat_copy(CUmemorytype dst_type, unsigned long long dst, CUmemorytype src_type,
                        unsigned long long src, size_t bytes) {
  CUDA_MEMCPY3D p{};
  p.srcMemoryType = src_type;
  p.srcHost = reinterpret_cast<const void*>(src);
  p.srcDevice = src;
  p.dstMemoryType = dst_type;
  p.dstHost = reinterpret_cast<void*>(dst);
  p.dstDevice = dst;
  p.WidthInBytes = bytes;
  p.Height = p.Depth = 1;
  return p;
}

// Pageable memory (C1): an asynchronous copy takes its source at the call, and waits for its end
// when the destination is pageable, as the API synchronisation rules of the driver say.
CUresult copy(const CUDA_MEMCPY3D& p, CUstream handle, bool wait) {
  std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  auto c = std::make_shared<CopyWork>();
  if (CUresult r = make_copy(p, c.get()); r != CUDA_SUCCESS) return r;
  if (c->width == 0) return CUDA_SUCCESS;
  Work work;
  work.kind = WorkKind::copy;
  if (capture_possible()) {
    work.copy = c;
    if (auto r = capture_copy(handle, work, p)) return *r;
    work.copy.reset();
  }
  const bool flat = c->height == 1 && c->depth == 1;
  if (!wait && c->src.owner == nullptr && flat) {
    c->staged.assign(c->src.address, c->src.address + c->width);
  }
  wait = wait || c->dst.owner == nullptr || (c->src.owner == nullptr && !flat);
  work.copy = std::move(c);
  OpRef op = enqueue(*stream, std::move(work));
  return wait ? wait_op(op, "a copy to finish") : CUDA_SUCCESS;
}

CUresult fill(CUdeviceptr dst, unsigned value, unsigned element, size_t pitch, size_t width,
              size_t height, CUstream handle, bool wait) {
  std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  auto f = std::make_shared<FillWork>();
  const CUDA_MEMSET_NODE_PARAMS p{dst, pitch, value, element, width, height};
  if (CUresult r = make_fill(p, f.get()); r != CUDA_SUCCESS) return r;
  if (width == 0) return CUDA_SUCCESS;
  Work work;
  work.kind = WorkKind::fill;
  work.fill = std::move(f);
  if (auto r = capture_fill(handle, work, p)) return *r;
  OpRef op = enqueue(*stream, std::move(work));
  return wait ? wait_op(op, "a fill to finish") : CUDA_SUCCESS;
}

constexpr CUmemorytype kHost = CU_MEMORYTYPE_HOST, kDevice = CU_MEMORYTYPE_DEVICE,
                       kUnified = CU_MEMORYTYPE_UNIFIED;

unsigned long long address(const void* p) { return reinterpret_cast<unsigned long long>(p); }

}  // namespace
}  // namespace softcuda

using namespace softcuda;

#define COPY(name, symbol, Dst, dst_kind, dst, Src, src_kind, src)          \
  SC_EXPORT CUresult symbol(Dst to, Src from, size_t n) {                   \
    SC_API(name, kContext | kUnsafe);                                       \
    return copy(flat_copy(dst_kind, dst, src_kind, src, n), nullptr, true); \
  }
#define COPY_ASYNC(name, symbol, Dst, dst_kind, dst, Src, src_kind, src) \
  SC_EXPORT CUresult symbol(Dst to, Src from, size_t n, CUstream s) {    \
    SC_API(name, kContext);                                              \
    return copy(flat_copy(dst_kind, dst, src_kind, src, n), s, false);   \
  }
#define COPIES(name, suffix, ...)       \
  COPY(name, name##suffix, __VA_ARGS__) \
  COPY_ASYNC(name##Async, name##Async##suffix, __VA_ARGS__)
COPIES(cuMemcpy, , CUdeviceptr, kUnified, to, CUdeviceptr, kUnified, from)
COPIES(cuMemcpyHtoD, _v2, CUdeviceptr, kDevice, to, const void*, kHost, address(from))
COPIES(cuMemcpyDtoH, _v2, void*, kHost, address(to), CUdeviceptr, kDevice, from)
COPIES(cuMemcpyDtoD, _v2, CUdeviceptr, kDevice, to, CUdeviceptr, kDevice, from)

#define FILL(name, T)                                                          \
  SC_EXPORT CUresult name##_v2(CUdeviceptr dst, T v, size_t n) {               \
    SC_API(name, kContext | kUnsafe);                                          \
    return fill(dst, v, sizeof v, 0, n, 1, nullptr, true);                     \
  }                                                                            \
  SC_EXPORT CUresult name##Async(CUdeviceptr dst, T v, size_t n, CUstream s) { \
    SC_API(name##Async, kContext);                                             \
    return fill(dst, v, sizeof v, 0, n, 1, s, false);                          \
  }
FILL(cuMemsetD8, unsigned char)
FILL(cuMemsetD16, unsigned short)
FILL(cuMemsetD32, unsigned)
