// Settings of GPU core dumps. The soft device stores and returns them. It writes no core dumps;
// softcuda_last_fault() describes a fault instead.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime.h"

using namespace softcuda;

namespace {

enum Setting : int {
  kEnableOnException = 1,
  kTriggerHost = 2,
  kLightweight = 3,
  kEnableUserTrigger = 4,
  kFile = 5,
  kPipe = 6,
  kGenerationFlags = 7
};
constexpr size_t kMaxText = 1023;

std::mutex& g_dump_mutex = *new std::mutex;

// The value of each setting as bytes: a bool, a number, or the characters of a file name.
std::map<int, std::string>& values() {
  static auto& table = *[] {
    char host[256] = "localhost";
    gethostname(host, sizeof host - 1);
    const std::string suffix = std::string(".") + host + "." + std::to_string(getpid());
    const std::string no(1, '\0'), yes(1, '\1');
    return new std::map<int, std::string>{{kEnableOnException, no},
                                          {kTriggerHost, yes},
                                          {kLightweight, no},
                                          {kEnableUserTrigger, no},
                                          {kFile, "core.cuda" + suffix},
                                          {kPipe, "corepipe.cuda" + suffix},
                                          {kGenerationFlags, std::string(4, '\0')}};
  }();
  return table;
}

bool is_text(int setting) { return setting == kFile || setting == kPipe; }

std::string& value_of(int setting) {
  const auto found = values().find(setting);
  require(found != values().end(), CUDA_ERROR_INVALID_VALUE, "unknown core dump setting");
  return found->second;
}

// Copies the value of a setting to `out` and its size to `size`. If `out` is null, only the size is
// returned. A text ends with a null byte, which the size includes.
void get(int setting, void* out, size_t* size) {
  require(size != nullptr);
  std::lock_guard<std::mutex> lock(g_dump_mutex);
  const std::string& value = value_of(setting);
  const size_t bytes = value.size() + (is_text(setting) ? 1 : 0);
  if (out != nullptr) {
    const size_t copied = std::min(*size, bytes);
    std::memcpy(out, value.c_str(), copied);
    if (is_text(setting) && copied > 0) static_cast<char*>(out)[copied - 1] = '\0';
  }
  *size = bytes;
}

// Changes a setting to the first *size bytes of `value`. If the setting has fewer bytes, only these
// are read. `size` receives the number of bytes that were read.
void set(int setting, const void* value, size_t* size) {
  require(value != nullptr && size != nullptr);
  std::lock_guard<std::mutex> lock(g_dump_mutex);
  std::string& stored = value_of(setting);
  const auto* bytes = static_cast<const char*>(value);
  if (is_text(setting)) {
    stored.assign(bytes, strnlen(bytes, std::min(*size, kMaxText)));
    *size = stored.size();
    return;
  }
  require(*size >= stored.size(), CUDA_ERROR_INVALID_VALUE, "the value is too short");
  std::memcpy(stored.data(), bytes, stored.size());
  *size = stored.size();
}

}  // namespace

SC_API(cuCoredumpGetAttribute, 12010, kContext, int, setting, void*, out, size_t*, size) {
  get(setting, out, size);
}
SC_API(cuCoredumpGetAttributeGlobal, 12010, 0, int, setting, void*, out, size_t*, size) {
  get(setting, out, size);
}
SC_API(cuCoredumpSetAttribute, 12010, kContext, int, setting, const void*, value, size_t*, size) {
  set(setting, value, size);
}
SC_API(cuCoredumpSetAttributeGlobal, 12010, 0, int, setting, const void*, value, size_t*, size) {
  set(setting, value, size);
}
