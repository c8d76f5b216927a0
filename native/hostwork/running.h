// Which host function each thread is in.
#pragma once

#include <cstdint>

namespace graft::hostwork {

class HostRecord;

// Registers a run for its scope, so that a deadline can name it and native work can ask for it.
class RunningScope {
 public:
  RunningScope(HostRecord* record, std::int64_t replay);
  ~RunningScope();
  RunningScope(const RunningScope&) = delete;
  RunningScope& operator=(const RunningScope&) = delete;
};

}  // namespace graft::hostwork
