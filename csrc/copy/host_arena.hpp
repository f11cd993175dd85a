// Host memory for pages: one mapping, made and touched once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/types.hpp"
#include "copy/memory.hpp"

namespace kvtier {

inline constexpr std::size_t kPageAlignment = 4096;

inline constexpr std::size_t padded(std::size_t payload) {
  return (payload + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
}

// Pages side by side in one mapping that starts on a 2 MiB boundary, asks for huge pages and is resident from
// construction on, on one NUMA node where that is asked for and granted. It is not inherited by fork() (a child's
// copy-on-write would move pages away from under direct I/O) and not part of core dumps. A page and its checksum belong
// to whoever the catalog gave the slot to; nothing is locked.
class HostArena {
 public:
  // Throws std::invalid_argument for a size that makes no sense, std::bad_alloc (with a text that names the size)
  // when the machine cannot give that much. `numa_node`: whose memory is preferred; -1: the kernel's choice.
  HostArena(Slot slots, std::size_t payload_bytes, int numa_node = -1);
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  Slot slots() const { return slots_; }
  std::size_t payload_bytes() const { return payload_bytes_; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::byte* base() const { return base_; }
  std::size_t bytes() const { return page_bytes_ * slots_; }  // of pages; the mapping is rounded up to 2 MiB
  std::size_t mapped_bytes() const { return mapped_bytes_; }
  std::byte* page(Slot slot) const { return base_ + page_bytes_ * slot; }
  // The checksum of the page in `slot`; 0 while there is none.
  std::uint64_t& checksum(Slot slot) { return checksums_[slot]; }
  // How much of the mapping the kernel really backed with huge pages, as it said after the first touch.
  std::size_t huge_bytes() const { return huge_bytes_; }
  int numa_error() const { return numa_error_; }  // why the kernel refused the node, as an errno; 0: it did not
  bool huge_pages() const { return huge_bytes_ * 10 >= mapped_bytes_ * 9; }

 private:
  Slot slots_;
  std::size_t payload_bytes_;
  std::size_t page_bytes_;
  std::size_t mapped_bytes_ = 0;
  std::size_t huge_bytes_ = 0;
  int numa_error_ = 0;
  memory::Mapping mapping_;
  std::byte* base_ = nullptr;
  std::vector<std::uint64_t> checksums_;
};

}  // namespace kvtier
