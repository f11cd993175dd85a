// How many threads and how much memory there is left, for tests of what happens when there is no more.
#pragma once

#include <atomic>

namespace kvtier::test {

inline constexpr int kNoLimit = 1 << 30;

inline std::atomic<int> threads_left{kNoLimit};       // that anybody may begin
inline thread_local int allocations_left = kNoLimit;  // by `new`, in this thread
inline std::atomic<int> refusals{0};                  // of either, so far

inline bool refused(int left) {
  if (left > 0) return false;
  ++refusals;
  return true;
}
inline bool thread_refused() { return refused(threads_left.load() == kNoLimit ? 1 : threads_left.fetch_sub(1)); }
inline bool allocation_refused() { return refused(allocations_left == kNoLimit ? 1 : allocations_left--); }

// While it lives so many more threads can be had, by anybody,
class ThreadLimit {
 public:
  explicit ThreadLimit(int left) { threads_left = left; }
  ~ThreadLimit() { threads_left = kNoLimit; }
};

// or so many more allocations, by this thread.
class MemoryLimit {
 public:
  explicit MemoryLimit(int left) { allocations_left = left; }
  ~MemoryLimit() { allocations_left = kNoLimit; }
};

}  // namespace kvtier::test
