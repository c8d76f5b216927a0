#include "hostwork/record.h"

#include <cxxabi.h>

#include <exception>
#include <utility>
#include <vector>

#include "hostwork/gate.h"
#include "hostwork/running.h"

namespace graft::hostwork {
namespace {

constexpr unsigned int kMove = 1;              // CU_GRAPH_USER_OBJECT_MOVE
constexpr unsigned int kSpinWait = 1;          // CU_HOST_TASK_SPINWAIT
constexpr Result kNotSupported = 801;          // CUDA_ERROR_NOT_SUPPORTED
constexpr unsigned int kNoDestructorSync = 1;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> released{0};
std::atomic<std::int64_t> python_runs{0};
std::atomic<std::int64_t> native_runs{0};
std::atomic<std::int64_t> stood_down{0};

PyObject* new_reference(PyObject* object) {
  Py_XINCREF(object);
  return object;
}

// The raised exception as one object with its traceback; clears the error (GIL held).
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

// What an exception says, for reports that have no exception to show (GIL held).
std::string words_of(PyObject* exception) {
  std::string out = Py_TYPE(exception)->tp_name;
  PyObject* const text = PyObject_Str(exception);
  Py_ssize_t size = 0;
  const char* said = text == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text, &size);
  if (said == nullptr) PyErr_Clear();
  if (said != nullptr && size > 0) out.append(": ").append(said, static_cast<std::size_t>(size));
  Py_XDECREF(text);
  return out;
}

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
  if (payload != nullptr) all[given++] = new_reference(payload);
  for (std::size_t i = 0; i < count; ++i) {
    all[given++] = PyTuple_GET_ITEM(arguments, static_cast<Py_ssize_t>(i));
  }
  PyObject* result =
      PyObject_Vectorcall(callable, all, given | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  Py_XDECREF(payload);
  return result;
}

// The destructor of the user object: runs on a driver thread or inside a destroy call.
void retire_record(void* data) { retire(static_cast<Record*>(data)); }

}  // namespace

Record::Record(PyObject* keep) : keep_(new_reference(keep)) { live.fetch_add(1); }

Record::~Record() {
  live.fetch_sub(1);
  released.fetch_add(1);
}

void Record::reap(std::vector<PyObject*>& references) noexcept {
  if (keep_ != nullptr) references.push_back(keep_);
}

HostRecord::HostRecord(std::string name, PyObject* callable, PyObject* arguments, PyObject* keep)
    : Record(keep),
      name_(std::move(name)),
      callable_(new_reference(callable)),
      arguments_(new_reference(arguments)) {}

HostRecord::HostRecord(std::string name, HostFunction function, void* data, PyObject* keep)
    : Record(keep), name_(std::move(name)), function_(function), data_(data) {}

void HostRecord::reap(std::vector<PyObject*>& references) noexcept {
  if (callable_ != nullptr) references.push_back(callable_);
  if (arguments_ != nullptr) references.push_back(arguments_);
  Record::reap(references);
}

void HostRecord::fail(StatusCode code, std::int64_t replay, PyObject* exception,
                      std::string message) {
  Failure failure{name_, replay, exception, std::move(message)};
  if (state_) {
    state_->fail(code, std::move(failure));
  } else {
    fail_eager(std::move(failure));
  }
}

void HostRecord::run_python(std::int64_t replay) {
  const PythonEntry python;
  if (!python) {
    fail(kStatusShutdown, replay, nullptr, "the interpreter is shutting down");
    return;
  }
  PyObject* result = nullptr;
  try {
    PyObject* payload = nullptr;
    if (cell_ != nullptr) {
      payload = cell_->pick(replay).value;
      if (payload == nullptr) payload = Py_None;
    }
    result = call(callable_, arguments_, payload);
  } catch (abi::__forced_unwind&) {
    park_for_good();
  }
  if (result == nullptr) {
    PyObject* const raised = take_exception();
    fail(kStatusPython, replay, raised, words_of(raised));
  } else {
    Py_DECREF(result);
  }
}

void HostRecord::run() noexcept {
  const std::int64_t run = runs_.load(std::memory_order_relaxed) + 1;
  runs_.store(run, std::memory_order_relaxed);
  run_as(state_ ? state_->base() + run : 0);
}

void HostRecord::run_as(std::int64_t replay) noexcept {
  if (state_ && state_->failed()) {
    stood_down.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const HostWorkScope host_work;
  const RunningScope running(this, replay);
  try {
    if (callable_ != nullptr) {
      python_runs.fetch_add(1, std::memory_order_relaxed);
      run_python(replay);
    } else {
      native_runs.fetch_add(1, std::memory_order_relaxed);
      function_(cell_ == nullptr ? data_ : reinterpret_cast<void*>(cell_->pick(replay).address));
    }
  } catch (abi::__forced_unwind&) {
    park_for_good();
  } catch (const std::exception& error) {
    fail(kStatusNative, replay, nullptr, error.what());
  } catch (...) {
    fail(kStatusNative, replay, nullptr, "an unknown C++ exception");
  }
}

void run_host_record(void* data) { static_cast<HostRecord*>(data)->run(); }

Attached attach(Handle graph, Record* record) {
  const Driver& d = driver();
  Handle object = nullptr;
  // The base pointer is what the destructor gets, whatever class the record is.
  Result result = d.user_object_create(&object, record, retire_record, 1, kNoDestructorSync);
  if (result != kSuccess) {
    retire(record);
    return {result, "cuUserObjectCreate", nullptr};
  }
  result = d.graph_retain_user_object(graph, object, 1, kMove);
  if (result != kSuccess) {
    d.user_object_release(object, 1);  // the reference is still ours; this retires the record
    return {result, "cuGraphRetainUserObject", nullptr};
  }
  return {kSuccess, "", object};
}

Result launch_host(Handle stream, HostFunction fn, void* data, bool spin) {
  const Driver& d = driver();
  if (!spin) return d.launch_host_func(stream, fn, data);
  if (d.launch_host_func_v2 == nullptr) return kNotSupported;
  return d.launch_host_func_v2(stream, fn, data, kSpinWait);
}

Result detach(Handle graph, Handle object) {
  return driver().graph_release_user_object(graph, object, 1);
}

std::int64_t live_records() { return live.load(); }
std::int64_t released_records() { return released.load(); }

RunCounts run_counts() { return {python_runs.load(), native_runs.load(), stood_down.load()}; }

}  // namespace graft::hostwork
