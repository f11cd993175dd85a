// The memory operations that the host arena is made of, each in one place so that a test can make the n-th of them
// fail (common/fault_plan.hpp). They return 0 or -errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvtier::memory {

// Anonymous, private, not reserved; given back when it goes. Not by a forked child, which may lack it (MADV_DONTFORK)
// and have something of its own in its place.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), process_(other.process_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(process_, other.process_);
    return *this;
  }
  ~Mapping();

  // `bytes` (a multiple of `alignment`, itself a multiple of the page size) that start on a multiple of `alignment`.
  int map(std::size_t bytes, std::size_t alignment);
  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint32_t process_ = 0;  // by fork_generation()
};

int advise(std::byte* base, std::size_t bytes, int advice);

// Has pages that are not touched yet come from that NUMA node as long as it has any, and from others after that.
int prefer_node(std::byte* base, std::size_t bytes, int node);

}  // namespace kvtier::memory
