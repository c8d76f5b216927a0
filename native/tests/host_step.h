// A host step of a random graph, run as a host function or by mailbox workers.
#pragma once

#include <cstring>
#include <memory>

#include "driver_calls.h"
#include "hostwork/mailbox.h"
#include "model.h"

namespace stress {

// The pinned words of one mailbox, a line each, and the buffer its results go through.
class Box {
 public:
  enum Line { kRequest, kAck, kGaveUp, kCounter, kLines };
  explicit Box(size_t results) {
    CALL(cuMemHostAlloc(&memory_, kLines * kLine + results, 3));
    CALL(cuMemHostGetDevicePointer_v2(&alias_, memory_, 0));
    std::memset(memory_, 0, kLines * kLine + results);
  }
  ~Box() { CALL(cuMemFreeHost(memory_)); }
  Box(const Box&) = delete;
  uint32_t* word(Line line) const {
    return reinterpret_cast<uint32_t*>(static_cast<char*>(memory_) + line * kLine);
  }
  CUdeviceptr alias(Line line) const { return alias_ + line * kLine; }
  void* scratch() const { return static_cast<char*>(memory_) + kLines * kLine; }

 private:
  static constexpr size_t kLine = 64;
  void* memory_ = nullptr;
  CUdeviceptr alias_ = 0;
};

// Its data dies with its record: a record that dies early is a use after free.
class HostStep : public graft::hostwork::HostRecord {
 public:
  struct Data {
    unsigned* cells;
    NodeSpec node;
    int out;
    int runs;                  // one run at a time
    std::unique_ptr<Box> box;  // of a mailbox
  };
  HostStep(const std::string& name, Data* data)
      : HostRecord(name, {nullptr, nullptr, run, data}, nullptr), data_(data) {}

 private:
  static void run(void* raw) {
    Data& data = *static_cast<Data*>(raw);
    if (graft::hostwork::current_replay() <= 0) std::abort();
    if (++data.runs == data.node.fails_in_run) {
      graft::hostwork::fail_current("told to fail");
      return;
    }
    unsigned* cell = data.cells + data.out * kWords;
    void* const output = graft::hostwork::current_output();
    unsigned* to = output != nullptr ? static_cast<unsigned*>(output) : cell;
    for (int w = 0; w < kWords; ++w) {
      to[w] = gather_word(data.cells, data.out, data.node.salt, data.node.reads(0),
                          data.node.reads(1), data.node.reads(2), w);
    }
  }
  std::unique_ptr<Data> data_;
};

}  // namespace stress
