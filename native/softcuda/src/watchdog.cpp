// What every thread is in, with its stacks, and the watchdog that tells it (invariants A1, L4).
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

constexpr double kAnswerLimitS = 5.0;

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

// Takes the part that speaks of one thread out of the fault handler's output; "" when there is
// none.
std::string take_block(std::string* stacks, uint64_t pthread) {
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

// The watchdog's own clock stands still while the process does (stopped, or starved of processors),
// so that only a call that had its time counts as stuck.
constexpr uint64_t kTickNs = 50000000;

// What one thread was seen in, since when by that clock.
struct Seen {
  uint64_t since = 0, first = 0;
  bool stuck(bool busy, uint64_t began, uint64_t now, uint64_t limit) {
    if (!busy || began != since) first = now;
    since = began;
    return busy && now > first + limit;
  }
};

bool stuck(std::map<const void*, Seen>* seen, uint64_t now, uint64_t limit) {
  const RunningHost& host = g_running_host;
  bool any = (*seen)[&host].stuck(host.fn.load() != nullptr, host.since, now, limit);
  for (ThreadRecord* r = first_thread(); r != nullptr; r = r->next) {
    any = (*seen)[r].stuck(r->used && r->site.load() != nullptr, r->since, now, limit) || any;
  }
  return any;
}

[[noreturn]] void watch_forever() {
  const unsigned seconds = settings().watchdog_seconds;
  std::map<const void*, Seen> seen;
  uint64_t now = 0;
  while (!stuck(&seen, now, uint64_t{seconds} * 1000000000u)) {
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
  for (const Side& side : sides()) out += side.text;
  describe_workers(&out);
  return out;
}

std::string describe_with_stacks() {
  std::string python = all_python_stacks();
  std::string out;
  for (const Side& side : sides()) {
    out += side.text;
    const std::string native =
        stacks::format(stacks::of_thread(static_cast<pid_t>(side.tid), kAnswerLimitS), "    ");
    out += "  native, innermost first:\n" + (native.empty() ? "    it did not answer\n" : native);
    const std::string own = take_block(&python, side.pthread);
    out += own.empty() ? "  in no Python function\n" : "  Python, innermost first:\n" + own;
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
