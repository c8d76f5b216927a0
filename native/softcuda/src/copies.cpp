// Copies (memcpy) and fills (memset): parameter checks, execution and entry points
// (INVARIANTS.md C1, C2).
#include <algorithm>
#include <cstring>

#include "arrays.h"
#include "capture.h"
#include "executor.h"

namespace softcuda {
namespace {

// Sizes are calculated with 128 bits, so that they do not overflow before they are compared with
// kLimit. No memory has 2**62 bytes.
using Wide = unsigned __int128;
constexpr Wide kLimit = Wide{1} << 62;

// Whether the extent of the copy in memory, including the padding of rows and slices, needs more
// than 62 bits.
bool overflows(const CopyEnd& end, const CopyShape& shape) {
  if (end.type == CU_MEMORYTYPE_ARRAY) return false;  // resolve_array() checks the bounds
  const Wide rows = Wide{end.y} + shape.rows;
  const Wide slices = Wide{end.z} + shape.slices;
  const Wide row = std::max<Wide>(end.pitch, Wide{end.x_in_bytes} + shape.row_bytes);
  const Wide height = std::max<Wide>(end.height, rows);
  if (row >= kLimit || height >= kLimit || slices >= kLimit) return true;
  const Wide slice = row * height;
  return slice >= kLimit || slice * slices >= kLimit;
}

// Resolves the address at which a copy begins in linear memory, and checks the bounds of the copy
// (INVARIANTS.md C2). `end` is the source or the destination of the copy; `side` receives the
// result. Returns an error text, or "" on success.
std::string resolve_linear(const CopyEnd& end, const CopyShape& shape, CopySide* side) {
  side->row_pitch = end.pitch;
  side->slice_pitch = end.pitch * end.height;
  if ((shape.rows > 1 || shape.slices > 1) && end.pitch < end.x_in_bytes + shape.row_bytes) {
    return "the pitch of " + std::to_string(end.pitch) + " bytes is less than a row";
  }
  if (shape.slices > 1 && end.height < end.y + shape.rows) {
    return "the height of " + std::to_string(end.height) + " rows is less than that of the copy";
  }
  const bool host = end.type == CU_MEMORYTYPE_HOST;
  const auto base = host ? reinterpret_cast<unsigned long long>(end.host) : end.device;
  const unsigned long long from =
      base + end.z * side->slice_pitch + end.y * end.pitch + end.x_in_bytes;
  if (host && is_alias(from)) return hex(from) + " is a device address";
  std::string why;
  Target& target = side->target;
  if (!resolve(from, side->extent(shape), &target, &why)) return why;
  Target start;
  if (from != base && resolve(base, 1, &start, &why) && start.owner &&
      start.owner != target.owner) {
    return hex(from) + " is outside of " + start.owner->describe();
  }
  // CU_MEMORYTYPE_DEVICE also allows host pointers to pinned memory that the driver allocated,
  // because of unified addressing.
  const bool device = is_alias(from) || (target.owner && !target.owner->registered);
  if (device || end.type != CU_MEMORYTYPE_DEVICE) return "";
  return hex(from) + " is not a device address";
}

// Resolves the address of the source or destination `end` of a copy. `name` is "source" or
// "destination" and appears in the error text.
void resolve_side(const CopyEnd& end, const CopyShape& shape, CopySide* side, const char* name) {
  require(end.lod == 0, CUDA_ERROR_INVALID_VALUE, "the level of detail of a copy must be 0");
  require(end.type >= CU_MEMORYTYPE_HOST && end.type <= CU_MEMORYTYPE_UNIFIED,
          CUDA_ERROR_INVALID_VALUE, "unknown memory type of a copy");
  const std::string why = end.type == CU_MEMORYTYPE_ARRAY ? resolve_array(end, shape, side)
                                                          : resolve_linear(end, shape, side);
  if (!why.empty()) {
    refuse(CUDA_ERROR_INVALID_VALUE, std::string("copy ") + name + ": " + why);
  }
}

void move_rows(const CopyWork& c, const char* from) {
  for (size_t slice = 0; slice < c.shape.slices; ++slice) {
    for (size_t row = 0; row < c.shape.rows; ++row) {
      std::memmove(c.dst.target.address + c.dst.offset(slice, row), from + c.src.offset(slice, row),
                   c.shape.row_bytes);
    }
  }
}

}  // namespace

size_t CopySide::extent(const CopyShape& shape) const {
  if (shape.empty()) return 0;
  return offset(shape.slices - 1, shape.rows - 1) + shape.row_bytes;
}

std::shared_ptr<CopyWork> make_copy(const CUDA_MEMCPY3D& p) {
  auto c = std::make_shared<CopyWork>();
  c->params = p;
  c->shape.row_bytes = p.WidthInBytes;
  c->shape.rows = std::max<size_t>(p.Height, 1);
  c->shape.slices = std::max<size_t>(p.Depth, 1);
  require(!overflows(p.src, c->shape) && !overflows(p.dst, c->shape), CUDA_ERROR_INVALID_VALUE,
          "the size of the copy or an offset exceeds the address space");
  resolve_side(p.src, c->shape, &c->src, "source");
  resolve_side(p.dst, c->shape, &c->dst, "destination");
  return c;
}

std::shared_ptr<FillWork> make_fill(const CUDA_MEMSET_NODE_PARAMS& p) {
  if (p.elementSize != 1 && p.elementSize != 2 && p.elementSize != 4) {
    refuse(CUDA_ERROR_INVALID_VALUE,
           "memset element size " + std::to_string(p.elementSize) + " is not 1, 2 or 4");
  }
  auto f = std::make_shared<FillWork>();
  f->params = p;
  const Wide row = Wide{p.width} * p.elementSize;
  f->rows = p.height == 0 ? 1 : p.height;
  const Wide size = row == 0 ? 0 : Wide{f->rows - 1} * p.pitch + row;
  require(row < kLimit && size < kLimit, CUDA_ERROR_INVALID_VALUE,
          "the size of the memset exceeds the address space");
  f->row_bytes = static_cast<size_t>(row);
  require(f->rows == 1 || (p.pitch >= f->row_bytes && p.pitch % p.elementSize == 0),
          CUDA_ERROR_INVALID_VALUE,
          "the memset pitch is less than a row, or not a multiple of the element size");
  const auto bytes = static_cast<size_t>(size);
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
  for (const Target* target : {&c.src.target, &c.dst.target}) {
    if (target->live()) continue;
    fault(CUDA_ERROR_ILLEGAL_ADDRESS,
          "use after free: a copy accesses " + target->owner->describe());
    return false;
  }
  const char* from = c.staged.empty() ? c.src.target.address : c.staged.data();
  return executor->guarded("copy", [&] { move_rows(c, from); });
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

// The copy follows the driver's rules for pageable memory (INVARIANTS.md C1). If the source is
// pageable, an asynchronous copy reads it before the call returns. If the destination is pageable,
// the copy is complete when the call returns.
CUresult enqueue_copy(const std::shared_ptr<CopyWork>& c, CUstream handle, bool wait,
                      bool read_now) {
  const auto stream = find_stream(handle);
  if (c->shape.empty() || capture_work(handle, Work(c))) return CUDA_SUCCESS;
  if (!wait && (read_now || c->src.target.owner == nullptr)) {
    const char* from = c->src.target.address;
    c->staged.assign(from, from + c->src.extent(c->shape));
  }
  wait = wait || c->dst.target.owner == nullptr;
  const OpRef op = enqueue(*stream, Work(c));
  return wait ? wait_op(op, "a copy to finish") : CUDA_SUCCESS;
}

CUresult enqueue_fill(const CUDA_MEMSET_NODE_PARAMS& params, CUstream handle, bool wait) {
  const auto stream = find_stream(handle);
  const auto f = make_fill(params);
  if (f->row_bytes == 0 || capture_work(handle, Work(f))) return CUDA_SUCCESS;
  const OpRef op = enqueue(*stream, Work(f));
  return wait ? wait_op(op, "a memset to finish") : CUDA_SUCCESS;
}

namespace {

// Implements the functions that copy contiguous memory.
CUresult copy(CopyEnd dst, CopyEnd src, size_t bytes, CUstream handle, bool wait) {
  find_stream(handle);
  return enqueue_copy(make_copy(CUDA_MEMCPY3D{src, dst, bytes, 1, 1}), handle, wait);
}

CUresult fill(CUdeviceptr dst, unsigned value, unsigned element, size_t count, CUstream handle,
              bool wait) {
  return enqueue_fill(CUDA_MEMSET_NODE_PARAMS{dst, 0, value, element, count, 1}, handle, wait);
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
  return enqueue_copy(make_copy(CUDA_MEMCPY3D{unified(src), unified(dst), size, 1, 1}), stream,
                      false, now);
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
    const CUresult result = enqueue_copy(item.first, stream, false, item.second);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
