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
  std::string text;  // its fields in JSON, without the Python stack
  std::string python;
};

// Leaked on purpose: threads of the driver end after static objects.
struct Watch {
  std::mutex mutex;
  std::string path;
  pid_t pid = 0;
  std::map<std::string, Edge> edges;
  bool ended = false;
};
Watch& g_watch = *new Watch;

std::atomic<bool> g_on{false};
std::atomic<long> g_asks{0};
thread_local bool t_asked = false;        // once per scope
thread_local void* t_function = nullptr;  // what the driver called
thread_local std::string* t_edge =
    nullptr;  // key of the edge whose Python function has no name yet

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

// A text of lines as a JSON array.
std::string lines(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    out += (out.empty() ? "" : ", ") + quoted(text.substr(at, end - at));
    at = end + 1;
  }
  return "[" + out + "]";
}

// One line, one write: several processes may share the file.
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

void tell(const Edge& edge) {
  append("\"edge\": " + std::to_string(edge.number) + ", " + edge.text +
         ", \"python\": " + lines(edge.python));
}

// Counts an edge; a new one is written at once, so that it is known whatever becomes of the
// process.
void note(const std::string& key, const std::string& text, const std::string& python) {
  const std::lock_guard<std::mutex> lock(g_watch.mutex);
  if (g_watch.ended) return;
  Edge& edge = g_watch.edges[key];
  if (edge.count++ > 0) return;
  edge.number = static_cast<int>(g_watch.edges.size());
  edge.text = text;
  edge.python = python;
  tell(edge);
}

// What tells one way through the code from another: frames without the offsets of named functions.
std::string path_of(const std::string& native) {
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

// On the thread that asks, before it may have to wait.
void asked() {
  if (t_forbidden == nullptr || t_asked) return;
  t_asked = true;
  g_asks.fetch_add(1);
  const std::string native = stacks::format(stacks::of_this_thread(2), "");
  const bool host = std::strcmp(t_forbidden, "host function") == 0;
  const bool owes = std::strncmp(t_forbidden, "worker", 6) == 0;
  const std::string what =
      std::string(t_forbidden) + (t_function != nullptr ? " " + stacks::name_of(t_function) : "");
  const std::string key = "asks " + what + path_of(native);
  // What waits for it: the device always; a lock, where the driver holds one meanwhile.
  const char* held = host   ? "[\"driver lock\", \"device work\"]"
                     : owes ? "[\"device work\"]"
                            : "[\"driver lock\"]";
  note(key,
       "\"holds\": " + std::string(held) + ", \"wants\": [\"GIL\"], \"at\": " + quoted(what) +
           ", \"thread\": " + quoted(thread_name()) + ", \"native\": " + lines(native),
       "");
  delete t_edge;
  t_edge = new std::string(key);
  name_first_python_call(true);
}

void entered(const std::string& stack) {
  if (t_edge == nullptr || t_forbidden == nullptr) return;
  std::string text;
  {
    const std::lock_guard<std::mutex> lock(g_watch.mutex);
    Edge& edge = g_watch.edges[*t_edge];
    if (g_watch.ended || edge.python == stack) return;
    if (edge.python.empty()) {
      edge.python = stack;
      tell(edge);
      return;
    }
    --edge.count;  // the same way, to another Python function: an edge of its own
    text = edge.text;
  }
  note(*t_edge + stack, text, stack);
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
    watch_gil(asked, entered);
    g_on.store(true);
  });
}

void note_held_gil(const char* api, Wanted wanted, const char* why) {
  const std::string native = stacks::format(stacks::of_this_thread(1), "");
  const std::string python = python_stack();
  const char* resource = wanted == Wanted::driver_lock ? "driver lock" : "device work";
  note(std::string("holds ") + resource + api + path_of(native) + python,
       "\"holds\": [\"GIL\"], \"wants\": [" + quoted(resource) + "], \"at\": " + quoted(api) +
           ", \"why\": " + quoted(why) + ", \"thread\": " + quoted(thread_name()) +
           ", \"native\": " + lines(native),
       python);
}

void watch_scope_begins(void* function) {
  if (!watching()) return;
  t_asked = false;
  t_function = function;
  name_first_python_call(false);
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

// Functions run for the driver that asked for the GIL so far; counted before they get it.
SC_EXPORT int64_t softcuda_watch_asks() { return g_asks.load(); }
// 1 when requests for the GIL are seen.
SC_EXPORT int softcuda_watch_ready() { return watching() && gil_watched() ? 1 : 0; }
