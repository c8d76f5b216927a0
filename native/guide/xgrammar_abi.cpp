#include "xgrammar_abi.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace graft::guide::xgrammar {
namespace {

using tvm_ffi::Any;
using tvm_ffi::Bytes;
using tvm_ffi::DLTensor;
using tvm_ffi::Object;

constexpr char kMatcherKey[] = "xgrammar.tvm_ffi_binding.GrammarMatcher";

struct Api {
  void (*get_version)(tvm_ffi::Version*) = nullptr;
  int (*key_to_index)(const Bytes*, int32_t*) = nullptr;
  const tvm_ffi::TypeInfo* (*type_info)(int32_t) = nullptr;
  int (*call)(void*, Any*, int32_t, Any*) = nullptr;
  void (*move_raised)(void**) = nullptr;
  int (*dec_ref)(void*) = nullptr;

  int32_t matcher_type = 0;
  void* fill = nullptr;
  void* accept = nullptr;
  void* rollback = nullptr;
  void* is_terminated = nullptr;
};

Api api;

std::string string_of(const Bytes& bytes) { return {bytes.data, bytes.size}; }

template <typename Function>
void symbol(void* library, const char* name, Function* out) {
  void* address = dlsym(library, name);
  if (address == nullptr) throw std::runtime_error(std::string("TVM-FFI has no symbol ") + name);
  *out = reinterpret_cast<Function>(address);
}

// The method's function object: owned by the type table, which lives as long as the process.
void* method(const tvm_ffi::TypeInfo& type, const std::string& name, const std::string& arguments) {
  for (int i = 0; i < type.num_methods; ++i) {
    const tvm_ffi::MethodInfo& found = type.methods[i];
    if (string_of(found.name) != name) continue;
    // The metadata is JSON that holds the signature as an escaped JSON string.
    std::string metadata = string_of(found.metadata);
    metadata.erase(std::remove(metadata.begin(), metadata.end(), '\\'), metadata.end());
    const std::string expected = "\"args\":[" + arguments + "]}";
    if (metadata.find(expected) == std::string::npos ||
        found.method.type_index != tvm_ffi::kFunction) {
      throw std::runtime_error("XGrammar's matcher method " + name +
                               " has another signature than the pinned release: " + metadata);
    }
    return found.method.pointer;
  }
  throw std::runtime_error("XGrammar's matcher has no method " + name);
}

Any self(void* matcher) {
  Any any{};
  any.type_index = static_cast<Object*>(matcher)->type_index;
  any.object = static_cast<Object*>(matcher);
  return any;
}

Any integer(int64_t value, int32_t type = tvm_ffi::kInt) {
  Any any{};
  any.type_index = type;
  any.integer = value;
  return any;
}

void keep_message(ErrorText* error) {
  void* raised = nullptr;
  api.move_raised(&raised);
  if (raised == nullptr) return;
  const auto* cell = reinterpret_cast<const tvm_ffi::ErrorCell*>(static_cast<const char*>(raised) +
                                                                 sizeof(Object));
  error->keep(cell->message.data, cell->message.size);
  api.dec_ref(raised);
}

Answer call(void* function, Any* arguments, int32_t count, ErrorText* error) {
  Any result{};  // TVM-FFI requires None on entry
  if (api.call(function, arguments, count, &result) != 0) {
    keep_message(error);
    return Answer::kFailed;
  }
  // rollback answers None, everything else a bool
  return result.type_index == tvm_ffi::kNone || result.integer != 0 ? Answer::kYes : Answer::kNo;
}

}  // namespace

