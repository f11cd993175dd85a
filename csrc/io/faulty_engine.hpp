// A FileEngine that misbehaves on purpose, for tests: it sits in front of a real one and spoils chosen operations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/file_engine.hpp"

namespace kvtier {

// Which operations of an engine go wrong, and how. Shared between the test and the engine's thread; thread-safe.
class FaultPlan {
 public:
  enum class Kind : std::uint8_t {
    kError,  // ends with -value at once; nothing is transferred
    kShort,  // transfers `value` bytes fewer than asked for
    kFlip,   // bit `value` of the bytes that were read is inverted; a write is inverted on its way to the file and back
    kDelay,  // begins `value` ns late; kForever: when release() is called
  };
  enum class On : std::uint8_t { kAny, kRead, kWrite };
  static constexpr std::uint64_t kForever = ~std::uint64_t{0};

  struct Fault {
    Kind kind;
    On on;
    std::uint64_t first;  // the n-th operation of that direction, counted from 1
    std::uint64_t count;  // how many from there on
    std::uint64_t value;
  };

  void add(const Fault& fault);
  void clear();    // no more faults; those that began go on
  void release();  // lets everything that is delayed begin
  // For the engine: counts an operation and says what goes wrong with it.
  std::optional<Fault> next(bool write);
  std::uint64_t operations() const { return operations_.load(); }
  std::uint64_t fired() const { return fired_.load(); }
  std::uint64_t released() const { return released_.load(); }

 private:
  std::mutex mutex_;
  std::vector<Fault> faults_;
  std::uint64_t counts_[3] = {};
  std::atomic<std::uint64_t> operations_{0};
  std::atomic<std::uint64_t> fired_{0};
  std::atomic<std::uint64_t> released_{0};
};

std::unique_ptr<FileEngine> make_faulty_engine(std::unique_ptr<FileEngine> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace kvtier
