// Observation of the GIL and of Python stacks (INVARIANTS.md L1 to L5).
#include "gil.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#include "stacks/stacks.h"

namespace softcuda {
namespace {

struct Object;
using TraceFunction = int (*)(Object*, Object*, int, Object*);
constexpr int kCall = 0;  // PyTrace_CALL

template <class F>
F python(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

void release(Object* object) {
  static const auto decref = python<void (*)(Object*)>("Py_DecRef");
  if (object != nullptr) decref(object);
}

// Returns "file:line in name" of a frame.
std::string describe_frame(Object* frame) {
  static const auto code_of = python<Object* (*)(Object*)>("PyFrame_GetCode");
  static const auto line_of = python<int (*)(Object*)>("PyFrame_GetLineNumber");
  static const auto attribute = python<Object* (*)(Object*, const char*)>("PyObject_GetAttrString");
  static const auto text = python<const char* (*)(Object*)>("PyUnicode_AsUTF8");
  if (code_of == nullptr || line_of == nullptr || attribute == nullptr || text == nullptr)
    return "";
  Object* code = code_of(frame);
  Object* file = attribute(code, "co_filename");
  Object* name = attribute(code, "co_qualname");
  const std::string out =
      std::string(text(file)) + ":" + std::to_string(line_of(frame)) + " in " + text(name) + "\n";
  release(name);
  release(file);
  release(code);
  return out;
}

std::string stack_from(Object* frame) {
  static const auto back_of = python<Object* (*)(Object*)>("PyFrame_GetBack");
  static const auto incref = python<void (*)(Object*)>("Py_IncRef");
  constexpr int kMaxFrames = 64;
  std::string out;
  if (frame == nullptr || back_of == nullptr) return out;
  incref(frame);
  for (int depth = 0; frame != nullptr && depth < kMaxFrames; ++depth) {
    out += describe_frame(frame);
    Object* outer = back_of(frame);
    release(frame);
    frame = outer;
  }
  release(frame);
  return out;
}

// ---- requests for the GIL ---------------------------------------------------------------------
// The interpreter guards the state of the GIL with a mutex. It is the first mutex that a thread
// locks when it requests the GIL. To find this mutex, a helper thread requests the GIL once
// (INVARIANTS.md L2).
std::atomic<void*> g_gil_mutex{nullptr};
thread_local bool t_finding_mutex = false;
constexpr int kFindTicks = 20000;
constexpr int kFindTickUs = 100;
void (*g_on_request)() = nullptr;
void (*g_on_python_call)(const std::string&) = nullptr;

// Replaces pthread_mutex_lock in the calls that the interpreter makes.
int intercepted_mutex_lock(pthread_mutex_t* mutex) {
  if (t_finding_mutex) {
    t_finding_mutex = false;
    g_gil_mutex.store(mutex);
  } else if (mutex == g_gil_mutex.load(std::memory_order_relaxed)) {
    g_on_request();
  }
  return pthread_mutex_lock(mutex);
}

using Ensure = int (*)();
Ensure g_ensure = nullptr;

// Profile function (PyEval_SetProfile) that reports the first Python function that the thread
// enters. It then removes itself.
int first_python_call(Object*, Object* frame, int event, Object*) {
  static const auto set_profile = python<void (*)(TraceFunction, Object*)>("PyEval_SetProfile");
  if (event != kCall) return 0;
  set_profile(nullptr, nullptr);
  g_on_python_call(stack_from(frame));
  return 0;
}

thread_local bool t_report_first_call = false;

// Replaces PyGILState_Ensure in the calls that libraries other than the interpreter make. If
// report_first_python_call() is enabled, installs the profile function after the original function
// has returned, because the thread must hold the GIL.
int intercepted_ensure() {
  static const auto set_profile = python<void (*)(TraceFunction, Object*)>("PyEval_SetProfile");
  const int state = g_ensure();
  if (t_report_first_call && set_profile != nullptr) {
    t_report_first_call = false;
    set_profile(first_python_call, nullptr);
  }
  return state;
}

// Main function of the helper thread that finds the mutex of the GIL.
void find_gil_mutex() {
  const auto release_gil = python<void (*)(int)>("PyGILState_Release");
  t_finding_mutex = true;
  const int state = g_ensure();
  t_finding_mutex = false;
  release_gil(state);
}

// ---- Python stacks without the GIL ------------------------------------------------------------
int g_stack_file = -1;
int g_stack_signal = 0;

// Registers faulthandler for the signal that requests the stacks. The interpreter runs this
// function as a pending call on a thread that holds the GIL.
int register_handler(void*) {
  const auto run = python<int (*)(const char*)>("PyRun_SimpleString");
  if (run == nullptr) return 0;
  const std::string code = "import faulthandler as _f; _f.register(" +
                           std::to_string(g_stack_signal) +
                           ", file=" + std::to_string(g_stack_file) + ", all_threads=True); del _f";
  run(code.c_str());
  return 0;
}

}  // namespace

bool gil_held() {
  static std::atomic<int (*)()> check{nullptr}, alive{nullptr};
  if (check.load(std::memory_order_relaxed) == nullptr) {
    static std::atomic<unsigned> attempts{0};
    // While the process has no interpreter, every lookup fails and takes microseconds. Only one
    // call in 64 therefore repeats it.
    if ((attempts++ & 63) != 0) return false;
    alive = python<int (*)()>("Py_IsInitialized");
    check = python<int (*)()>("PyGILState_Check");
    if (check.load() == nullptr || alive.load() == nullptr) return false;
  }
  return alive.load(std::memory_order_relaxed)() != 0 &&
         check.load(std::memory_order_relaxed)() != 0;
}

std::string python_stack() {
  static const auto current = python<Object* (*)()>("PyEval_GetFrame");
  return current == nullptr ? "" : stack_from(current());
}

void watch_gil(void (*on_request)(), void (*on_python_call)(const std::string& stack)) {
  g_on_request = on_request;
  g_on_python_call = on_python_call;
  g_ensure = python<Ensure>("PyGILState_Ensure");
  if (g_ensure == nullptr) return;  // no interpreter in this process
  patch_calls(reinterpret_cast<void*>(g_ensure), Callers::inside, "pthread_mutex_lock",
              reinterpret_cast<void*>(intercepted_mutex_lock));
  watch_new_libraries();
  std::thread(find_gil_mutex).detach();
  // Wait until the helper thread has found the mutex by requesting the GIL, so that every request
  // for the GIL after this call is reported. The wait is short: the helper thread locks the mutex
  // immediately, even if it gets the GIL much later.
  for (int i = 0; i < kFindTicks && !gil_watched(); ++i) usleep(kFindTickUs);
}

void watch_new_libraries() {
  static std::atomic<unsigned long long> known{0};
  const unsigned long long loaded = libraries_loaded();
  if (g_ensure == nullptr || known.exchange(loaded) == loaded) return;
  patch_calls(reinterpret_cast<void*>(g_ensure), Callers::outside, "PyGILState_Ensure",
              reinterpret_cast<void*>(intercepted_ensure));
}

bool gil_watched() { return g_gil_mutex.load() != nullptr; }

void prepare_python_stacks() {
  const auto add_pending_call = python<int (*)(int (*)(void*), void*)>("Py_AddPendingCall");
  if (add_pending_call == nullptr || g_stack_file >= 0) return;
  g_stack_file = memfd_create("softcuda-python-stacks", MFD_CLOEXEC);
  g_stack_signal = stacks::free_signal();
  if (g_stack_file >= 0 && g_stack_signal != 0) add_pending_call(register_handler, nullptr);
}

std::string all_python_stacks() {
  struct sigaction now{};
  if (g_stack_signal == 0 || sigaction(g_stack_signal, nullptr, &now) != 0 ||
      ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL)) {
    return "";  // the pending call has not run yet
  }
  const off_t from = lseek(g_stack_file, 0, SEEK_CUR);
  // The thread sends the signal to itself. The handler has therefore written the stacks when the
  // system call returns.
  syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), g_stack_signal);
  std::string out;
  char part[4096];
  for (off_t at = from;;) {
    const ssize_t n = pread(g_stack_file, part, sizeof part, at);
    if (n <= 0) return out;
    out.append(part, static_cast<size_t>(n));
    at += n;
  }
}

void report_first_python_call(bool enabled) { t_report_first_call = enabled; }

}  // namespace softcuda
