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
  if (error->text[0] == '\0') {
    const size_t size = std::min(cell->message.size, sizeof(error->text) - 1);
    std::memcpy(error->text, cell->message.data, size);
    error->text[size] = '\0';
  }
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

bool is_matcher(const void* handle) {
  return static_cast<const Object*>(handle)->type_index == api.matcher_type;
}

Answer fill(void* matcher, DLTensor* row, ErrorText* error) noexcept {
  Any tensor{};
  tensor.type_index = tvm_ffi::kDLTensorPtr;
  tensor.pointer = row;
  Any arguments[4] = {self(matcher), tensor, integer(0), integer(0, tvm_ffi::kBool)};
  return call(api.fill, arguments, 4, error);
}

Answer accept(void* matcher, int32_t token, ErrorText* error) noexcept {
  Any arguments[3] = {self(matcher), integer(token), integer(0, tvm_ffi::kBool)};
  return call(api.accept, arguments, 3, error);
}

Answer rollback(void* matcher, int32_t tokens, ErrorText* error) noexcept {
  Any arguments[2] = {self(matcher), integer(tokens)};
  return call(api.rollback, arguments, 2, error);
}

Answer is_terminated(void* matcher, ErrorText* error) noexcept {
  Any arguments[1] = {self(matcher)};
  return call(api.is_terminated, arguments, 1, error);
}

}  // namespace graft::guide::xgrammar
