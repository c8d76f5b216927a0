// Host steps that are Python callables.
#include <cxxabi.h>

#include <vector>

#include "hostwork/gate.h"
#include "hostwork/record.h"

namespace graft::hostwork {
namespace {

// callable(payload, *arguments), or callable(*arguments) where payload is null. The GIL is held
// from pick() on; the reference taken here keeps the payload when the callable changes the cell. Up
// to kFew arguments nothing is allocated.
PyObject* call(PyObject* callable, PyObject* arguments, PyObject* payload) {
  constexpr std::size_t kFew = 14;
  const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(arguments));
  PyObject* few[kFew + 2];
  std::vector<PyObject*> many(count > kFew ? count + 2 : 0);
  // The first place is room for a bound method's self (PY_VECTORCALL_ARGUMENTS_OFFSET).
  PyObject** const all = (many.empty() ? few : many.data()) + 1;
  std::size_t given = 0;
  Py_XINCREF(payload);
  if (payload != nullptr) all[given++] = payload;
  for (std::size_t i = 0; i < count; ++i) {
    all[given++] = PyTuple_GET_ITEM(arguments, static_cast<Py_ssize_t>(i));
  }
  PyObject* result =
      PyObject_Vectorcall(callable, all, given | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  Py_XDECREF(payload);
  return result;
}

}  // namespace

void HostRecord::run_python(std::int64_t replay) {
  const PythonEntry python;
  if (!python) {
    fail(kStatusShutdown, replay, nullptr, "the interpreter is shutting down");
    return;
  }
  try {
    PyObject* const payload = cell_ == nullptr ? nullptr : cell_->pick(replay).value;
    PyObject* const result = call(work_.callable, work_.arguments, payload);
    if (result != nullptr) {
      Py_DECREF(result);
      return;
    }
    PyObject* const raised = take_exception();
    fail(kStatusPython, replay, raised, words_of(raised));
  } catch (abi::__forced_unwind&) {
    park_for_good();
  }
}

}  // namespace graft::hostwork
