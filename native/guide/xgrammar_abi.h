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
#include <vector>

#include "matcher.h"
#include "tvm_ffi_abi.h"

namespace graft::guide {

namespace xgrammar {

void load(const char* tvm_ffi_library);
// A matcher made by XGrammar's Python-visible object, whose reference is borrowed.
class Matcher final : public NativeMatcher {
 public:
  // `acceptable`, borrowed: a bit per id that is text or one of the matcher's stop ids.
  // Throws std::invalid_argument when the handle is not one of a matcher.
  Matcher(void* handle, const uint32_t* acceptable, int64_t vocab_size);

  Answer accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override;
  Answer rollback(int32_t tokens, ErrorText* error) noexcept override;
  Answer is_terminated(ErrorText* error) noexcept override;

 private:
  void* handle_;
  const uint32_t* acceptable_;
  int64_t vocab_size_;
  std::vector<int32_t> partial_;  // words of a row in which some id is not acceptable
};

}  // namespace xgrammar
}  // namespace graft::guide
