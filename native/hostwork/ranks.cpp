#include "hostwork/ranks.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "hostwork/record.h"

namespace graft::hostwork {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTag = 1;
// A wait for messages polls. Between two polls it yields the core until kYieldS seconds have
// passed, then sleeps for kShortNs until kShortS seconds have passed, and then sleeps for kLongNs.
constexpr double kYieldS = 200e-6, kShortS = 20e-3;
constexpr long kShortNs = 20'000, kLongNs = 100'000;

void pause_after(double waited_s) {
  if (waited_s < kYieldS) {
    sched_yield();
    return;
  }
  const timespec nap{0, waited_s < kShortS ? kShortNs : kLongNs};
  nanosleep(&nap, nullptr);
}

}  // namespace

Messages::Messages(std::shared_ptr<Mpi> mpi, std::vector<Message> messages, double deadline_s)
    : mpi_(std::move(mpi)),
      messages_(std::move(messages)),
      deadline_s_(deadline_s),
      requests_(messages_.size()),
      open_(messages_.size()) {}

template <typename Handle>
int Messages::post(const Message& message, std::uint64_t* request) {
  using Send = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  using Receive = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  const Handle byte = (Handle)mpi_->byte, comm = (Handle)mpi_->comm;
  Handle handle{};
  const int code = message.sent
                       ? reinterpret_cast<Send>(mpi_->isend)(message.bytes, message.count, byte,
                                                             message.peer, kTag, comm, &handle)
                       : reinterpret_cast<Receive>(mpi_->irecv)(message.bytes, message.count, byte,
                                                                message.peer, kTag, comm, &handle);
  std::memcpy(request, &handle, sizeof handle);
  return code;
}

template <typename Handle>
int Messages::test(std::uint64_t* request, int* done) {
  // Large enough for the MPI_Status of any implementation. MPI_STATUS_IGNORE cannot be used,
  // because its value differs between implementations.
  alignas(16) unsigned char status[256];
  Handle handle;
  std::memcpy(&handle, request, sizeof handle);
  const int code =
      reinterpret_cast<int (*)(Handle*, int*, void*)>(mpi_->test)(&handle, done, status);
  std::memcpy(request, &handle, sizeof handle);
  return code;
}

bool Messages::post_all() {
  posted_ = true;
  for (std::size_t i = 0; i < messages_.size(); ++i) {
    open_[i] = 1;
    code_ = mpi_->wide ? post<void*>(messages_[i], &requests_[i])
                       : post<int>(messages_[i], &requests_[i]);
    if (code_ != 0) return false;
  }
  return true;
}

Messages::Outcome Messages::wait(double seconds) {
  if (mpi_->failed) return Outcome::kFailed;
  const auto begun = Clock::now();
  if (!posted_ && !post_all()) {
    abandon();
    return Outcome::kFailed;
  }
  for (;;) {
    bool open = false;
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      if (!open_[i]) continue;
      int done = 0;
      code_ = mpi_->wide ? test<void*>(&requests_[i], &done) : test<int>(&requests_[i], &done);
      if (code_ != 0) {
        abandon();
        return Outcome::kFailed;
      }
      open_[i] = !done;
      open = open || !done;
    }
    if (!open) {
      posted_ = false;
      return Outcome::kDone;
    }
    const double waited_s = std::chrono::duration<double>(Clock::now() - begun).count();
    if (waited_s >= seconds) return Outcome::kPending;
    pause_after(waited_s);
  }
}

void Messages::abandon() noexcept {
  if (mpi_->failing.exchange(true)) {
    while (!mpi_->failed) sched_yield();  // another thread is writing the reason
    return;
  }
  const auto late = std::find(open_.begin(), open_.end(), 1) - open_.begin();
  if (code_ != 0) {
    std::snprintf(mpi_->reason, sizeof mpi_->reason, "an MPI call returned code %d", code_);
  } else {
    std::snprintf(mpi_->reason, sizeof mpi_->reason, "rank %d did not answer within %g s",
                  messages_[late].peer, deadline_s_);
  }
  mpi_->failed = true;
}

void Messages::step(void* data) {
  auto* self = static_cast<Messages*>(data);
  if (self->wait(self->deadline_s_) == Outcome::kDone) return;
  self->abandon();
  fail_current(self->mpi_->reason);
}

}  // namespace graft::hostwork
