// The lock-order watch. It records lock-order edges: an edge A -> B says that a thread held the
// resource A while it requested the resource B.
#include "watch.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "gil.h"
#include "runtime.h"
#include "stacks/stacks.h"

namespace softcuda {
namespace {

struct Edge {
  int number = 0;
  long count = 0;
  std::string text;  // JSON fields without the Python stack
  std::string python;
};

// Never destroyed, because the device's threads outlive static objects.
struct Watch {
  std::mutex mutex;
  std::string path;
  pid_t pid = 0;
  std::map<std::string, Edge> edges;
  bool ended = false;
};
Watch& g_watch = *new Watch;

std::atomic<bool> g_on{false};
std::atomic<long> g_gil_requests{0};
// Whether the thread has requested the GIL in its current restricted scope. In such a scope, the
// thread may not call the driver (t_restricted_scope in runtime.h).
thread_local bool t_requested_gil = false;
// The host function or destructor that is the current restricted scope; null if the thread is in
// this scope because a pending stream wait depends on it.
thread_local void* t_function = nullptr;
// Key of the lock-order edge that the thread has recorded last; null before the first one. The
// edge's Python stack becomes known when the thread enters its first Python function
// (on_first_python_call).
thread_local std::string* t_edge = nullptr;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char escape[8];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Returns the lines of `text` as a JSON array.
std::string lines(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    out += (out.empty() ? "" : ", ") + quoted(text.substr(at, end - at));
    at = end + 1;
  }
  return "[" + out + "]";
}

// Appends one line of JSON to the file with a single write, so that the lines of several processes
// are not mixed.
void append(const std::string& fields) {
  const int file = open(g_watch.path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) return;
  const std::string line = "{\"pid\": " + std::to_string(getpid()) + ", " + fields + "}\n";
  const ssize_t written = write(file, line.data(), line.size());
  if (written != static_cast<ssize_t>(line.size())) {
    log_line("softcuda: cannot write " + g_watch.path + ": " + std::strerror(errno));
  }
  close(file);
}

void write_edge(const Edge& edge) {
  append("\"edge\": " + std::to_string(edge.number) + ", " + edge.text +
         ", \"python\": " + lines(edge.python));
}

// Counts one observation of a lock-order edge A -> B. The first observation of an edge is also
// written to the file immediately. The edge is therefore in the file even if the process is killed.
void count_edge(const std::string& key, const std::string& text, const std::string& python) {
  const std::lock_guard<std::mutex> lock(g_watch.mutex);
  if (g_watch.ended) return;
  Edge& edge = g_watch.edges[key];
  if (edge.count++ > 0) return;
  edge.number = static_cast<int>(g_watch.edges.size());
  edge.text = text;
  edge.python = python;
  write_edge(edge);
}

// Returns the names of the frames of a native stack without the offsets inside the functions. Two
// stacks with the same functions have the same key.
std::string stack_key(const std::string& native) {
  std::string out;
  for (size_t at = 0; at < native.size();) {
    const size_t end = std::min(native.find('\n', at), native.size());
    const size_t offset = std::min(native.find("+0x", at), end);
    const bool named = native.find(" (", offset) < end;
    out += native.substr(at, (named ? offset : end) - at) + "\n";
    at = end + 1;
  }
  return out;
}

std::string thread_name() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

// Returns, as a JSON array, what cannot proceed until the thread has left its restricted scope
// (t_restricted_scope in runtime.h): calls that need the driver's lock, work on the device, or both
// (INVARIANTS.md L3).
const char* held_resources() {
  if (std::strcmp(t_restricted_scope, "host function") == 0) {
    return "[\"driver lock\", \"device work\"]";
  }
  if (std::strncmp(t_restricted_scope, "worker", 6) == 0) return "[\"device work\"]";
  return "[\"driver lock\"]";  // a user-object destructor
}

// Called when a thread requests the GIL, on this thread and before it may have to wait.
void on_gil_request() {
  if (t_restricted_scope == nullptr || t_requested_gil) return;
  t_requested_gil = true;
  g_gil_requests.fetch_add(1);
  const std::string native = stacks::format(stacks::of_this_thread(2), "");
  std::string scope = t_restricted_scope;
  if (t_function != nullptr) scope += " " + stacks::name_of(t_function);
  const std::string key = "requests GIL: " + scope + stack_key(native);
  count_edge(key,
             "\"holds\": " + std::string(held_resources()) +
                 ", \"wants\": [\"GIL\"], \"at\": " + quoted(scope) +
                 ", \"thread\": " + quoted(thread_name()) + ", \"native\": " + lines(native),
             "");
  delete t_edge;
  t_edge = new std::string(key);
  report_first_python_call(true);
}

// Called when a thread that has got the GIL enters its first Python function. Adds its Python stack
// `stack` to the edge that on_gil_request() has recorded for the thread.
void on_first_python_call(const std::string& stack) {
  if (t_edge == nullptr || t_restricted_scope == nullptr) return;
  std::string text;
  {
    const std::lock_guard<std::mutex> lock(g_watch.mutex);
    Edge& edge = g_watch.edges[*t_edge];
    if (g_watch.ended || edge.python == stack) return;
    if (edge.python.empty()) {
      edge.python = stack;
      write_edge(edge);
      return;
    }
    // The edge was observed before with another Python stack. Count this observation as a separate
    // edge.
    --edge.count;
    text = edge.text;
  }
  count_edge(*t_edge + stack, text, stack);
}

__attribute__((destructor)) void at_exit() { end_watch(""); }

}  // namespace

