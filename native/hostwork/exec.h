// One executable graph: launches in order, knows when it is idle, dies on the reaper thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "hostwork/cell.h"
#include "hostwork/driver.h"
#include "hostwork/reaper.h"
#include "hostwork/state.h"

namespace graft::hostwork {

class ExecEnd;

struct Outcome {
  Result result;
  const char* api;  // the call that was made last
};

constexpr Result kClosed = -1;  // the executable was closed

// The driver does not synchronise graph objects internally: one mutex per executable serialises
// its calls. It is taken without the GIL and never held while taking the GIL.
class Exec {
 public:
  // Owns both handles. `event` is recorded after every launch.
  Exec(std::uint64_t exec, std::uint64_t event, std::shared_ptr<GraphState> state);
  ~Exec();
  Exec(const Exec&) = delete;
  Exec& operator=(const Exec&) = delete;

  Outcome launch(std::uint64_t stream);
  Outcome upload(std::uint64_t stream);
  // Success when no launch is in flight, kNotReady otherwise.
  Outcome query();
  void close();

  // cuGraphExecUpdate; `info` says which node is to blame when it fails.
  Result update(std::uint64_t graph, UpdateInfo* info);

  // Changes one node for later launches; launches in flight keep what they had. `params` is the
  // driver's structure of that kind of node; of an event node the event.
  enum class NodeKind : int { kKernel, kCopy, kFill, kEventRecord, kEventWait };
  Outcome set_node(NodeKind kind, std::uint64_t node, std::uint64_t params);
  Outcome set_enabled(std::uint64_t node, bool enabled);
  Outcome get_enabled(std::uint64_t node, bool* enabled);

  // Keeps what changed nodes use until the launches in flight have ended. Takes over a reference;
  // called once.
  void keep(PyObject* owners);

  // The value that launches from now on see. Takes over a reference, and may give one back.
  [[nodiscard]] PyObject* set_payload(PayloadCell& cell, PyObject* value, std::uint64_t address);

  // Takes over the state of the definition that the executable runs from now on.
  void adopt(std::shared_ptr<GraphState> state);

  std::int64_t launches();
  std::uint64_t handle() const { return reinterpret_cast<std::uint64_t>(exec_); }

 private:
  std::mutex mutex_;
  const Handle exec_;
  const Handle event_;
  ExecEnd* end_;  // null once closed
  std::shared_ptr<GraphState> state_;
  std::int64_t launches_ = 0;
};

}  // namespace graft::hostwork
