// PythonMatcher, which calls a matcher that a backend defines as a Python class. The functions of
// hostwork/gate.h take the GIL for these calls.
//
// Invariants
// 1. A call takes the GIL with the thread's cached Python thread state. It releases the GIL before
//    it returns. A thread must not hold the GIL while it waits for a grammar step (worker.h) or a
//    pool thread.
// 2. The Python object owns the PythonMatcher, which has only a weak reference to the object. The
//    host keeps the Python object alive while a replay or a worker thread may use it, so no worker
//    thread drops the last reference.
// 3. Python code fills an array of the PythonMatcher, which then copies the array to the mask row.
//    Python code never accesses the pinned memory of the mask rows.
// 4. If a method of the Python object raises an exception, the request fails with the exception's
//    message.
#include <cxxabi.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "hostwork/gate.h"
#include "matcher.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

using Row = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class PythonMatcher final : public NativeMatcher {
 public:
  // `row` is a NumPy array of int32. The caller must hold the GIL.
  PythonMatcher(const nb::object& matcher, const nb::object& row, int64_t vocab_size)
      : matcher_(nb::steal(PyWeakref_NewRef(matcher.ptr(), nullptr))),
        row_(row),
        bits_(nb::cast<Row>(row)),
        last_word_(last_word_bits(vocab_size)) {
    if (!matcher_.is_valid()) PyErr_Clear();
    if (!matcher_.is_valid() || words() != (vocab_size + 31) / 32) {
      throw std::invalid_argument("a matcher in Python must allow weak references and fit its row");
    }
  }

  Outcome accept(int32_t token, ErrorText* error) noexcept override {
    return ask(error, "accept", "i", token);
  }
  Filled fill(int32_t* row, int64_t words, int32_t budget, ErrorText* error) noexcept override {
    if (words != this->words()) {
      error->keep("the mask row does not have the size of the matcher's vocabulary");
      return Filled::kFailed;
    }
    // A class that does not define distance() need not accept the argument `budget`.
    const Outcome filled = budget == kNoBudget ? ask(error, "fill", "O", row_.ptr())
                                               : ask(error, "fill", "Oi", row_.ptr(), budget);
    if (filled != Outcome::kYes) return filled == Outcome::kNo ? Filled::kFree : Filled::kFailed;
    std::copy(bits_.data(), bits_.data() + words, row);
    row[words - 1] &= last_word_;
    return Filled::kMask;
  }
  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override {
    const Outcome outcome = ask(error, "rollback", "i", tokens);
    return outcome == Outcome::kFailed ? outcome : Outcome::kYes;
  }
  Outcome is_terminated(ErrorText* error) noexcept override {
    return ask(error, "is_terminated", nullptr);
  }
  int32_t distance(ErrorText* error) noexcept override {
    const auto read = [](PyObject* result) -> int64_t {
      if (result == Py_None) return kUnknownDistance;
      const int64_t distance = PyLong_AsLongLong(result);
      if (PyErr_Occurred() != nullptr) return kFailed;
      if (distance >= 0 && distance < kNoBudget) return distance;
      PyErr_SetString(PyExc_ValueError, "distance() must return None or a number of tokens");
      return kFailed;
    };
    const int64_t distance = call(read, error, "distance", nullptr);
    return distance == kFailed ? kUnknownDistance : static_cast<int32_t>(distance);
  }

 private:
  int64_t words() const { return static_cast<int64_t>(bits_.shape(0)); }

  static constexpr int64_t kFailed = INT64_MIN;

  template <typename... Arguments>
  Outcome ask(ErrorText* error, const char* method, const char* format,
              Arguments... arguments) noexcept {
    const auto read = [](PyObject* result) -> int64_t {
      const int is_true = PyObject_IsTrue(result);
      return is_true < 0 ? kFailed : is_true;
    };
    const int64_t is_true = call(read, error, method, format, arguments...);
    if (is_true == kFailed) return Outcome::kFailed;
    return is_true != 0 ? Outcome::kYes : Outcome::kNo;
  }

  // Calls a method of the Python matcher, and returns `read` of the result. `read` returns kFailed
  // if it has set a Python exception. If the method or `read` raises an exception, call() stores
  // the message in `error` and returns kFailed.
  template <typename Read, typename... Arguments>
  int64_t call(Read read, ErrorText* error, const char* method, const char* format,
               Arguments... arguments) noexcept {
    const hostwork::PythonEntry python;
    if (!python) {
      error->keep("the interpreter is shutting down");
      return kFailed;
    }
    try {
      PyObject* matcher = PyObject_CallNoArgs(matcher_.ptr());  // None if it has been destroyed
      PyObject* result =
          matcher == nullptr ? nullptr : PyObject_CallMethod(matcher, method, format, arguments...);
      const int64_t value = result == nullptr ? kFailed : read(result);
      if (value == kFailed) {
        PyObject* const raised = hostwork::take_exception();
        const std::string message = hostwork::describe_exception(raised);
        error->keep(message.data(), message.size());
        // Store the exception, which contains the traceback, on the Python matcher. An object of a
        // user's class may refuse the attribute.
        if (matcher != nullptr && PyObject_SetAttrString(matcher, "failure", raised) != 0) {
          PyErr_Clear();
        }
        Py_DECREF(raised);
      }
      Py_XDECREF(result);
      Py_XDECREF(matcher);
      return value;
    } catch (abi::__forced_unwind&) {
      hostwork::park_forever();
    }
  }

  const nb::object matcher_;  // a weak reference
  const nb::object row_;
  const Row bits_;  // memory of row_
  const int32_t last_word_;
};

}  // namespace

void bind_python_matcher(nb::module_& guide) {
  nb::class_<PythonMatcher, NativeMatcher>(guide, "PythonMatcher")
      .def(nb::init<const nb::object&, const nb::object&, int64_t>(), nb::arg("matcher"),
           nb::arg("row"), nb::arg("vocab_size"));
}

}  // namespace graft::guide
