// The mover's only way to device memory. An executor thread hands over a batch of pages and gets them back copied; an
// implementation for a GPU launches one kernel per batch on a stream of its own and waits for its event here.
#pragma once

#include <cstdint>
#include <span>

#include "common/identity.hpp"
#include "common/types.hpp"
#include "copy/host_arena.hpp"
#include "copy/segments.hpp"

namespace kvtier {

struct PageCopy {
  Slot device = kNoSlot;
  Slot host = kNoSlot;
  ChecksumKey key{};
  std::uint64_t checksum = 0;                // gather: out. scatter: what the host page must have, 0: do not look
  PageStatus status = PageStatus::kPending;  // out
};

class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  // Both return when every page has its status: no byte of the batch is touched after that. `worker` is the number of
  // the calling thread, for resources kept per thread (streams, index arrays).
  virtual void gather(std::span<PageCopy> pages, unsigned worker) = 0;   // device segments → host page
  virtual void scatter(std::span<PageCopy> pages, unsigned worker) = 0;  // host page → device segments
};

// Device memory that the CPU can address.
class CpuCopier final : public DeviceCopier {
 public:
  CpuCopier(const DevicePool& device, HostArena& host) : device_(device), host_(host) {}
  void gather(std::span<PageCopy> pages, unsigned worker) override;
  void scatter(std::span<PageCopy> pages, unsigned worker) override;

 private:
  const DevicePool& device_;
  HostArena& host_;
};

}  // namespace kvtier
