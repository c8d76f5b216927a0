// Entry points of CUDA arrays.
#include "arrays.h"

#include <algorithm>

#include "capture.h"

namespace softcuda {
namespace {

auto& arrays =
    *new Handles<Array>(0x5c000000000000, "the array handle is unknown or was destroyed");

// Returns the size of one channel of an element in bytes; 0 for a format that is unknown or not
// implemented.
size_t channel_bytes(int format) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4;
    default:
      return 0;
  }
}

void check(const CUDA_ARRAY3D_DESCRIPTOR& d) {
  const size_t bytes = channel_bytes(d.Format);
  require(bytes != 0, CUDA_ERROR_INVALID_VALUE, "the format of the array is not implemented");
  require(d.NumChannels == 1 || d.NumChannels == 2 || d.NumChannels == 4, CUDA_ERROR_INVALID_VALUE,
          "an array has 1, 2 or 4 channels");
  require(d.Width > 0, CUDA_ERROR_INVALID_VALUE, "the width of the array is 0");
  const bool layers = (d.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
  require(d.Height > 0 || d.Depth == 0 || layers, CUDA_ERROR_INVALID_VALUE,
          "an array with a depth needs a height or layers");
  require(d.Flags <= CUDA_ARRAY3D_ALL, CUDA_ERROR_INVALID_VALUE, "unknown flags of an array");
  require((d.Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) == 0,
          CUDA_ERROR_NOT_SUPPORTED, "sparse arrays are not implemented");
  size_t total = bytes * d.NumChannels;
  for (const size_t count :
       {d.Width, std::max<size_t>(d.Height, 1), std::max<size_t>(d.Depth, 1)}) {
    require(!__builtin_mul_overflow(total, count, &total), CUDA_ERROR_INVALID_VALUE,
            "the array is too large");
  }
}

void create(void** out, const CUDA_ARRAY3D_DESCRIPTOR& descriptor) {
  check(descriptor);
  auto array = std::make_shared<Array>();
  array->descriptor = descriptor;
  array->shape.row_bytes =
      descriptor.Width * descriptor.NumChannels * channel_bytes(descriptor.Format);
  array->shape.rows = std::max<size_t>(descriptor.Height, 1);
  array->shape.slices = std::max<size_t>(descriptor.Depth, 1);
  array->memory =
      allocate_for_module(array->shape.row_bytes * array->shape.rows * array->shape.slices);
  array->handle = arrays.add(array);
  *out = array->handle;
}

CopyEnd linear(CUmemorytype type, const void* host, CUdeviceptr device) {
  CopyEnd end{};
  end.type = type;
  end.host = host;
  end.device = device;
  return end;
}
CopyEnd host_end(const void* p) { return linear(CU_MEMORYTYPE_HOST, p, 0); }
CopyEnd device_end(CUdeviceptr p) { return linear(CU_MEMORYTYPE_DEVICE, nullptr, p); }
CopyEnd array_end(void* array, size_t offset) {
  CopyEnd end{};
  end.type = CU_MEMORYTYPE_ARRAY;
  end.array = array;
  end.x_in_bytes = offset;
  return end;
}

CUresult copy_bytes(const CopyEnd& dst, const CopyEnd& src, size_t bytes, CUstream stream,
                    bool wait) {
  return enqueue_copy(make_copy(CUDA_MEMCPY3D{src, dst, bytes, 1, 1}), stream, wait);
}

}  // namespace

