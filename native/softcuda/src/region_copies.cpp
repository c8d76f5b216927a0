// Copies and fills of two- and three-dimensional regions, memory with padded rows, and copies
// between contexts.
#include <algorithm>

#include "scheduler.h"

using namespace softcuda;

namespace {

// The source or the destination of a two-dimensional copy. CUDA_MEMCPY2D contains these fields
// twice, once with the prefix "src" and once with the prefix "dst".
struct CopyEnd2D {
  size_t x_in_bytes, y;
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  void* array;
  size_t pitch;
};

struct CUDA_MEMCPY2D {
  CopyEnd2D src, dst;
  size_t WidthInBytes, Height;
};
static_assert(sizeof(CUDA_MEMCPY2D) == 128, "driver ABI");

CopyEnd widen(const CopyEnd2D& e) {
  return CopyEnd{e.x_in_bytes, e.y,     0,       0,       e.type, e.host,
                 e.device,     e.array, nullptr, e.pitch, e.y + 1};
}

CUresult copy_2d(const CUDA_MEMCPY2D* p, CUstream stream, bool wait) {
  require(p != nullptr);
  if (p->WidthInBytes == 0 || p->Height == 0) return CUDA_SUCCESS;
  const CUDA_MEMCPY3D params{widen(p->src), widen(p->dst), p->WidthInBytes, p->Height, 1};
  return enqueue_copy(make_copy(params), stream, wait);
}

// CUDA_MEMCPY3D_PEER has the same layout. Its contexts, which are in the reserved fields, need no
// check, because all contexts share the device memory.
CUresult copy_3d(const CUDA_MEMCPY3D* p, CUstream stream, bool wait) {
  require(p != nullptr);
  if (p->WidthInBytes == 0 || p->Height == 0 || p->Depth == 0) return CUDA_SUCCESS;
  return enqueue_copy(make_copy(*p), stream, wait);
}

CUresult copy_peer(CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t bytes,
                   CUstream stream, bool wait) {
  require(is_context(to) && is_context(from), CUDA_ERROR_INVALID_CONTEXT);
  CopyEnd ends[2]{};
  ends[0].type = ends[1].type = CU_MEMORYTYPE_DEVICE;
  ends[0].device = src;
  ends[1].device = dst;
  return enqueue_copy(make_copy(CUDA_MEMCPY3D{ends[0], ends[1], bytes, 1, 1}), stream, wait);
}

}  // namespace

#define COPY_ROWS(name, suffix, since, T, function)                                  \
  SC_API_CODE(name##suffix, since, kContext | kUnsafe, const T*, p) {                \
    return function(p, nullptr, true);                                               \
  }                                                                                  \
  SC_API_CODE(name##Async##suffix, since, kContext, const T*, p, CUstream, stream) { \
    return function(p, stream, false);                                               \
  }
COPY_ROWS(cuMemcpy2D, _v2, 3020, CUDA_MEMCPY2D, copy_2d)
COPY_ROWS(cuMemcpy3D, _v2, 3020, CUDA_MEMCPY3D, copy_3d)
COPY_ROWS(cuMemcpy3DPeer, , 4000, CUDA_MEMCPY3D, copy_3d)

SC_API_CODE(cuMemcpy2DUnaligned_v2, 3020, kContext | kUnsafe, const CUDA_MEMCPY2D*, p) {
  return copy_2d(p, nullptr, true);
}

SC_API_CODE(cuMemcpyPeer, 4000, kContext | kUnsafe, CUdeviceptr, dst, CUcontext, to, CUdeviceptr,
            src, CUcontext, from, size_t, bytes) {
  return copy_peer(dst, to, src, from, bytes, nullptr, true);
}

SC_API_CODE(cuMemcpyPeerAsync, 4000, kContext, CUdeviceptr, dst, CUcontext, to, CUdeviceptr, src,
            CUcontext, from, size_t, bytes, CUstream, stream) {
  return copy_peer(dst, to, src, from, bytes, stream, false);
}

#define FILL_ROWS(name, T)                                                                    \
  SC_API_CODE(name##_v2, 3020, kContext | kUnsafe, CUdeviceptr, dst, size_t, pitch, T, value, \
              size_t, width, size_t, height) {                                                \
    if (height == 0) return CUDA_SUCCESS;                                                     \
    return enqueue_fill({dst, pitch, value, sizeof value, width, height}, nullptr, true);     \
  }                                                                                           \
  SC_API_CODE(name##Async, 3020, kContext, CUdeviceptr, dst, size_t, pitch, T, value, size_t, \
              width, size_t, height, CUstream, stream) {                                      \
    if (height == 0) return CUDA_SUCCESS;                                                     \
    return enqueue_fill({dst, pitch, value, sizeof value, width, height}, stream, false);     \
  }
FILL_ROWS(cuMemsetD2D8, unsigned char)
FILL_ROWS(cuMemsetD2D16, unsigned short)
FILL_ROWS(cuMemsetD2D32, unsigned)

extern "C" CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);

SC_API_CODE(cuMemAllocPitch_v2, 3020, kContext | kUnsafe, CUdeviceptr*, out, size_t*, pitch, size_t,
            width, size_t, height, unsigned, element_size) {
  require(out != nullptr && pitch != nullptr && width > 0 && height > 0);
  require(element_size == 4 || element_size == 8 || element_size == 16, CUDA_ERROR_INVALID_VALUE,
          "the element size of memory with a pitch is 4, 8 or 16");
  constexpr size_t kRowAlignment = 512;
  size_t row = 0, bytes = 0;
  require(!__builtin_add_overflow(width, kRowAlignment - 1, &row), CUDA_ERROR_OUT_OF_MEMORY);
  row -= row % kRowAlignment;
  require(!__builtin_mul_overflow(row, height, &bytes), CUDA_ERROR_OUT_OF_MEMORY);
  const CUresult result = cuMemAlloc_v2(out, bytes);
  if (result == CUDA_SUCCESS) *pitch = row;
  return result;
}
