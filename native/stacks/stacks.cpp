#include "stacks/stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace stacks {
namespace {

constexpr int kMaxFrames = 96;
constexpr int kSignalFrames = 2;  // frames to omit: the handler and the return trampoline

enum State : int { kIdle, kRequested, kWriting, kAnswered };

// The request for the native stack of a thread. `mutex` serializes requests, so there is at most
// one at a time. Only the thread that changed `state` to kWriting may write `frames`.
struct StackRequest {
  std::mutex mutex;
  int signal = 0;
  std::atomic<int> state{kIdle};
  std::atomic<pid_t> tid{0};
  void* frames[kMaxFrames];
  int count = 0;
};
StackRequest& request = *new StackRequest;

pid_t own_tid() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void handle_signal(int) {
  const int saved = errno;
  int expected = kRequested;
  if (request.tid.load() == own_tid() &&
      request.state.compare_exchange_strong(expected, kWriting)) {
    request.count = backtrace(request.frames, kMaxFrames);
    request.state.store(kAnswered);
  }
  errno = saved;
}

bool install_handler() {
  if (request.signal != 0) return true;
  void* warm[2];
  // The first call of backtrace() loads the unwinder. Make this call now, because the signal
  // handler must not load libraries.
  (void)backtrace(warm, 2);
  request.signal = free_signal();
  if (request.signal == 0) return false;
  struct sigaction action{};
  action.sa_handler = handle_signal;
  action.sa_flags = SA_RESTART;
  sigfillset(&action.sa_mask);
  if (sigaction(request.signal, &action, nullptr) != 0) request.signal = 0;
  return request.signal != 0;
}

const char* base_name(const char* path) {
  const std::string whole = path;
  const std::size_t slash = whole.rfind('/');
  return slash == std::string::npos ? path : path + slash + 1;
}

}  // namespace

int free_signal() {
  for (int number = SIGRTMAX - 1; number > SIGRTMIN; --number) {
    struct sigaction now{};
    if (sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
        now.sa_handler == SIG_DFL) {
      return number;
    }
  }
  return 0;
}

Frames of_this_thread(int skip) {
  void* frames[kMaxFrames];
  const int count = backtrace(frames, kMaxFrames);
  return Frames(frames + std::min(count, skip + 1), frames + count);
}

Frames of_thread(pid_t tid, double limit_s) {
  if (tid == own_tid()) return of_this_thread(1);
  const std::lock_guard<std::mutex> lock(request.mutex);
  if (request.state.load() == kWriting || !install_handler()) return {};
  request.tid.store(tid);
  request.state.store(kRequested);
  if (syscall(SYS_tgkill, getpid(), tid, request.signal) != 0) {
    request.state.store(kIdle);
    return {};
  }
  constexpr long kTickNs = 200000;
  for (double waited = 0; waited < limit_s && request.state.load() != kAnswered;
       waited += static_cast<double>(kTickNs) * 1e-9) {
    const timespec tick{0, kTickNs};
    nanosleep(&tick, nullptr);
  }
  int expected = kRequested;
  if (request.state.compare_exchange_strong(expected, kIdle) || request.state.load() != kAnswered)
    return {};
  request.state.store(kIdle);
  const int from = std::min(request.count, kSignalFrames);
  return Frames(request.frames + from, request.frames + request.count);
}

std::string name_of(const void* address) {
  Dl_info info{};
  char number[32];
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) {
    std::snprintf(number, sizeof number, "%p", address);
    return number;
  }
  const bool named = info.dli_sname != nullptr;
  const auto from = reinterpret_cast<const char*>(named ? info.dli_saddr : info.dli_fbase);
  std::snprintf(number, sizeof number, "+0x%lx",
                static_cast<unsigned long>(static_cast<const char*>(address) - from));
  const char* object = base_name(info.dli_fname);
  if (!named) return std::string(object) + number;
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  return std::string(status == 0 ? readable.get() : info.dli_sname) + number + " (" + object + ")";
}

std::string format(const Frames& frames, const char* indent) {
  std::string out;
  for (const void* frame : frames) out += indent + name_of(frame) + "\n";
  return out;
}

}  // namespace stacks
