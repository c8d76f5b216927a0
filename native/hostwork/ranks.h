// Point-to-point messages between the ranks of a tensor-parallel model, through MPI's C functions.
//
// INVARIANTS.md states the rules: T1 to T4.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace graft::hostwork {

// Addresses of MPI's functions, and one communicator. Handles are stored as integers; they are ints
// in some implementations and pointers (`wide`) in others.
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
  std::atomic<bool> failed{false};  // communication was abandoned (T3); `reason` is valid
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
  // Posts the messages unless that was done, and waits up to `seconds`.
  Outcome wait(double seconds);
  // Abandons these and all later messages of the communicator. The reason names the missing rank.
  void abandon() noexcept;

  // Function of a host step; `data` is the Messages object.
  static void step(void* data);

 private:
  template <typename Handle>
  int post(const Message& message, std::uint64_t* request);
  template <typename Handle>
  int test(std::uint64_t* request, int* done);
  bool post_all();

  const std::shared_ptr<Mpi> mpi_;
  const std::vector<Message> messages_;
  const double deadline_s_;  // of a host step
  std::vector<std::uint64_t> requests_;
  std::vector<char> open_;
  bool posted_ = false;
  int code_ = 0;  // of the MPI call that failed
};

}  // namespace graft::hostwork
