// Stream attributes and stream callbacks.
#include <cstring>

#include "capture.h"

using namespace softcuda;

extern "C" CUresult cuLaunchHostFunc(CUstream, CUhostFn, void*);

namespace {

using StreamCallback = void (*)(CUstream, CUresult, void*);

std::mutex& g_attributes_mutex = *new std::mutex;

// Refuses an unknown attribute.
void check_attribute(int attribute) {
  switch (attribute) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      return;
    default:
      refuse(CUDA_ERROR_INVALID_VALUE, "streams have no attribute " + std::to_string(attribute));
  }
}

AttributeValue default_value(const Stream& stream, int attribute) {
  AttributeValue value{};
  if (attribute == CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP) {
    // The default memory synchronization domains: 0 (value[0]) for local accesses, 1 for remote
    // ones.
    value[1] = 1;
    return value;
  }
  int number = 0;
  if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) number = stream.priority;
  if (attribute == CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY) number = 1;  // AUTO
  std::memcpy(value.data(), &number, sizeof number);
  return value;
}

// A callback of cuStreamAddCallback that was not called yet.
struct PendingCallback {
  StreamCallback fn;
  CUstream stream;
  void* data;
};

void call_and_delete(void* record) {
  const std::unique_ptr<PendingCallback> pending(static_cast<PendingCallback*>(record));
  pending->fn(pending->stream, CUDA_SUCCESS, pending->data);
}

}  // namespace

// The attributes are stored and returned. They have no other effect.
SC_API(cuStreamGetAttribute, 11000, 0, CUstream, handle, int, attribute, AttributeValue*, out) {
  const auto stream = find_stream(handle);
  check_attribute(attribute);
  require(out != nullptr);
  std::lock_guard<std::mutex> lock(g_attributes_mutex);
  const auto found = stream->attributes.find(attribute);
  *out = found != stream->attributes.end() ? found->second : default_value(*stream, attribute);
}

SC_API(cuStreamSetAttribute, 11000, 0, CUstream, handle, int, attribute, const AttributeValue*,
       value) {
  const auto stream = find_stream(handle);
  check_attribute(attribute);
  require(value != nullptr);
  std::lock_guard<std::mutex> lock(g_attributes_mutex);
  stream->attributes[attribute] = *value;
}

SC_API(cuStreamCopyAttributes, 11000, 0, CUstream, to, CUstream, from) {
  const auto target = find_stream(to);
  const auto source = find_stream(from);
  std::lock_guard<std::mutex> lock(g_attributes_mutex);
  target->attributes = source->attributes;
}

// The callback runs like a host function. It is not called after a fault.
SC_API_CODE(cuStreamAddCallback, 5000, 0, CUstream, handle, StreamCallback, fn, void*, data,
            unsigned, flags) {
  find_stream(handle);
  require(fn != nullptr && flags == 0);
  capture_reject_stream_sync(handle);
  auto record = std::make_unique<PendingCallback>(PendingCallback{fn, handle, data});
  const CUresult result = cuLaunchHostFunc(handle, call_and_delete, record.get());
  if (result == CUDA_SUCCESS) record.release();
  return result;
}
