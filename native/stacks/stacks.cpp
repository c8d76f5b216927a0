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

constexpr int kMost = 96;
constexpr int kSignalFrames = 2;  // the handler and the return trampoline

enum State : int { kIdle, kAsked, kWriting, kAnswered };

// One question at a time (`mutex`); `frames` belongs to whoever moved `state` to kWriting.
struct Question {
  std::mutex mutex;
  int signal = 0;
  std::atomic<int> state{kIdle};
  std::atomic<pid_t> tid{0};
  void* frames[kMost];
  int count = 0;
};
Question& asked = *new Question;

pid_t own_tid() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void answer(int) {
  const int saved = errno;
  int expected = kAsked;
  if (asked.tid.load() == own_tid() && asked.state.compare_exchange_strong(expected, kWriting)) {
    asked.count = backtrace(asked.frames, kMost);
    asked.state.store(kAnswered);
  }
  errno = saved;
}

bool prepare() {
  if (asked.signal != 0) return true;
  void* warm[2];
  (void)backtrace(warm, 2);  // loads the unwinder, which a handler must not do
  asked.signal = free_signal();
  if (asked.signal == 0) return false;
  struct sigaction action{};
  action.sa_handler = answer;
  action.sa_flags = SA_RESTART;
  sigfillset(&action.sa_mask);
  if (sigaction(asked.signal, &action, nullptr) != 0) asked.signal = 0;
  return asked.signal != 0;
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
  void* frames[kMost];
  const int count = backtrace(frames, kMost);
  return Frames(frames + std::min(count, skip + 1), frames + count);
}

Frames of_thread(pid_t tid, double limit_s) {
  if (tid == own_tid()) return of_this_thread(1);
  const std::lock_guard<std::mutex> lock(asked.mutex);
  if (asked.state.load() == kWriting || !prepare()) return {};
  asked.tid.store(tid);
  asked.state.store(kAsked);
  if (syscall(SYS_tgkill, getpid(), tid, asked.signal) != 0) {
    asked.state.store(kIdle);
    return {};
  }
  constexpr long kTickNs = 200000;
  for (double waited = 0; waited < limit_s && asked.state.load() != kAnswered;
       waited += static_cast<double>(kTickNs) * 1e-9) {
    const timespec tick{0, kTickNs};
    nanosleep(&tick, nullptr);
  }
  int expected = kAsked;
  if (asked.state.compare_exchange_strong(expected, kIdle) || asked.state.load() != kAnswered)
    return {};
  asked.state.store(kIdle);
  const int from = std::min(asked.count, kSignalFrames);
  return Frames(asked.frames + from, asked.frames + asked.count);
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
