// The gate: acquisition of the GIL on threads that Python did not create. The gate is closed when
// the interpreter exits. Afterwards no such thread acquires the GIL.
//
// INVARIANTS.md states the rules that this file implements: P1 to P5.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

namespace graft::hostwork {

// Holds the GIL while the object exists. If the gate is closed (see close_gate()), the object does
// not acquire the GIL and converts to false.
//
// A driver thread keeps its Python thread state until it ends, because creating one per call would
// cost several times as much as the call.
class PythonEntry {
 public:
  PythonEntry();
  ~PythonEntry();
  PythonEntry(const PythonEntry&) = delete;
  PythonEntry& operator=(const PythonEntry&) = delete;
  explicit operator bool() const { return entered_; }

 private:
  bool entered_;
  PyGILState_STATE state_;
};

// Whether the calling thread holds the GIL. Python's stable ABI, which has no PyGILState_Check(),
// begins with Python 3.12 here; there, the dictionary of the current thread state exists exactly if
// the thread holds the GIL.
inline bool holds_gil() {
  if (Py_IsInitialized() == 0) return false;
#ifdef Py_LIMITED_API
  return PyThreadState_GetDict() != nullptr;
#else
  return PyGILState_Check() != 0;
#endif
}

// Lets the calling thread sleep until the process ends. Called when the exiting interpreter makes
// the thread exit, because the thread was still in Python after the time limit of close_gate().
// Such an exit must not unwind through scope guards or into the driver.
[[noreturn]] void park_forever();

// Releases the GIL for its scope, like nanobind's guard. The destructor reacquires the GIL. If the
// interpreter is exiting, CPython then makes the thread exit, for example a daemon thread that
// launches a graph. The destructor catches this exit and parks the thread (INVARIANTS.md P5).
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

// Closes the gate permanently and waits at most timeout_s seconds until every thread that entered
// through it has left Python. Returns whether all of them have left. The caller must hold the GIL,
// which is released during the wait.
bool close_gate(double timeout_s);
bool gate_open();

// Returns the number of threads that Python did not create and that keep a Python thread state.
std::int64_t live_thread_states();

// Releases the Python thread state of the calling thread, which creates a new one when it next
// enters Python. Benchmarks enqueue this function as a host function. It acquires the GIL.
void release_thread_state(void*);

// Returns the raised exception with its traceback and clears the error indicator. The caller must
// hold the GIL.
PyObject* take_exception();
// Returns the type and message of an exception as text, for reports without an exception object.
// The caller must hold the GIL.
std::string describe_exception(PyObject* exception);

}  // namespace graft::hostwork
