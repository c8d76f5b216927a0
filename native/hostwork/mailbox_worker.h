// A persistent thread of ours that answers mailboxes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace graft::hostwork {

class Port;

struct WorkerOptions {
  std::vector<int> cpus;   // cores the thread may run on; empty: any
  bool spin = false;       // never sleep while a replay is in flight
  double spin_s = 50e-6;   // otherwise spin so long,
  double sleep_s = 50e-6;  // then sleep so long between looks
  std::string name;
};

// A thread and the ports it serves. It parks while no launch of any of its graphs is in flight
// (M7), and ends when the last owner of this object is gone.
//
// Made by std::make_shared only, like GraphState: whoever drops the last owner, the worker's own
// thread too, then takes no GIL.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void add(const std::shared_ptr<Port>& port);
  void remove(const Port* port) noexcept;
  void wake() noexcept;
  std::int64_t served() const;
  bool parked() const;  // does it wait for a launch now?
  // Is the thread inside a request that the watchdog has released?
  bool stuck() const;

  struct Core;  // shared with the thread

 private:
  const std::shared_ptr<Core> core_;
};

}  // namespace graft::hostwork
