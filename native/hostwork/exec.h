// One executable graph: launches in order, knows when it is idle, dies on the reaper thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "hostwork/cell.h"
#include "hostwork/driver.h"
#include "hostwork/reaper.h"
#include "hostwork/resource.h"
#include "hostwork/state.h"

namespace graft::hostwork {

class ExecEnd;

using Outcome = std::pair<Result, const char*>;  // and the call that was made last

constexpr Result kClosed = -1;  // the executable was closed

// The driver does not synchronise graph objects internally: one mutex per executable serialises
// its calls. It is taken without the GIL and never held while taking the GIL.
class Exec {
 public:
  // Owns both handles. `event` is recorded after each launch.
  Exec(std::uint64_t exec, std::uint64_t event, std::shared_ptr<GraphState> state);
  ~Exec();
  Exec(const Exec&) = delete;
  Exec& operator=(const Exec&) = delete;

  Outcome launch(std::uint64_t stream);
  Outcome upload(std::uint64_t stream);
  // Success when no launch is in flight, kNotReady otherwise.
  Outcome query();
  // The event behind what was launched so far: later launches record another one, so that who waits
  // for it waits for no launch of others. Null when nothing was launched, or it is closed.
  std::shared_ptr<Resource> launched_so_far();
  bool closed();
  void close();

  // cuGraphExecUpdate; `info` says which node is to blame when it fails. Launches from now on count
  // in `state`, the other definition's.
  Result update(std::uint64_t graph, std::shared_ptr<GraphState> state, UpdateInfo* info);

  // Changes a kernel node for later launches; launches in flight keep what they had. `params` is
  // the driver's structure.
  Outcome set_kernel(std::uint64_t node, std::uint64_t params);
  Outcome set_enabled(std::uint64_t node, bool enabled);
  Outcome get_enabled(std::uint64_t node, bool* enabled);

  // Keeps what changed nodes use until the launches in flight have ended. Takes over a reference;
  // called once.
  void keep(PyObject* owners);

  // The value that launches from now on see. Takes over a reference, and may give one back.
  [[nodiscard]] PyObject* set_payload(PayloadCell& cell, PyObject* value, std::uint64_t address);

  std::int64_t launches();
  std::uint64_t handle() const { return reinterpret_cast<std::uint64_t>(exec_); }

 private:
  void adopt(std::shared_ptr<GraphState> state);

  std::mutex mutex_;
  const Handle exec_;
  ExecEnd* end_;                     // null once closed
  std::shared_ptr<Resource> event_;  // behind the last launch; null once closed
  bool waited_for_ = false;          // is somebody waiting for that event?
  std::shared_ptr<GraphState> state_;
  std::int64_t launches_ = 0;
};

}  // namespace graft::hostwork
