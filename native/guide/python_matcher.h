// A matcher that a backend in Python brings, called through the gate (hostwork/gate.h).
//
// 1. A call takes the GIL with the thread's kept Python thread state, and gives it back. So nobody
//    waits for a step or for a thread of the pool while holding the GIL.
// 2. The Python matcher owns this object, which knows it by a weak reference: who publishes the one
//    keeps the other, so no thread of the worker drops a last reference.
// 3. Rows go through an array of this object's: Python never sees the exchange's memory.
// 4. What is raised fails the slot, with its text.
#pragma once

#include <Python.h>

#include "matcher.h"

namespace graft::guide {

class PythonMatcher final : public NativeMatcher {
 public:
  // `row`: a NumPy array of `words` int32, whose memory is `bits`. All with the GIL held.
  PythonMatcher(PyObject* matcher, PyObject* row, const int32_t* bits, int64_t words,
                int64_t vocab_size);
  ~PythonMatcher() override;

  Answer accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override;
  Answer rollback(int32_t tokens, ErrorText* error) noexcept override;
  Answer is_terminated(ErrorText* error) noexcept override;

 private:
  template <typename... Arguments>
  Answer ask(ErrorText* error, const char* method, const char* format,
             Arguments... arguments) noexcept;

  PyObject* const matcher_;  // a weak reference
  PyObject* const row_;
  const int32_t* const bits_;
  const int64_t words_;
  const int32_t last_word_;
};

}  // namespace graft::guide
