// What a fault of a FaultPlan makes of one read or write of a file: shared by the store's own file operations and by
// the engine of pages, so that a kind of fault is the same thing in both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "common/fault_plan.hpp"

namespace kvtier::spoil {

inline constexpr std::size_t kBlock = 4096;  // the unit in which a read may be stale

// Where a transfer at `offset` goes when it is led `by` bytes astray; stays within the file and whole blocks.
std::uint64_t astray(int fd, std::uint64_t offset, std::size_t bytes, std::uint64_t by);

void flip(std::byte* bytes, std::size_t count, std::uint64_t bit);

// What blocks of files held before their last write. Kept only while a plan has stale reads.
class FormerBlocks {
 public:
  void keep(int fd, std::uint64_t offset, std::size_t bytes);  // before they are written
  // Puts what block `which` (modulo their number) held before into what was just read; zeros: it was never written.
  void restore(int fd, std::uint64_t offset, std::byte* read, std::size_t bytes, std::uint64_t which) const;

 private:
  using Place = std::pair<std::uint64_t, std::uint64_t>;  // inode, block
  mutable std::mutex mutex_;
  std::map<Place, std::vector<std::byte>> blocks_;
};

FormerBlocks& former();

// A write of the store's own files, and what is to become of it.
struct Write {
  Write(int fd, const void* data, std::size_t bytes, std::uint64_t offset);

  const std::byte* data;
  std::size_t bytes;
  std::size_t first;  // bytes that the first call moves
  std::uint64_t offset;
  int error = 0;         // return it and do nothing
  bool crashes = false;  // end the process after it

 private:
  std::vector<std::byte> changed_;
};

struct Read {
  Read(int fd, std::size_t bytes, std::uint64_t offset);
  void arrived(int fd, std::byte* data, std::size_t count) const;

  std::size_t bytes;
  std::uint64_t offset;
  int error = 0;

 private:
  std::optional<FaultPlan::Fault> fault_;
};

}  // namespace kvtier::spoil