std::string resolve_array(const CopyEnd& end, const CopyShape& shape, CopySide* side) {
  const std::shared_ptr<Array> array = arrays.find(end.array);
  const CopyShape& whole = array->shape;
  side->row_pitch = whole.row_bytes;
  side->slice_pitch = whole.row_bytes * whole.rows;
  const bool one_row = shape.rows == 1 && shape.slices == 1;
  // A copy of one row may be longer than a row of the array; it then continues in the next row.
  const size_t limit = one_row ? side->slice_pitch * whole.slices : whole.row_bytes;
  const auto fits = [](size_t first, size_t count, size_t size) {
    return first <= size && count <= size - first;
  };
  const size_t from = side->offset(end.z, end.y) + end.x_in_bytes;
  if (!fits(end.y, shape.rows, whole.rows) || !fits(end.z, shape.slices, whole.slices) ||
      !fits(end.x_in_bytes, shape.row_bytes, limit) ||
      (one_row && !fits(from, shape.row_bytes, limit))) {
    return "the copy exceeds an array of " + std::to_string(whole.row_bytes) + " bytes by " +
           std::to_string(whole.rows) + " rows by " + std::to_string(whole.slices) + " slices";
  }
  side->target = {array->memory, array->memory->storage + from};
  return "";
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuArrayCreate_v2, 3020, kContext | kUnsafe, void**, out, const CUDA_ARRAY_DESCRIPTOR*, d) {
  require(out != nullptr && d != nullptr);
  create(out, CUDA_ARRAY3D_DESCRIPTOR{d->Width, d->Height, 0, d->Format, d->NumChannels, 0});
}

SC_API(cuArray3DCreate_v2, 3020, kContext | kUnsafe, void**, out, const CUDA_ARRAY3D_DESCRIPTOR*,
       descriptor) {
  require(out != nullptr && descriptor != nullptr);
  create(out, *descriptor);
}

SC_API(cuArrayDestroy, 2000, kContext | kUnsafe, void*, handle) {
  wait_to_free("cuArrayDestroy: all work to finish");
  free_for_module(arrays.remove(handle)->memory);
}

SC_API(cuArrayGetDescriptor_v2, 3020, kContext, CUDA_ARRAY_DESCRIPTOR*, out, void*, handle) {
  const CUDA_ARRAY3D_DESCRIPTOR d = arrays.find(handle)->descriptor;
  require(out != nullptr);
  *out = {d.Width, d.Height, d.Format, d.NumChannels};
}

SC_API(cuArray3DGetDescriptor_v2, 3020, kContext, CUDA_ARRAY3D_DESCRIPTOR*, out, void*, handle) {
  const auto array = arrays.find(handle);
  require(out != nullptr);
  *out = array->descriptor;
}

SC_API_CODE(cuMemcpyHtoA_v2, 3020, kContext | kUnsafe, void*, array, size_t, offset, const void*,
            src, size_t, bytes) {
  return copy_bytes(array_end(array, offset), host_end(src), bytes, nullptr, true);
}

SC_API_CODE(cuMemcpyHtoAAsync_v2, 3020, kContext, void*, array, size_t, offset, const void*, src,
            size_t, bytes, CUstream, stream) {
  return copy_bytes(array_end(array, offset), host_end(src), bytes, stream, false);
}

SC_API_CODE(cuMemcpyAtoH_v2, 3020, kContext | kUnsafe, void*, dst, void*, array, size_t, offset,
            size_t, bytes) {
  return copy_bytes(host_end(dst), array_end(array, offset), bytes, nullptr, true);
}

SC_API_CODE(cuMemcpyAtoHAsync_v2, 3020, kContext, void*, dst, void*, array, size_t, offset, size_t,
            bytes, CUstream, stream) {
  return copy_bytes(host_end(dst), array_end(array, offset), bytes, stream, false);
}

SC_API_CODE(cuMemcpyDtoA_v2, 3020, kContext | kUnsafe, void*, array, size_t, offset, CUdeviceptr,
            src, size_t, bytes) {
  return copy_bytes(array_end(array, offset), device_end(src), bytes, nullptr, true);
}

SC_API_CODE(cuMemcpyAtoD_v2, 3020, kContext | kUnsafe, CUdeviceptr, dst, void*, array, size_t,
            offset, size_t, bytes) {
  return copy_bytes(device_end(dst), array_end(array, offset), bytes, nullptr, true);
}

SC_API_CODE(cuMemcpyAtoA_v2, 3020, kContext | kUnsafe, void*, dst, size_t, dst_offset, void*, src,
            size_t, src_offset, size_t, bytes) {
  return copy_bytes(array_end(dst, dst_offset), array_end(src, src_offset), bytes, nullptr, true);
}