bool watching() { return g_on.load(std::memory_order_relaxed); }

void start_watch() {
  static std::once_flag once;
  const char* path = std::getenv("SOFTCUDA_WATCH");
  if (path == nullptr || *path == '\0') return;
  std::call_once(once, [&] {
    g_watch.path = path;
    g_watch.pid = getpid();
    append("\"watch\": 1");
    watch_gil(on_gil_request, on_first_python_call);
    g_on.store(true);
  });
}

void record_held_gil(const char* api, WaitsFor resource, const char* reason) {
  const std::string native = stacks::format(stacks::of_this_thread(1), "");
  const std::string python = python_stack();
  const char* name = resource == WaitsFor::driver_lock ? "driver lock" : "device work";
  count_edge(std::string("holds GIL: ") + name + api + stack_key(native) + python,
             "\"holds\": [\"GIL\"], \"wants\": [" + quoted(name) + "], \"at\": " + quoted(api) +
                 ", \"why\": " + quoted(reason) + ", \"thread\": " + quoted(thread_name()) +
                 ", \"native\": " + lines(native),
             python);
}

void watch_restricted_scope(void* function) {
  if (!watching()) return;
  t_requested_gil = false;
  t_function = function;
  report_first_python_call(false);
  watch_new_libraries();
}

void end_watch(const std::string& hang) {
  const std::lock_guard<std::mutex> lock(g_watch.mutex);
  if (!watching() || g_watch.ended || g_watch.pid != getpid()) return;
  g_watch.ended = true;
  std::string counts;
  for (auto& item : g_watch.edges) {
    counts += (counts.empty() ? "\"" : ", \"") + std::to_string(item.second.number) +
              "\": " + std::to_string(item.second.count);
  }
  append("\"counts\": {" + counts + "}, \"sees_gil\": " + (gil_watched() ? "true" : "false") +
         ", \"hang\": " + lines(hang));
}

}  // namespace softcuda

using namespace softcuda;

// Returns the number of requests for the GIL from host functions, from user-object destructors, and
// from threads on which a pending stream wait depends. A request is counted before the thread gets
// the GIL.
SC_EXPORT int64_t softcuda_gil_requests() { return g_gil_requests.load(); }
// Returns 1 if requests for the GIL are observed, else 0.
SC_EXPORT int softcuda_watch_ready() { return watching() && gil_watched() ? 1 : 0; }
