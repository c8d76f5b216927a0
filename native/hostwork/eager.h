// Host functions enqueued on a stream at once, outside of any graph.
#pragma once

#include <cstdint>

#include "hostwork/record.h"

namespace graft::hostwork {

// A record that frees itself after its one run, or is abandoned when it can never run. It stands
// in a list until then, so that exactly one of the two happens.
class EagerRecord final : public HostRecord {
 public:
  using HostRecord::HostRecord;
  Result launch(std::uint64_t stream, bool spin);  // consumes this also on failure; no GIL

 private:
  friend std::int64_t abandon_eager();
  static void entry(void* data);
  void fail_eager(Failure failure) override;

  enum State : int { kPending, kTaken };
  std::atomic<int> state_{kPending};
  std::uint64_t stream_ = 0;
};

// The oldest unreported failure on this stream, which the caller then owns. GIL held.
bool take_eager_failure(std::uint64_t stream, Failure* out);

// All of them, of every stream.
std::vector<Failure> take_eager_failures();

// After a context fault host functions are not called any more: gives up every pending record.
// Their Python references are released; the small native part stays, in case one does run.
std::int64_t abandon_eager();

std::int64_t pending_eager();

}  // namespace graft::hostwork
