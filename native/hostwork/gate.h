// Acquisition of the GIL on threads that Python did not create, and its prevention at exit.
//
// INVARIANTS.md states the rules that this file implements: P1 to P5.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

namespace graft::hostwork {

// Holds the GIL for its scope; false if the interpreter is shutting down.
// A driver thread keeps its Python thread state until it ends: creating one per call costs several
// times as much as the call.
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

// Called when the ending interpreter makes this thread exit, because the thread was in Python after
// the time limit of close_gate(). The exit must not unwind through scope guards or into the driver:
// the thread sleeps until the process ends.
[[noreturn]] void park_forever();

// Releases the GIL for its scope like nanobind's guard. If the ending interpreter makes the thread
// exit when it reacquires the GIL, for example a daemon thread that launches, the thread is parked
// instead (P5).
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

// Closes the gate permanently and waits at most timeout_s seconds until every thread has left
// Python. Called with the GIL held; it is released during the wait. Returns whether all have left.
bool close_gate(double timeout_s);
bool gate_open();

// Returns the number of driver threads that keep a Python thread state.
std::int64_t live_thread_states();

// Host function that releases the Python thread state of the calling thread; the thread creates a
// new one when it next enters Python. For measurements; acquires the GIL.
void release_thread_state(void*);

// Returns the raised exception with its traceback and clears the error indicator. GIL held.
PyObject* take_exception();
// Returns "type: message" of an exception, for reports that carry no exception object. GIL held.
std::string describe_exception(PyObject* exception);

}  // namespace graft::hostwork
