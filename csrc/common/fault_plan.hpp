// Which operations go wrong, and how, for tests: of a FileEngine that was given a plan, and, process-wide, of the file
// operations of a disk store and the memory operations of a host arena.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace kvtier {

// Shared between the test and the threads that work; thread-safe.
class FaultPlan {
 public:
  enum class Kind : std::uint8_t {
    kError,        // ends with -value at once; nothing is done
    kShort,        // moves `value` bytes fewer than asked for
    kFlip,         // bit `value` of the bytes that were read is inverted; of a write, on its way to the file
    kDelay,        // begins `value` ns late; kForever: when release() is called
    kTorn,         // a write that says it is whole, of which only the first `value` (modulo its length) bytes arrive
    kLost,         // a write that says it is whole, of which nothing arrives
    kMisdirected,  // reads or writes `value` bytes further on, counted round the end of the file
    kStale,        // a read that finds in block `value` (modulo their number) what was there before its last write
    kCrash,        // the process ends in place of the operation
    kTornCrash,    // the process ends in the middle of it, if it is a write
  };
  enum class On : std::uint8_t { kAny, kRead, kWrite, kOther, kMemory };  // kOther: open, sync, rename, resize, ...
  static constexpr std::uint64_t kForever = ~std::uint64_t{0};

  struct Fault {
    Kind kind;
    On on;
    std::uint64_t first;  // the n-th operation of that sort, counted from 1
    std::uint64_t count;  // how many from there on
    std::uint64_t value;
    // Told by next(): the releases before it. Whoever sees that the fault fired, and releases, is later.
    std::uint64_t released = 0;
  };

  void add(const Fault& fault);
  void clear();    // no more faults; those that began go on
  void release();  // lets everything that is delayed begin
  // For whoever works: counts an operation, and says what goes wrong with it. A fault that such an operation cannot
  // have (a lost read) passes it by.
  std::optional<Fault> next(On operation);
  bool has(Kind kind) const;
  void sleep(const Fault& delay) const;  // for operations that are done where they are asked for
  std::uint64_t operations() const { return operations_.load(); }
  std::uint64_t count(On operation) const;  // of that sort so far
  std::uint64_t fired() const { return fired_.load(); }
  std::uint64_t released() const { return released_.load(); }

 private:
  mutable std::mutex mutex_;
  std::vector<Fault> faults_;
  std::uint64_t counts_[5] = {};
  std::atomic<std::uint64_t> operations_{0};
  std::atomic<std::uint64_t> fired_{0};
  std::atomic<std::uint64_t> released_{0};
};

// The plan of the whole process; null, the usual case: nothing goes wrong. Costs a load then.
void use_faults(std::shared_ptr<FaultPlan> plan);
std::shared_ptr<FaultPlan> faults_in_use();

// For an operation that has no bytes: 0, or -errno for it to return in place of what it does. May not return.
int fault_of(FaultPlan::On operation);

inline constexpr int kCrashStatus = 137;  // exit status of a process that a fault ended
[[noreturn]] void crash_now();

}  // namespace kvtier
