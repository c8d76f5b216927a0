// Signal handlers that turn memory and arithmetic faults of device code into sticky errors
// (INVARIANTS.md E4). All other signals are passed to the previously installed handler.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "executor.h"

namespace softcuda {

extern __attribute__((tls_model("initial-exec"))) thread_local Executor* t_executor;

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction g_previous[4];
__attribute__((tls_model("initial-exec"))) thread_local bool t_chaining = false;

// Passes a signal to the previously installed handler.
void chain(int signal, siginfo_t* info, void* context, int index) {
  const struct sigaction& before = g_previous[index];
  if (t_chaining || before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    // Restore the default action of the signal and return. The instruction then raises the signal
    // again, which terminates the process.
    struct sigaction default_action{};
    default_action.sa_handler = SIG_DFL;
    sigaction(signal, &default_action, nullptr);
    return;
  }
  t_chaining = true;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
  } else {
    before.sa_handler(signal);
  }
  t_chaining = false;
}

// Prints a message if host code has dereferenced a device address.
void report_host_access(unsigned long long address) {
  char text[160];
  const int n = std::snprintf(text, sizeof text,
                              "softcuda: host code accessed device address 0x%llx; copy the data "
                              "to the host first\n",
                              address);
  if (n > 0 && write(STDERR_FILENO, text, static_cast<size_t>(n)) < 0) return;
}

void on_fault(int signal, siginfo_t* info, void* raw) {
  int index = 0;
  while (kSignals[index] != signal) ++index;
  const auto address = reinterpret_cast<unsigned long long>(info->si_addr);
  // The signal contains no address if kill() has sent it or if the accessed address is not
  // canonical.
  const bool known = info->si_code > 0 && info->si_code != SI_KERNEL;
  bool written = false;
#if defined(__x86_64__)
  written = (static_cast<ucontext_t*>(raw)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#endif
  if (t_executor != nullptr) t_executor->handle_signal(signal, known ? address : 0, known, written);
  if (signal == SIGSEGV && known && is_alias(address)) report_host_access(address);
  chain(signal, info, raw, index);
}

}  // namespace

void restore_fault_handlers() {
  struct sigaction now{};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != on_fault) install_fault_handlers();
}

void install_fault_handlers() {
  static std::mutex& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < 4; ++i) {
    struct sigaction now{};
    sigaction(kSignals[i], nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) continue;
    g_previous[i] = now;
    struct sigaction ours{};
    ours.sa_sigaction = on_fault;
    // SA_NODEFER is needed because the handler is left by a jump. Without this flag the signal
    // would remain blocked afterwards.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    sigaction(kSignals[i], &ours, nullptr);
  }
}

}  // namespace softcuda
