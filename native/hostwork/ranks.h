// Bytes between the processes that hold one model together, through MPI's C functions.
//
// INVARIANTS.md states the rules: T1 to T4.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace graft::hostwork {

// MPI's functions by address, and its handles as integers: int in one implementation (`wide` is
// false), pointers in another.
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
  std::atomic<bool> failed{false};  // a message was given up (T3), for this reason:
  char why[96] = "";
};

struct Message {
  int peer;
  bool sent;
  void* bytes;
  int count;
};

// Messages that are on their way together. Posting and testing allocate nothing and take no GIL.
class Messages {
 public:
  Messages(std::shared_ptr<Mpi> mpi, std::vector<Message> messages, double deadline_s);

  enum class Outcome { kDone, kPending, kFailed };
  // Posts the messages unless they are, and waits for so long.
  Outcome wait(double seconds);
  // Gives up these, and every later message of the communicator: who did not come is told.
  void abandon() noexcept;

  // A host step; `data` is the Messages.
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
