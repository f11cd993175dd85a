// A FileEngine that is slower than its drive, for benchmarks and tests: it sits in front of a real one, moves the same
// bytes, and gives each result back when a drive of the given speed would have.
#pragma once

#include <atomic>
#include <memory>

#include "io/file_engine.hpp"

namespace kvtier {

// The drive that is emulated: it serves one operation after another, each in `latency_s` and its bytes over the rate.
// May be changed at any time from any thread; operations that began keep the time they were given.
class Throttle {
 public:
  void set(double bytes_per_s, double latency_s) {  // 0: no limit
    bytes_per_s_ = bytes_per_s;
    latency_s_ = latency_s;
  }
  double bytes_per_s() const { return bytes_per_s_; }
  double latency_s() const { return latency_s_; }

 private:
  std::atomic<double> bytes_per_s_{0};
  std::atomic<double> latency_s_{0};
};

std::unique_ptr<FileEngine> make_throttled_engine(std::unique_ptr<FileEngine> inner, std::shared_ptr<Throttle> drive);

}  // namespace kvtier
