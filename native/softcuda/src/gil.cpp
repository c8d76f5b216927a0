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

// "file:line in name" of a frame.
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
  constexpr int kMost = 64;
  std::string out;
  if (frame == nullptr || back_of == nullptr) return out;
  incref(frame);
  for (int depth = 0; frame != nullptr && depth < kMost; ++depth) {
    out += describe_frame(frame);
    Object* outer = back_of(frame);
    release(frame);
    frame = outer;
  }
  release(frame);
  return out;
}

// ---- seeing who asks for the GIL --------------------------------------------------------------
// The interpreter guards the GIL's state by one mutex, which a thread locks first of all when it
// asks. Whose it is, is learnt by a thread of ours asking once (L2).
std::atomic<void*> g_gil_mutex{nullptr};
thread_local bool t_learning = false;
constexpr int kLearnTicks = 20000, kLearnTickUs = 100;
void (*g_asked)() = nullptr;
void (*g_entered)(const std::string&) = nullptr;

int seen_mutex_lock(pthread_mutex_t* mutex) {
  if (t_learning) {
    t_learning = false;
    g_gil_mutex.store(mutex);
  } else if (mutex == g_gil_mutex.load(std::memory_order_relaxed)) {
    g_asked();
  }
  return pthread_mutex_lock(mutex);
}

using Ensure = int (*)();
Ensure g_ensure = nullptr;

int first_python_call(Object*, Object* frame, int what, Object*) {
  static const auto set_profile = python<void (*)(TraceFunction, Object*)>("PyEval_SetProfile");
  if (what != kCall) return 0;
  set_profile(nullptr, nullptr);
  g_entered(stack_from(frame));
  return 0;
}

thread_local bool t_name_first_call = false;

// The GIL is held when PyGILState_Ensure returns: from here on this thread's first Python function
// can be named, by a profile function that takes itself away.
int seen_ensure() {
  static const auto set_profile = python<void (*)(TraceFunction, Object*)>("PyEval_SetProfile");
  const int state = g_ensure();
  if (t_name_first_call && set_profile != nullptr) {
    t_name_first_call = false;
    set_profile(first_python_call, nullptr);
  }
  return state;
}

void learn() {
  const auto leave = python<void (*)(int)>("PyGILState_Release");
  t_learning = true;
  const int state = g_ensure();
  t_learning = false;
  leave(state);
}

// ---- Python's stacks without the GIL ----------------------------------------------------------
int g_stack_file = -1, g_stack_signal = 0;

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
    // Looking the symbols up costs microseconds: give up looking, not checking, for most calls.
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

void watch_gil(void (*asked)(), void (*entered)(const std::string& stack)) {
  g_asked = asked;
  g_entered = entered;
  g_ensure = python<Ensure>("PyGILState_Ensure");
  if (g_ensure == nullptr) return;  // no interpreter: nobody can ask
  patch_calls(reinterpret_cast<void*>(g_ensure), Where::inside, "pthread_mutex_lock",
              reinterpret_cast<void*>(seen_mutex_lock));
  watch_new_libraries();
  std::thread(learn).detach();
  // It asks at once, though it may get the GIL much later: what follows is seen from the start.
  for (int i = 0; i < kLearnTicks && !gil_watched(); ++i) usleep(kLearnTickUs);
}

void watch_new_libraries() {
  static std::atomic<unsigned long long> known{0};
  const unsigned long long loaded = libraries_loaded();
  if (g_ensure == nullptr || known.exchange(loaded) == loaded) return;
  patch_calls(reinterpret_cast<void*>(g_ensure), Where::outside, "PyGILState_Ensure",
              reinterpret_cast<void*>(seen_ensure));
}

bool gil_watched() { return g_gil_mutex.load() != nullptr; }

void prepare_python_stacks() {
  const auto later = python<int (*)(int (*)(void*), void*)>("Py_AddPendingCall");
  if (later == nullptr || g_stack_file >= 0) return;
  g_stack_file = memfd_create("softcuda-python-stacks", MFD_CLOEXEC);
  g_stack_signal = stacks::free_signal();
  if (g_stack_file >= 0 && g_stack_signal != 0) later(register_handler, nullptr);
}

std::string all_python_stacks() {
  struct sigaction now{};
  if (g_stack_signal == 0 || sigaction(g_stack_signal, nullptr, &now) != 0 ||
      ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL)) {
    return "";  // not registered (yet)
  }
  const off_t from = lseek(g_stack_file, 0, SEEK_CUR);
  syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), g_stack_signal);  // handled before it returns
  std::string out;
  char part[4096];
  for (off_t at = from;;) {
    const ssize_t n = pread(g_stack_file, part, sizeof part, at);
    if (n <= 0) return out;
    out.append(part, static_cast<size_t>(n));
    at += n;
  }
}

void name_first_python_call(bool wanted) { t_name_first_call = wanted; }

}  // namespace softcuda
