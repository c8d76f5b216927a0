// XGrammar's matcher methods, called through TVM-FFI's C ABI: no torch, no Python, no GIL.
//
// 1. load() runs once, on any thread, before the first call; it checks the ABI version and the
//    signature of each method and throws std::runtime_error naming what differs.
// 2. A matcher handle is a borrowed reference: whoever makes the call keeps the Python object
// alive.
// 3. One matcher is used by one thread at a time; different matchers may be used at once.
// 4. XGrammar prints a warning when it is handed an id that is out of range or no text, or a token
//    after termination, and raises when asked to fill after termination. Callers check first.
#pragma once

#include <cstdint>

#include "tvm_ffi_abi.h"

namespace graft::guide {

// The result of a call that may fail inside XGrammar.
enum class Answer { kNo = 0, kYes = 1, kFailed = -1 };

// First failure's text, kept without allocating.
struct ErrorText {
  char text[256] = {};
};

namespace xgrammar {

void load(const char* tvm_ffi_library);
bool is_matcher(const void* handle);

Answer fill(void* matcher, tvm_ffi::DLTensor* row, ErrorText* error) noexcept;
Answer accept(void* matcher, int32_t token, ErrorText* error) noexcept;
Answer rollback(void* matcher, int32_t tokens, ErrorText* error) noexcept;
Answer is_terminated(void* matcher, ErrorText* error) noexcept;

}  // namespace xgrammar
}  // namespace graft::guide
