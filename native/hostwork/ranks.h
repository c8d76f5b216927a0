// Point-to-point messages between the ranks of a tensor-parallel model, through MPI's C functions.
//
// INVARIANTS.md states the rules T1 to T4 for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace graft::hostwork {

// Addresses of MPI's functions, and one communicator. MPI handles are stored as 64-bit integers.
// They are pointers in MPI implementations with `wide` handles and ints in the others.
struct Mpi {
  Mpi(std::uint64_t isend, std::uint64_t irecv, std::uint64_t test, bool wide, std::uint64_t comm,
      std::uint64_t byte)
      : isend(isend), irecv(irecv), test(test), wide(wide), comm(comm), byte(byte) {}
  std::uint64_t isend;
  std::uint64_t irecv;
  std::uint64_t test;
  bool wide;
  std::uint64_t comm;
  std::uint64_t byte;
  std::atomic<bool> failing{false};
  // Whether communication was abandoned (INVARIANTS.md T3). `reason` is then valid.
  std::atomic<bool> failed{false};
  char reason[96] = "";
};

struct Message {
  int peer;
  bool sent;
  void* bytes;
  int count;
};

// Messages that are posted and completed together. Posting and testing allocate nothing and acquire
// no GIL.
class Messages {
 public:
  Messages(std::shared_ptr<Mpi> mpi, std::vector<Message> messages, double deadline_s);

  enum class Outcome { kDone, kPending, kFailed };
  // Posts the messages unless they are posted already, and waits up to `seconds` until all of them
  // are sent and received.
  Outcome wait(double seconds);
  // Abandons the communicator, because another rank has not sent or received its message in time.
  // The messages of this object and all later messages fail. The stored reason names the rank.
  void abandon() noexcept;

  // Host-step function that sends and receives the messages; `data` is the Messages object.
  static void step(void* data);

 private:
  template <typename Handle>
  int post(const Message& message, std::uint64_t* request);
  template <typename Handle>
  int test(std::uint64_t* request, int* done);
  bool post_all();

  const std::shared_ptr<Mpi> mpi_;
  const std::vector<Message> messages_;
  const double deadline_s_;  // maximum wait of a host step
  std::vector<std::uint64_t> requests_;
  std::vector<char> open_;
  bool posted_ = false;
  int code_ = 0;  // result of the last MPI call; 0: success
};

}  // namespace graft::hostwork
