// Decides when a disk that keeps failing is taken out of service: over a window of recent operations, not over time,
// so that an idle disk keeps its verdict.
#pragma once

#include <bit>
#include <cstdint>

namespace kvtier {

class DiskHealth {
 public:
  static constexpr int kWindow = 64;
  static constexpr int kMinFailures = 8;

  // Notes one operation. True once at least 8, and at least half, of the last 64 failed.
  bool note(bool ok) {
    window_ = window_ << 1 | (ok ? 0u : 1u);
    if (samples_ < kWindow) ++samples_;
    return failures() >= kMinFailures && 2 * failures() >= samples_;
  }
  int samples() const { return samples_; }
  int failures() const { return std::popcount(window_); }

 private:
  std::uint64_t window_ = 0;  // a bit per operation, 1: failed
  int samples_ = 0;
};

}  // namespace kvtier
