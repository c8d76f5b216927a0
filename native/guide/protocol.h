// The guide's view of the pinned memory that it shares with the device:
// cudagraph/kernels/exchange.h states what lies in it.
#pragma once

#include <cstdint>

#include "../../cudagraph/kernels/exchange.h"

namespace graft::guide {

enum RowState : int32_t {
  kRowNotReady = ROW_NOT_READY,
  kRowFree = ROW_FREE,
  kRowReady = ROW_READY,
  kRowDeadEnd = ROW_DEAD_END,
  kRowError = ROW_ERROR,
};

struct Exchange {
  int32_t* base = nullptr;
  ExchangeLayout layout{};
  int vocab_size = 0;

  int drafts() const { return layout.rows - 1; }
  RowStamp* stamp(int slot, int j) const { return at<RowStamp>(slot, layout.stamps) + j; }
  int32_t* mask(int slot, int j) const {
    return at<int32_t>(slot, layout.masks) + static_cast<int64_t>(j) * layout.words;
  }
  Committed* committed(int slot) const { return at<Committed>(slot, layout.committed); }
  Drafted* drafted(int slot) const { return at<Drafted>(slot, layout.drafted); }
  Candidates* candidates(int slot) const { return at<Candidates>(slot, layout.candidate_ids); }
  ::Answer* answer(int slot) const { return at<::Answer>(slot, layout.answer); }

  // The ids that follow a record.
  template <class Record>
  static int32_t* ids(Record* record) {
    return reinterpret_cast<int32_t*>(record + 1);
  }

 private:
  template <class Record>
  Record* at(int slot, int offset) const {
    return reinterpret_cast<Record*>(base + static_cast<int64_t>(slot) * layout.stride + offset);
  }
};

}  // namespace graft::guide
