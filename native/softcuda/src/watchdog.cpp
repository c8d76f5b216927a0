// What every thread is in, with its stacks, and the watchdog that tells it (invariants A1, L4).
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "calls.h"
#include "gil.h"
#include "scheduler.h"
#include "stacks/stacks.h"
#include "watch.h"

namespace softcuda {
namespace {

constexpr double kAnswerLimitS = 1.0;

struct Side {
  long tid;
  uint64_t pthread;
  std::string text;
};

std::string milliseconds(uint64_t since) {
  return std::to_string((now_ns() - since) / 1000000) + " ms";
}

// Threads inside a driver call, in a host function, or owing an answer.
std::vector<Side> sides() {
  std::vector<Side> out;
  for (ThreadRecord* r = first_thread(); r != nullptr; r = r->next) {
    const ApiSite* site = r->site.load();
    if (!r->used || (site == nullptr && !r->owes)) continue;
    const char* waiting = r->waiting.load();
    std::string text = "thread " + std::to_string(r->tid);
    if (site == nullptr) {
      text += " owes the device an answer since " + milliseconds(r->since);
    } else {
      text += std::string(" is in ") + site->name + " for " + milliseconds(r->since) + ", GIL " +
              (r->gil ? "HELD" : "not held") +
              (waiting ? std::string(", waiting for ") + waiting : std::string());
    }
    out.push_back({r->tid, r->pthread, text + "\n"});
  }
  const RunningHost& host = running_host();
  if (void* fn = host.fn.load()) {
    out.push_back({host.tid, host.pthread,
                   "thread " + std::to_string(host.tid) + " runs host function " +
                       stacks::name_of(fn) + " for " + milliseconds(host.since) +
                       ((settings().lock_model & 1) != 0 ? ", holding the context lock" : "") +
                       "\n"});
  }
  return out;
}

// The part of the fault handler's output that speaks of one thread; "" when there is none.
std::string block_of(const std::string& stacks, uint64_t pthread) {
  char id[32];
  std::snprintf(id, sizeof id, "0x%016llx", static_cast<unsigned long long>(pthread));
  const size_t at = stacks.find(id);
  if (at == std::string::npos) return "";
  const size_t first = stacks.find('\n', at) + 1;
  const size_t end = std::min(stacks.find("\n\n", at), stacks.size());
  return first == 0 || first >= end ? "" : stacks.substr(first, end - first) + "\n";
}

bool stuck(uint64_t limit) {
  const uint64_t now = now_ns();
  const RunningHost& host = running_host();
  if (host.fn.load() != nullptr && now > host.since + limit) return true;
  for (ThreadRecord* r = first_thread(); r != nullptr; r = r->next) {
    if (r->used && r->site.load() != nullptr && now > r->since + limit) return true;
  }
  return false;
}

[[noreturn]] void watch_forever() {
  const unsigned seconds = settings().watchdog_seconds;
  while (!stuck(uint64_t{seconds} * 1000000000u)) usleep(50000);
  const std::string report = describe_with_stacks();
  std::fprintf(stderr, "softcuda watchdog: no progress for %u s\n%s", seconds, report.c_str());
  std::fflush(stderr);
  end_watch(report);
  _exit(86);
}

}  // namespace

std::string describe() {
  std::string out;
  for (const Side& side : sides()) out += side.text;
  describe_workers(&out);
  return out;
}

std::string describe_with_stacks() {
  const std::string python = all_python_stacks();
  std::string out;
  for (const Side& side : sides()) {
    out += side.text;
    const std::string native =
        stacks::format(stacks::of_thread(static_cast<pid_t>(side.tid), kAnswerLimitS), "    ");
    out += "  native, innermost first:\n" + (native.empty() ? "    it did not answer\n" : native);
    const std::string own = block_of(python, side.pthread);
    out += own.empty() ? "  in no Python function\n" : "  Python, innermost first:\n" + own;
  }
  describe_workers(&out);
  return out + (python.empty() ? "" : "Python's threads:\n" + python);
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
