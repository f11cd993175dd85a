#include "copy/memory.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>

#include "common/fault_plan.hpp"
#include "common/forks.hpp"

namespace kvtier::memory {

Mapping::~Mapping() {
  if (base_ != nullptr && process_ == fork_generation()) munmap(base_, bytes_);
}

int Mapping::map(std::size_t bytes, std::size_t alignment) {
  if (const int rc = fault_of(FaultPlan::On::kMemory); rc < 0) return rc;
  const std::uint32_t process = fork_generation();
  const std::size_t reach = bytes + alignment;  // enough to hold an aligned mapping
  void* got = mmap(nullptr, reach, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return -errno;
  auto* start = static_cast<std::byte*>(got);
  const std::size_t skip = (alignment - reinterpret_cast<std::uintptr_t>(start) % alignment) % alignment;
  if (skip != 0) munmap(start, skip);
  if (skip != alignment) munmap(start + skip + bytes, alignment - skip);
  Mapping mine;
  mine.base_ = start + skip;
  mine.bytes_ = bytes;
  mine.process_ = process;
  *this = std::move(mine);
  return 0;
}

int advise(std::byte* base, std::size_t bytes, int advice) {
  if (const int rc = fault_of(FaultPlan::On::kMemory); rc < 0) return rc;
  return madvise(base, bytes, advice) == 0 ? 0 : -errno;
}

int prefer_node(std::byte* base, std::size_t bytes, int node) {
  if (const int rc = fault_of(FaultPlan::On::kMemory); rc < 0) return rc;
  constexpr int kMost = 1024, kBits = sizeof(unsigned long) * CHAR_BIT;  // nodes that any kernel is built for
  if (node < 0 || node >= kMost) return -EINVAL;
  unsigned long nodes[kMost / kBits] = {};
  nodes[node / kBits] = 1ul << (node % kBits);
  // Straight to the kernel, without libnuma, which would have to be installed. It reads one bit less than it is told.
  return syscall(SYS_mbind, base, bytes, MPOL_PREFERRED, nodes, kMost + 1ul, 0u) == 0 ? 0 : -errno;
}

}  // namespace kvtier::memory
