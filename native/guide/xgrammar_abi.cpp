// XGrammar's matcher methods, called through TVM-FFI's C ABI: no torch, no Python, no GIL.
//
// Invariants
// 1. load() runs once, on any thread, before the first call. It checks the ABI version and the
//    signature of each method, and throws std::runtime_error that names the difference.
// 2. A matcher handle is a borrowed reference: the caller keeps the Python object alive.
// 3. A matcher is used by one thread at a time; different matchers may be used concurrently.
// 4. XGrammar prints a warning for an id that is out of range or without text and for a token after
//    termination, and raises an error if fill is called after termination. Callers check first.
#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "matcher.h"
#include "tvm_ffi_abi.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

using namespace tvm_ffi;  // NOLINT

constexpr char kMatcherKey[] = "xgrammar.tvm_ffi_binding.GrammarMatcher";

struct Api {
  void (*get_version)(Version*) = nullptr;
  int (*key_to_index)(const Bytes*, int32_t*) = nullptr;
  const TypeInfo* (*type_info)(int32_t) = nullptr;
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

// Returns the function object of a method of XGrammar's matcher. TVM-FFI's type table owns the
// object until the process ends. `result` and `parameters` are the expected types in the notation
// of XGrammar's metadata. Before release 0.2.9, the metadata has one list of the result type and
// the parameter types. Since then, it has one list for the result and one for the parameters.
void* method(const TypeInfo& type, const std::string& name, const std::string& result,
             const std::string& parameters) {
  for (int i = 0; i < type.num_methods; ++i) {
    const MethodInfo& found = type.methods[i];
    if (string_of(found.name) != name) continue;
    // The metadata is JSON that holds the signature as an escaped JSON string.
    std::string metadata = string_of(found.metadata);
    metadata.erase(std::remove(metadata.begin(), metadata.end(), '\\'), metadata.end());
    const std::string one_list = "\"args\":[" + result + "," + parameters + "]}";
    const std::string two_lists =
        "\"named_args\":{\"return\":[" + result + "],\"params\":[" + parameters + "]}";
    const bool known = metadata.find(one_list) != std::string::npos ||
                       metadata.find(two_lists) != std::string::npos;
    if (!known || found.method.type_index != kFunction) {
      throw std::runtime_error("XGrammar's matcher method " + name +
                               " has another signature than the tested releases: " + metadata);
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

Any integer(int64_t value, int32_t type = kInt) {
  Any any{};
  any.type_index = type;
  any.integer = value;
  return any;
}

void keep_message(ErrorText* error) {
  void* raised = nullptr;
  api.move_raised(&raised);
  if (raised == nullptr) return;
  const auto* cell =
      reinterpret_cast<const ErrorCell*>(static_cast<const char*>(raised) + sizeof(Object));
  error->keep(cell->message.data, cell->message.size);
  api.dec_ref(raised);
}

Outcome call(void* function, Any* arguments, int32_t count, ErrorText* error) {
  Any result{};  // TVM-FFI requires None on entry
  if (api.call(function, arguments, count, &result) != 0) {
    keep_message(error);
    return Outcome::kFailed;
  }
  // rollback() returns None; all other methods return a bool
  return result.type_index == kNone || result.integer != 0 ? Outcome::kYes : Outcome::kNo;
}

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

  Version version{};
  loaded.get_version(&version);
  if (version.major != 0 || version.minor != 1) {
    throw std::runtime_error("TVM-FFI's C ABI is version " + std::to_string(version.major) + "." +
                             std::to_string(version.minor) + ", graft knows 0.1");
  }
  const Bytes key{kMatcherKey, sizeof(kMatcherKey) - 1};
  if (loaded.key_to_index(&key, &loaded.matcher_type) != 0) {
    throw std::runtime_error(std::string("XGrammar has not registered ") + kMatcherKey);
  }
  const TypeInfo& type = *loaded.type_info(loaded.matcher_type);
  const std::string me = std::string("{\"type\":\"") + kMatcherKey + "\"}";
  const std::string boolean = "{\"type\":\"bool\"}", number = "{\"type\":\"int\"}";
  const std::string any = "{\"type\":\"Any\"}", none = "{\"type\":\"None\"}";
  loaded.fill = method(type, "fill_next_token_bitmask", boolean,
                       me + "," + any + "," + number + "," + boolean);
  loaded.accept = method(type, "accept_token", boolean, me + "," + number + "," + boolean);
  loaded.rollback = method(type, "rollback", none, me + "," + number);
  loaded.is_terminated = method(type, "is_terminated", boolean, me);
  api = loaded;
}

// Calls a matcher object of XGrammar's Python module, to which this class has a borrowed reference.
class XGrammarMatcher final : public NativeMatcher {
 public:
  // Throws std::invalid_argument if `handle` does not refer to a matcher. The arrays are borrowed
  // and have one bit per id. In `acceptable`, the bits of the matcher's stop ids and of the ids
  // whose text can be part of UTF-8 are set.
  //
  // XGrammar allows encoded surrogates (ED A0 80 to ED BF BF) and some other bytes that are not
  // UTF-8. These bytes differ from UTF-8 in the second byte of a character. Some first bytes, such
  // as ED, are called leads here: not every continuation byte may follow them in UTF-8. A token may
  // end with a lead; the next token must then begin with an allowed second byte. `ends_with` has
  // one row per lead, with the ids whose text ends with the lead. `follows` has one row per lead,
  // with the ids that are legal after such an id.
  XGrammarMatcher(void* handle, const uint32_t* acceptable, const uint32_t* ends_with,
                  const uint32_t* follows, int32_t leads, int64_t vocab_size)
      : handle_(handle),
        acceptable_(acceptable),
        ends_with_(ends_with),
        follows_(follows),
        leads_(leads),
        vocab_size_(vocab_size),
        words_((vocab_size + 31) / 32) {
    if (handle == nullptr || acceptable == nullptr || ends_with == nullptr || follows == nullptr ||
        api.is_terminated == nullptr) {
      throw std::invalid_argument("an XGrammar matcher needs a handle, ids and a loaded library");
    }
    if (static_cast<const Object*>(handle)->type_index != api.matcher_type) {
      throw std::invalid_argument("the handle is not one of an XGrammar matcher");
    }
    for (int64_t w = 0; w < words_; ++w) {
      if (acceptable[w] != ~0u) partial_.push_back(static_cast<int32_t>(w));
    }
    after_lead_.reserve(1024);
  }

  Outcome accept(int32_t token, ErrorText* error) noexcept override {
    // XGrammar would print a warning for an id that is out of range or not acceptable.
    if (token < 0 || token >= vocab_size_) return Outcome::kNo;
    if (!has(acceptable_, token)) return Outcome::kNo;
    if (const uint32_t* follows = following(); follows != nullptr && !has(follows, token)) {
      return Outcome::kNo;
    }
    const Outcome terminated = is_terminated(error);
    if (terminated != Outcome::kNo) {
      return terminated == Outcome::kYes ? Outcome::kNo : Outcome::kFailed;
    }
    Any arguments[3] = {self(handle_), integer(token), integer(0, kBool)};
    const Outcome accepted = call(api.accept, arguments, 3, error);
    if (accepted != Outcome::kYes) return accepted;
    ++size_;
    for (int32_t lead = 0; lead < leads_; ++lead) {
      if (has(ends_with_ + lead * words_, token)) after_lead_.push_back({size_, lead});
    }
    return Outcome::kYes;
  }

  Filled fill(int32_t* row, int64_t words, int32_t, ErrorText* error) noexcept override {
    DLTensor tensor{};
    tensor.data = row;
    tensor.device_type = kDLCPU;
    tensor.ndim = 1;
    tensor.type_code = kDLInt;
    tensor.type_bits = 32;
    tensor.type_lanes = 1;
    tensor.shape = &words;
    Any any{};
    any.type_index = kDLTensorPtr;
    any.pointer = &tensor;
    Any arguments[4] = {self(handle_), any, integer(0), integer(0, kBool)};
    if (call(api.fill, arguments, 4, error) == Outcome::kFailed) return Filled::kFailed;
    // XGrammar also sets bits beyond the vocabulary, and bits of stop ids that this request does
    // not have. Clear these bits.
    for (const int32_t w : partial_) row[w] &= static_cast<int32_t>(acceptable_[w]);
    if (const uint32_t* follows = following(); follows != nullptr) {
      for (int64_t w = 0; w < words; ++w) row[w] &= static_cast<int32_t>(follows[w]);
    }
    return Filled::kMask;
  }

  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override {
    Any arguments[2] = {self(handle_), integer(tokens)};
    const Outcome outcome = call(api.rollback, arguments, 2, error);
    if (outcome == Outcome::kFailed) return outcome;
    size_ -= tokens;
    while (!after_lead_.empty() && after_lead_.back().size > size_) after_lead_.pop_back();
    return outcome;
  }

  Outcome is_terminated(ErrorText* error) noexcept override {
    Any arguments[1] = {self(handle_)};
    return call(api.is_terminated, arguments, 1, error);
  }

 private:
  static bool has(const uint32_t* ids, int32_t token) noexcept {
    return ((ids[token >> 5] >> (token & 31)) & 1u) != 0;
  }
  // If the accepted text ends with a lead (a first byte of a character after which some second
  // bytes are not UTF-8), returns the ids that are legal after it; otherwise null.
  const uint32_t* following() const noexcept {
    if (after_lead_.empty() || after_lead_.back().size != size_) return nullptr;
    return follows_ + after_lead_.back().lead * words_;
  }

  // An accepted token that ends with a lead (see the constructor). `size` is the number of accepted
  // tokens up to this token. Row `lead` of `ends_with_` and `follows_` belongs to the lead.
  struct AfterLead {
    int64_t size;
    int32_t lead;
  };

  void* handle_;
  const uint32_t* acceptable_;
  const uint32_t* ends_with_;
  const uint32_t* follows_;
  int32_t leads_;
  int64_t vocab_size_;
  int64_t words_;
  int64_t size_ = 0;  // number of accepted tokens
  std::vector<AfterLead> after_lead_;
  std::vector<int32_t> partial_;  // indices of mask words with the bit of an unacceptable id
};

}  // namespace

void bind_xgrammar(nb::module_& guide) {
  guide.def("load_xgrammar", &load, nb::arg("tvm_ffi_library"));
  nb::class_<XGrammarMatcher, NativeMatcher>(guide, "XGrammarMatcher")
      .def(
          "__init__",
          [](XGrammarMatcher* self, uintptr_t handle, uintptr_t acceptable, uintptr_t ends_with,
             uintptr_t follows, int32_t leads, int64_t vocab_size) {
            new (self) XGrammarMatcher(
                reinterpret_cast<void*>(handle), reinterpret_cast<const uint32_t*>(acceptable),
                reinterpret_cast<const uint32_t*>(ends_with),
                reinterpret_cast<const uint32_t*>(follows), leads, vocab_size);
          },
          nb::arg("handle"), nb::arg("acceptable"), nb::arg("ends_with"), nb::arg("follows"),
          nb::arg("leads"), nb::arg("vocab_size"));
}

}  // namespace graft::guide
