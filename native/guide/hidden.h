// Time in which the open step can run without delaying the round.
#pragma once

#include <cstdint>

namespace graft::guide {

// Estimates the time of the target forward pass. The open step runs concurrently with it. The check
// step starts after both and after the target's tokens were sampled. If the open step takes at most
// half of the time between the starts of the two steps, this time is a measurement of the forward
// pass. Otherwise the open step itself may have delayed the check, and the estimate is reduced.
class HiddenTime {
 public:
  void open_starts(int64_t now) {
    start_ = now;
    left_ = kUsedShare * estimate_;
  }
  void open_ends(int64_t now) { end_ = now; }
  void check_starts(int64_t now) {
    const auto window = static_cast<float>(now - start_);
    if (2 * (end_ - start_) > now - start_) {
      estimate_ *= kReduction;
    } else if (estimate_ == 0.0f) {
      estimate_ = window;
    } else {
      const float sample = window < 2.0f * estimate_ ? window : 2.0f * estimate_;
      estimate_ += kWeight * (sample - estimate_);
    }
  }
  // Takes `ns` of the time that is left in this round. Returns false if less is left.
  bool take(float ns) {
    if (ns > left_) return false;
    left_ -= ns;
    return true;
  }

 private:
  static constexpr float kUsedShare = 0.4f;  // share of the forward pass that may be used
  static constexpr float kWeight = 0.125f;   // of a new measurement
  static constexpr float kReduction = 0.75f;

  int64_t start_ = 0, end_ = 0;
  float estimate_ = 0.0f, left_ = 0.0f;
};

}  // namespace graft::guide
