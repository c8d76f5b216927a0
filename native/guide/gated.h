// A matcher that can be made to wait: what tests of late slots are driven by, instead of the clock.
#pragma once

#include <unistd.h>

#include "matcher.h"

namespace graft::guide {

// Calls of accept() and fill() are counted in gate[2]. From the gate[0]-th on they wait until
// gate[0] is 0; 0: none does. gate[1] is how many wait now.
class GatedMatcher final : public NativeMatcher {
 public:
  GatedMatcher(NativeMatcher* inner, int32_t* gate) : inner_(inner), gate_(gate) {}

  Answer accept(int32_t token, ErrorText* error) noexcept override {
    pass();
    return inner_->accept(token, error);
  }
  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override {
    pass();
    return inner_->fill(row, words, error);
  }
  Answer rollback(int32_t tokens, ErrorText* error) noexcept override {
    return inner_->rollback(tokens, error);
  }
  Answer is_terminated(ErrorText* error) noexcept override { return inner_->is_terminated(error); }

 private:
  void pass() noexcept {
    const int32_t call = __atomic_add_fetch(gate_ + 2, 1, __ATOMIC_ACQ_REL);
    const int32_t first = __atomic_load_n(gate_, __ATOMIC_ACQUIRE);
    if (first == 0 || call < first) return;
    __atomic_fetch_add(gate_ + 1, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(gate_, __ATOMIC_ACQUIRE) != 0) usleep(100);
    __atomic_fetch_sub(gate_ + 1, 1, __ATOMIC_ACQ_REL);
  }

  NativeMatcher* const inner_;
  int32_t* const gate_;
};

}  // namespace graft::guide
