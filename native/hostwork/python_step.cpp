// Host steps that are Python callables.
#include <cxxabi.h>

#include <vector>

#include "hostwork/gate.h"
#include "hostwork/record.h"

namespace graft::hostwork {
namespace {

// Calls callable(payload, *arguments), or callable(*arguments) if payload is null. `payload` is a
// borrowed reference from PayloadCell::pick(), valid because the caller has held the GIL since
// then. During the call a new reference keeps the payload alive, because the callable may set
// another value. Up to kMaxStackArguments arguments are passed without an allocation.
PyObject* call(PyObject* callable, PyObject* arguments, PyObject* payload) {
  constexpr std::size_t kMaxStackArguments = 14;
  const auto count = static_cast<std::size_t>(PyTuple_Size(arguments));
  PyObject* on_stack[kMaxStackArguments + 2];
  std::vector<PyObject*> on_heap(count > kMaxStackArguments ? count + 2 : 0);
  // The first entry is reserved for the self of a bound method (PY_VECTORCALL_ARGUMENTS_OFFSET).
  PyObject** const all = (on_heap.empty() ? on_stack : on_heap.data()) + 1;
  std::size_t passed = 0;
  Py_XINCREF(payload);
  if (payload != nullptr) all[passed++] = payload;
  for (std::size_t i = 0; i < count; ++i) {
    all[passed++] = PyTuple_GetItem(arguments, static_cast<Py_ssize_t>(i));
  }
  PyObject* result =
      PyObject_Vectorcall(callable, all, passed | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
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
    fail(kStatusPython, replay, raised, describe_exception(raised));
  } catch (abi::__forced_unwind&) {
    park_forever();
  }
}

}  // namespace graft::hostwork
