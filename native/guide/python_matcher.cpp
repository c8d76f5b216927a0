#include "python_matcher.h"

#include <cxxabi.h>

#include <algorithm>
#include <stdexcept>

#include "hostwork/gate.h"

namespace graft::guide {
namespace {

PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}

// Keeps "Type: what it says" of the raised exception, and clears it.
void keep_raised(ErrorText* error) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* text = PyUnicode_FromFormat("%s: %S", Py_TYPE(value)->tp_name, value);
  Py_ssize_t size = 0;
  const char* message = text == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text, &size);
  if (message != nullptr) {
    error->keep(message, static_cast<size_t>(size));
  } else {
    PyErr_Clear();
    error->keep(Py_TYPE(value)->tp_name);
  }
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
}

}  // namespace

PythonMatcher::PythonMatcher(PyObject* matcher, PyObject* row, const int32_t* bits, int64_t words,
                             int64_t vocab_size)
    : matcher_(PyWeakref_NewRef(matcher, nullptr)),
      row_(new_reference(row)),
      bits_(bits),
      words_(words),
      last_word_(last_word_bits(vocab_size)) {
  if (matcher_ == nullptr) PyErr_Clear();
  if (matcher_ == nullptr || words != (vocab_size + 31) / 32) {
    Py_DECREF(row_);
    Py_XDECREF(matcher_);
    throw std::invalid_argument("a matcher in Python must allow weak references and fit its row");
  }
}

PythonMatcher::~PythonMatcher() {
  Py_DECREF(row_);
  Py_DECREF(matcher_);
}

template <typename... Arguments>
Answer PythonMatcher::ask(ErrorText* error, const char* method, const char* format,
                          Arguments... arguments) noexcept {
  const hostwork::PythonEntry python;
  if (!python) {
    error->keep("the interpreter is shutting down");
    return Answer::kFailed;
  }
  try {
    PyObject* matcher = PyObject_CallNoArgs(matcher_);  // None if it is gone
    PyObject* said =
        matcher == nullptr ? nullptr : PyObject_CallMethod(matcher, method, format, arguments...);
    const int truth = said == nullptr ? -1 : PyObject_IsTrue(said);
    if (truth < 0) keep_raised(error);
    Py_XDECREF(said);
    Py_XDECREF(matcher);
    return truth < 0 ? Answer::kFailed : truth != 0 ? Answer::kYes : Answer::kNo;
  } catch (abi::__forced_unwind&) {
    hostwork::park_for_good();
  }
}

Answer PythonMatcher::accept(int32_t token, ErrorText* error) noexcept {
  return ask(error, "accept", "i", token);
}

Filled PythonMatcher::fill(int32_t* row, int64_t words, ErrorText* error) noexcept {
  if (words != words_) {
    error->keep("the mask row is not one of this vocabulary");
    return Filled::kFailed;
  }
  const Answer filled = ask(error, "fill", "O", row_);
  if (filled != Answer::kYes) return filled == Answer::kNo ? Filled::kFree : Filled::kFailed;
  std::copy(bits_, bits_ + words, row);
  row[words - 1] &= last_word_;
  return Filled::kMask;
}

Answer PythonMatcher::rollback(int32_t tokens, ErrorText* error) noexcept {
  const Answer said = ask(error, "rollback", "i", tokens);
  return said == Answer::kFailed ? said : Answer::kYes;
}

Answer PythonMatcher::is_terminated(ErrorText* error) noexcept {
  return ask(error, "is_terminated", nullptr);
}

}  // namespace graft::guide