void load(const char* tvm_ffi_library) {
  if (api.is_terminated != nullptr) return;
  void* library = dlopen(tvm_ffi_library, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    throw std::runtime_error(std::string("TVM-FFI is not loaded from ") + tvm_ffi_library);
  }
  Api loaded;
  symbol(library, "TVMFFIGetVersion", &loaded.get_version);
  symbol(library, "TVMFFITypeKeyToIndex", &loaded.key_to_index);
  symbol(library, "TVMFFIGetTypeInfo", &loaded.type_info);
  symbol(library, "TVMFFIFunctionCall", &loaded.call);
  symbol(library, "TVMFFIErrorMoveFromRaised", &loaded.move_raised);
  symbol(library, "TVMFFIObjectDecRef", &loaded.dec_ref);

  tvm_ffi::Version version{};
  loaded.get_version(&version);
  if (version.major != 0 || version.minor != 1) {
    throw std::runtime_error("TVM-FFI's C ABI is version " + std::to_string(version.major) + "." +
                             std::to_string(version.minor) + ", graft knows 0.1");
  }
  const Bytes key{kMatcherKey, sizeof(kMatcherKey) - 1};
  if (loaded.key_to_index(&key, &loaded.matcher_type) != 0) {
    throw std::runtime_error(std::string("XGrammar has not registered ") + kMatcherKey);
  }
  const tvm_ffi::TypeInfo& type = *loaded.type_info(loaded.matcher_type);
  const std::string me = std::string("{\"type\":\"") + kMatcherKey + "\"}";
  const std::string boolean = "{\"type\":\"bool\"}", number = "{\"type\":\"int\"}";
  const std::string any = "{\"type\":\"Any\"}", none = "{\"type\":\"None\"}";
  loaded.fill = method(type, "fill_next_token_bitmask",
                       boolean + "," + me + "," + any + "," + number + "," + boolean);
  loaded.accept = method(type, "accept_token", boolean + "," + me + "," + number + "," + boolean);
  loaded.rollback = method(type, "rollback", none + "," + me + "," + number);
  loaded.is_terminated = method(type, "is_terminated", boolean + "," + me);
  api = loaded;
}

Matcher::Matcher(void* handle, const uint32_t* acceptable, int64_t vocab_size)
    : handle_(handle), acceptable_(acceptable), vocab_size_(vocab_size) {
  if (handle == nullptr || acceptable == nullptr || api.is_terminated == nullptr) {
    throw std::invalid_argument("an XGrammar matcher needs a handle, ids and a loaded library");
  }
  if (static_cast<const Object*>(handle)->type_index != api.matcher_type) {
    throw std::invalid_argument("the handle is not one of an XGrammar matcher");
  }
  for (int64_t w = 0; w < (vocab_size + 31) / 32; ++w) {
    if (acceptable[w] != ~0u) partial_.push_back(static_cast<int32_t>(w));
  }
}

Answer Matcher::accept(int32_t token, ErrorText* error) noexcept {
  // XGrammar prints a warning for these
  if (token < 0 || token >= vocab_size_) return Answer::kNo;
  if (((acceptable_[token >> 5] >> (token & 31)) & 1u) == 0) return Answer::kNo;
  const Answer terminated = is_terminated(error);
  if (terminated != Answer::kNo) {
    return terminated == Answer::kYes ? Answer::kNo : Answer::kFailed;
  }
  Any arguments[3] = {self(handle_), integer(token), integer(0, tvm_ffi::kBool)};
  return call(api.accept, arguments, 3, error);
}

Filled Matcher::fill(int32_t* row, int64_t words, ErrorText* error) noexcept {
  DLTensor tensor{};
  tensor.data = row;
  tensor.device_type = tvm_ffi::kDLCPU;
  tensor.ndim = 1;
  tensor.type_code = tvm_ffi::kDLInt;
  tensor.type_bits = 32;
  tensor.type_lanes = 1;
  tensor.shape = &words;
  Any any{};
  any.type_index = tvm_ffi::kDLTensorPtr;
  any.pointer = &tensor;
  Any arguments[4] = {self(handle_), any, integer(0), integer(0, tvm_ffi::kBool)};
  if (call(api.fill, arguments, 4, error) == Answer::kFailed) return Filled::kFailed;
  // XGrammar sets bits beyond the vocabulary too, and those of stop ids of other requests
  for (const int32_t w : partial_) row[w] &= static_cast<int32_t>(acceptable_[w]);
  return Filled::kMask;
}

Answer Matcher::rollback(int32_t tokens, ErrorText* error) noexcept {
  Any arguments[2] = {self(handle_), integer(tokens)};
  return call(api.rollback, arguments, 2, error);
}

Answer Matcher::is_terminated(ErrorText* error) noexcept {
  Any arguments[1] = {self(handle_)};
  return call(api.is_terminated, arguments, 1, error);
}

}  // namespace graft::guide::xgrammar
