// User objects: reference counts and destructors (invariants U1-U4).
#include <condition_variable>
#include <deque>
#include <thread>

#include "graphs.h"
#include "watch.h"

namespace softcuda {
namespace {

Handles<UserObject>& objects = *new Handles<UserObject>(0x58000000000000, "not a user object");

struct Reaper {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::shared_ptr<UserObject>> dead;
};
Reaper& g_reaper = *new Reaper;

void destroy(const UserObject& object) {
  const char* outer = t_forbidden;
  t_forbidden = "user-object destructor";
  watch_scope_begins(reinterpret_cast<void*>(object.destroy));
  object.destroy(object.data);
  t_forbidden = outer;
  live_add(Kind::user_object, -1);
}

void reaper_main() {
  for (;;) {
    std::unique_lock<std::mutex> lock(g_reaper.mutex);
    g_reaper.wake.wait(lock, [&] { return !g_reaper.dead.empty(); });
    std::shared_ptr<UserObject> object = std::move(g_reaper.dead.front());
    g_reaper.dead.pop_front();
    lock.unlock();
    if (sticky() == CUDA_SUCCESS) destroy(*object);
  }
}

thread_local bool t_api_thread = false;

// Late mode: on the reaper's thread. Inline mode: in the call that drops the last reference, as
// drivers are seen to do; what a finished launch drops is always late.
void bury(std::shared_ptr<UserObject> object) {
  objects.take(object->handle);
  if (settings().inline_destructors && t_api_thread) {
    destroy(*object);
    return;
  }
  static std::once_flag once;
  std::call_once(once, [] { std::thread(reaper_main).detach(); });
  std::lock_guard<std::mutex> lock(g_reaper.mutex);
  g_reaper.dead.push_back(std::move(object));
  g_reaper.wake.notify_one();
}

bool drop(const std::shared_ptr<UserObject>& object, unsigned count) {
  if (sticky() != CUDA_SUCCESS) return true;  // leaked on purpose (E3)
  unsigned now = object->refs.load();
  do {
    if (now < count) return false;
  } while (!object->refs.compare_exchange_weak(now, now - count));
  if (now == count) bury(object);
  return true;
}

}  // namespace

ApiThread::ApiThread() : outer_(t_api_thread) { t_api_thread = true; }
ApiThread::~ApiThread() { t_api_thread = outer_; }

References::References(const References& other) { merge(other); }

References::~References() {
  for (auto& item : held_) drop(item.first, item.second);
}

void References::add(const std::shared_ptr<UserObject>& object, unsigned count, bool take_new) {
  if (take_new) object->refs += count;
  held_[object] += count;
}

void References::merge(const References& other) {
  for (auto& item : other.held_) add(item.first, item.second, true);
}

bool References::release(const std::shared_ptr<UserObject>& object, unsigned count) {
  auto it = held_.find(object);
  if (it == held_.end() || it->second < count) return false;
  it->second -= count;
  if (it->second == 0) held_.erase(it);
  return drop(object, count);
}

}  // namespace softcuda

using namespace softcuda;

constexpr unsigned kMost = 0x7fffffffu;  // references in one call

SC_API(cuUserObjectCreate, 11030, 0, CUuserObject*, out, void*, data, CUhostFn, destroy_fn,
       unsigned, initial, unsigned, flags) {
  need(out != nullptr && destroy_fn != nullptr && initial > 0 && initial <= kMost &&
           flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
       CUDA_ERROR_INVALID_VALUE,
       "cuUserObjectCreate needs a destructor, a count in 1..INT_MAX and the flag "
       "NO_DESTRUCTOR_SYNC");
  auto object = std::make_shared<UserObject>();
  object->data = data;
  object->destroy = destroy_fn;
  object->refs = initial;
  object->handle = objects.add(object);
  live_add(Kind::user_object, 1);
  *out = static_cast<CUuserObject>(object->handle);
}

SC_API(cuUserObjectRelease, 11030, 0, CUuserObject, handle, unsigned, count) {
  ApiThread here;
  const auto object = objects.find(handle);
  need(count != 0 && drop(object, count), CUDA_ERROR_INVALID_VALUE,
       "more references released than exist");
}

SC_API(cuGraphRetainUserObject, 11030, 0, CUgraph, graph_handle, CUuserObject, handle, unsigned,
       count, unsigned, flags) {
  const auto graph = graphs.find(graph_handle);
  const auto object = objects.find(handle);
  need(count != 0 && count <= kMost && (flags & ~CU_GRAPH_USER_OBJECT_MOVE) == 0);
  const bool move = (flags & CU_GRAPH_USER_OBJECT_MOVE) != 0;
  need(!move || object->refs >= count, CUDA_ERROR_INVALID_VALUE,
       "more references moved than exist");
  std::lock_guard<std::mutex> lock(graph_mutex);
  graph->references->add(object, count, !move);
}

SC_API(cuGraphReleaseUserObject, 11030, 0, CUgraph, graph_handle, CUuserObject, handle, unsigned,
       count) {
  ApiThread here;
  const auto graph = graphs.find(graph_handle);
  const auto object = objects.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  need(count != 0 && graph->references->release(object, count), CUDA_ERROR_INVALID_VALUE,
       "the graph does not hold that many references");
}
