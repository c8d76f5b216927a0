// Reports of what each thread is doing in the driver, and the watchdog that prints them for a
// process that hangs (INVARIANTS.md A1, L4 to L6).
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <thread>
#include <vector>

#include "calls.h"
#include "gil.h"
#include "scheduler.h"
#include "stacks/stacks.h"
#include "watch.h"

namespace softcuda {
namespace {

// Time limit for reading the native stack of a thread.
constexpr double kStackLimitS = 5.0;

struct ThreadState {
  long tid;
  uint64_t pthread;
  std::string text;
};

std::string milliseconds(uint64_t since) {
  return std::to_string((now_ns() - since) / 1000000) + " ms";
}

// Returns the threads that execute a driver call or a host function, and the threads that the
// device waits for, with a line of text for each.
std::vector<ThreadState> active_threads() {
  std::vector<ThreadState> out;
  for (ThreadRecord* r = first_thread(); r != nullptr; r = r->next) {
    const EntryPoint* entry_point = r->entry_point.load();
    if (!r->used || (entry_point == nullptr && !r->device_waits)) continue;
    const char* waiting = r->waiting.load();
    std::string text = "thread " + std::to_string(r->tid);
    if (entry_point == nullptr) {
      text += " has kept the device waiting for " + milliseconds(r->since);
    } else {
      text += std::string(" is in ") + entry_point->name + " for " + milliseconds(r->since) +
              ", GIL " + (r->gil ? "HELD" : "not held") +
              (waiting ? std::string(", waiting for ") + waiting : std::string());
    }
    out.push_back({r->tid, r->pthread, text + "\n"});
  }
  const RunningHost& host = g_running_host;
  if (void* fn = host.fn.load()) {
    out.push_back({host.tid, host.pthread,
                   "thread " + std::to_string(host.tid) + " runs host function " +
                       stacks::name_of(fn) + " for " + milliseconds(host.since) +
                       ((settings().lock_model & 1) != 0 ? ", holding the context lock" : "") +
                       "\n"});
  }
  return out;
}

// Removes the stack of one thread from the output of faulthandler and returns it; "" if there is
// none.
std::string extract_stack(std::string* stacks, uint64_t pthread) {
  char id[32];
  std::snprintf(id, sizeof id, "0x%016llx", static_cast<unsigned long long>(pthread));
  const size_t at = stacks->find(id);
  if (at == std::string::npos) return "";
  const size_t end = std::min(stacks->find("\n\n", at), stacks->size());
  const size_t first = std::min(stacks->find('\n', at) + 1, end);
  const std::string block = stacks->substr(first, end - first);
  const size_t before = stacks->rfind("\n\n", at);
  const size_t begin = before == std::string::npos ? 0 : before + 2;
  stacks->erase(begin, std::min(end + 2, stacks->size()) - begin);
  return block + (block.empty() || block.back() == '\n' ? "" : "\n");
}

// Time between two wake-ups of the watchdog. The watchdog counts its wake-ups instead of reading a
// clock. Its time therefore stops when the process is stopped or gets no processor time, and such a
// process does not count as stuck (INVARIANTS.md L6).
constexpr uint64_t kTickNs = 50000000;

// The call in which the watchdog has last seen a thread. A call is identified by its start time.
struct Observation {
  uint64_t call_start = 0;      // CLOCK_MONOTONIC
  uint64_t first_observed = 0;  // watchdog time
  bool is_stuck(bool busy, uint64_t start, uint64_t now, uint64_t limit) {
    if (!busy || start != call_start) first_observed = now;
    call_start = start;
    return busy && now > first_observed + limit;
  }
};

// Whether any driver call or host function has taken longer than `limit`. `now` is the watchdog's
// own time in nanoseconds (see kTickNs). `observed` keeps what the previous call of this function
// has seen of each thread.
bool any_stuck(std::map<const void*, Observation>* observed, uint64_t now, uint64_t limit) {
  const RunningHost& host = g_running_host;
  bool any = (*observed)[&host].is_stuck(host.fn.load() != nullptr, host.since, now, limit);
  for (ThreadRecord* r = first_thread(); r != nullptr; r = r->next) {
    const bool busy = r->used && r->entry_point.load() != nullptr;
    if ((*observed)[r].is_stuck(busy, r->since, now, limit)) any = true;
  }
  return any;
}

[[noreturn]] void watch_forever() {
  const unsigned seconds = settings().watchdog_seconds;
  std::map<const void*, Observation> observed;
  uint64_t now = 0;
  while (!any_stuck(&observed, now, uint64_t{seconds} * 1000000000u)) {
    usleep(kTickNs / 1000);
    now += kTickNs;
  }
  const std::string report = describe_with_stacks();
  std::fprintf(stderr, "softcuda watchdog: no progress for %u s\n%s", seconds, report.c_str());
  std::fflush(stderr);
  end_watch(report);
  _exit(86);
}

}  // namespace

std::string describe() {
  std::string out;
  for (const ThreadState& thread : active_threads()) out += thread.text;
  describe_workers(&out);
  return out;
}

std::string describe_with_stacks() {
  std::string python = all_python_stacks();
  std::string out;
  for (const ThreadState& thread : active_threads()) {
    out += thread.text;
    const std::string native =
        stacks::format(stacks::of_thread(static_cast<pid_t>(thread.tid), kStackLimitS), "    ");
    out += "  native stack, innermost first:\n" + (native.empty() ? "    not available\n" : native);
    const std::string own = extract_stack(&python, thread.pthread);
    out += own.empty() ? "  no Python function\n" : "  Python stack, innermost first:\n" + own;
  }
  describe_workers(&out);
  return out + (python.empty() ? "" : "other Python threads:\n" + python);
}

void start_watchdog() {
  static std::once_flag once;
  if (settings().watchdog_seconds == 0) return;
  std::call_once(once, [] {
    prepare_python_stacks();
    std::thread(watch_forever).detach();
  });
}

}  // namespace softcuda
