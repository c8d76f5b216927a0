#include "hostwork/gate.h"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace graft::hostwork {
namespace {

std::atomic<bool> closed{false};
std::atomic<std::int64_t> entered{0};
std::atomic<std::int64_t> thread_states{0};

// Adds the calling thread to the count of threads that have entered Python. Returns false if the
// gate is closed. The count is incremented before the flag `closed` is read. Therefore either
// close_gate() sees this thread in the count, or this thread sees that the gate is closed.
bool enter() {
  entered.fetch_add(1);
  if (!closed.load()) return true;
  entered.fetch_sub(1);
  return false;
}

void leave() { entered.fetch_sub(1); }

// Acquires the GIL. If the exiting interpreter makes the thread exit, lets it sleep forever
// instead.
PyGILState_STATE take_gil() {
  try {
    return PyGILState_Ensure();
  } catch (abi::__forced_unwind&) {
    park_forever();
  }
}

// Owns an extra PyGILState reference, which keeps the Python thread state of a driver thread alive
// between two host functions. The reference is released when the thread ends.
struct ThreadState {
  bool held = false;
  ~ThreadState() { release(); }
  void release() {
    // After the gate has closed, no thread may enter Python, so the thread state is leaked.
    if (!held || !enter()) return;
    held = false;
    const PyGILState_STATE outer = take_gil();
    PyGILState_Release(PyGILState_LOCKED);  // the extra reference; the GIL stays held
    PyGILState_Release(outer);
    thread_states.fetch_sub(1);
    leave();
  }
};
thread_local ThreadState thread_state;

// Returns the text of a new reference to a str and drops the reference; "" if an error is raised.
std::string take_text(PyObject* text) {
  Py_ssize_t size = 0;
  const char* utf8 = text == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text, &size);
  if (utf8 == nullptr) PyErr_Clear();
  std::string out = utf8 == nullptr ? "" : std::string(utf8, static_cast<std::size_t>(size));
  Py_XDECREF(text);
  return out;
}

}  // namespace

PythonEntry::PythonEntry() : entered_(enter()), state_(PyGILState_UNLOCKED) {
  if (!entered_) return;
  const bool foreign = PyGILState_GetThisThreadState() == nullptr;
  state_ = take_gil();
  if (foreign) {
    (void)PyGILState_Ensure();  // released when the thread exits
    thread_state.held = true;
    thread_states.fetch_add(1);
  }
}

PythonEntry::~PythonEntry() {
  if (!entered_) return;
  PyGILState_Release(state_);
  leave();
}

GilRelease::~GilRelease() {
  try {
    PyEval_RestoreThread(state_);
  } catch (abi::__forced_unwind&) {
    park_forever();
  }
}

void park_forever() {
  while (true) pause();
}

bool close_gate(double timeout_s) {
  closed.store(true);
  bool empty = false;
  Py_BEGIN_ALLOW_THREADS;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (!(empty = entered.load() == 0) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  Py_END_ALLOW_THREADS;
  return empty;
}

bool gate_open() { return !closed.load(); }

void release_thread_state(void*) { thread_state.release(); }

std::int64_t live_thread_states() { return thread_states.load(); }

PyObject* take_exception() {
#if PY_VERSION_HEX >= 0x030c0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

std::string describe_exception(PyObject* exception) {
  std::string out = take_text(PyType_GetName(Py_TYPE(exception)));
  const std::string message = take_text(PyObject_Str(exception));
  if (!message.empty()) out.append(": ").append(message);
  return out;
}

}  // namespace graft::hostwork
