// Entering Python from threads that are not Python's, and not entering it after the end.
//
// INVARIANTS.md states the rules this file implements: P1 to P5.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

namespace graft::hostwork {

// Holds the GIL for its scope, or refuses because the interpreter is shutting down.
// A driver thread keeps one Python thread state for as long as it lives: making one per call
// costs several times the call itself.
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

// The interpreter ended while this thread was in Python, after the gate's time limit, and makes the
// thread exit. It must unwind neither through guards nor into the driver: it waits for the end of
// the process.
[[noreturn]] void park_for_good();

// Releases the GIL for its scope, as nanobind's guard does, but parks the thread where the ending
// interpreter makes it exit when it wants the GIL back (P5): a daemon thread that launches, say.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

// Closes the gate for good and waits until every entered thread has left, at most timeout_s.
// Called with the GIL held (it is released while waiting). Returns whether all have left.
bool close_gate(double timeout_s);
bool gate_open();

// Threads that keep a Python thread state now.
std::int64_t live_thread_states();

// Host function: the calling thread gives its kept Python thread state back, and makes a new one
// when it next enters Python. For measurements; needs the GIL.
void release_thread_state(void*);

// The raised exception as one object with its traceback; clears the error. And what an exception
// says, for reports that have no exception to show. GIL held.
PyObject* take_exception();
std::string words_of(PyObject* exception);

}  // namespace graft::hostwork
