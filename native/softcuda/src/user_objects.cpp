// User objects: reference counts and destructors (INVARIANTS.md U1 to U4).
#include <condition_variable>
#include <deque>
#include <thread>

#include "graphs.h"
#include "watch.h"

namespace softcuda {
namespace {

Handles<UserObject>& objects = *new Handles<UserObject>(0x58000000000000, "not a user object");

struct DestructorThread {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::shared_ptr<UserObject>> dead;
};
DestructorThread& g_destructor_thread = *new DestructorThread;

// Runs the destructor of a user object in a restricted scope, in which driver calls are refused.
void destroy(const UserObject& object) {
  const char* outer = t_restricted_scope;
  t_restricted_scope = "user-object destructor";
  watch_restricted_scope(reinterpret_cast<void*>(object.destroy));
  object.destroy(object.data);
  t_restricted_scope = outer;
  live_add(Resource::user_object, -1);
}

void destructor_main() {
  for (;;) {
    std::unique_lock<std::mutex> lock(g_destructor_thread.mutex);
    g_destructor_thread.wake.wait(lock, [&] { return !g_destructor_thread.dead.empty(); });
    std::shared_ptr<UserObject> object = std::move(g_destructor_thread.dead.front());
    g_destructor_thread.dead.pop_front();
    lock.unlock();
    if (sticky() == CUDA_SUCCESS) destroy(*object);
  }
}

thread_local bool t_inline_destructors = false;

// Called after the last reference to a user object was released. Runs the destructor now or queues
// it for the destructor thread. With SOFTCUDA_DESTRUCTORS=inline, the destructor runs in the driver
// call that released the reference. If the setting is not `inline`, or if a completed launch
// released the reference, the destructor thread runs it (INVARIANTS.md U3).
void queue_destructor(std::shared_ptr<UserObject> object) {
  objects.take(object->handle);
  if (settings().inline_destructors && t_inline_destructors) {
    destroy(*object);
    return;
  }
  static std::once_flag once;
  std::call_once(once, [] { std::thread(destructor_main).detach(); });
  std::lock_guard<std::mutex> lock(g_destructor_thread.mutex);
  g_destructor_thread.dead.push_back(std::move(object));
  g_destructor_thread.wake.notify_one();
}

// Releases `count` references to a user object. Returns false if fewer references exist.
bool release_references(const std::shared_ptr<UserObject>& object, unsigned count) {
  if (sticky() != CUDA_SUCCESS) return true;  // after a fault no destructor runs (INVARIANTS.md E2)
  unsigned now = object->refs.load();
  do {
    if (now < count) return false;
  } while (!object->refs.compare_exchange_weak(now, now - count));
  if (now == count) queue_destructor(object);
  return true;
}

}  // namespace

InlineDestructorScope::InlineDestructorScope() : outer_(t_inline_destructors) {
  t_inline_destructors = true;
}
InlineDestructorScope::~InlineDestructorScope() { t_inline_destructors = outer_; }

References::References(const References& other) { merge(other); }

References::~References() {
  for (auto& item : held_) release_references(item.first, item.second);
}

void References::add(const std::shared_ptr<UserObject>& object, unsigned count, bool acquire) {
  if (acquire) object->refs += count;
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
  return release_references(object, count);
}

}  // namespace softcuda

using namespace softcuda;

constexpr unsigned kMaxReferences = 0x7fffffffu;  // maximum that one call can add or release

SC_API(cuUserObjectCreate, 11030, 0, CUuserObject*, out, void*, data, CUhostFn, destroy_fn,
       unsigned, initial, unsigned, flags) {
  require(
      out != nullptr && destroy_fn != nullptr && initial > 0 && initial <= kMaxReferences &&
          flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
      CUDA_ERROR_INVALID_VALUE,
      "cuUserObjectCreate requires a destructor, a reference count from 1 to INT_MAX and the flag "
      "CU_USER_OBJECT_NO_DESTRUCTOR_SYNC");
  auto object = std::make_shared<UserObject>();
  object->data = data;
  object->destroy = destroy_fn;
  object->refs = initial;
  object->handle = objects.add(object);
  live_add(Resource::user_object, 1);
  *out = static_cast<CUuserObject>(object->handle);
}

SC_API(cuUserObjectRetain, 11030, 0, CUuserObject, handle, unsigned, count) {
  const auto object = objects.find(handle);
  require(count != 0 && count <= kMaxReferences);
  object->refs += count;
}

SC_API(cuUserObjectRelease, 11030, 0, CUuserObject, handle, unsigned, count) {
  InlineDestructorScope inline_destructors;
  const auto object = objects.find(handle);
  require(count != 0 && release_references(object, count), CUDA_ERROR_INVALID_VALUE,
          "more references were released than exist");
}

SC_API(cuGraphRetainUserObject, 11030, 0, CUgraph, graph_handle, CUuserObject, handle, unsigned,
       count, unsigned, flags) {
  const auto graph = graphs.find(graph_handle);
  const auto object = objects.find(handle);
  require(count != 0 && count <= kMaxReferences && (flags & ~CU_GRAPH_USER_OBJECT_MOVE) == 0);
  const bool move = (flags & CU_GRAPH_USER_OBJECT_MOVE) != 0;
  require(!move || object->refs >= count, CUDA_ERROR_INVALID_VALUE,
          "more references were moved than exist");
  std::lock_guard<std::mutex> lock(graph_mutex);
  graph->references->add(object, count, !move);
}

SC_API(cuGraphReleaseUserObject, 11030, 0, CUgraph, graph_handle, CUuserObject, handle, unsigned,
       count) {
  InlineDestructorScope inline_destructors;
  const auto graph = graphs.find(graph_handle);
  const auto object = objects.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  require(count != 0 && graph->references->release(object, count), CUDA_ERROR_INVALID_VALUE,
          "the graph does not hold that many references");
}
