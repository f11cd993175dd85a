// The mover's only ways to device memory: a batch of pages is handed over and comes back copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "common/identity.hpp"
#include "common/lane.hpp"
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

// A device whose pages a thread copies itself.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  // Both return when every page has its status: no byte of the batch is touched after that. `worker` is the number of
  // the calling thread, for resources kept per thread.
  virtual void gather(std::span<PageCopy> pages, unsigned worker) = 0;  // device segments → host page
  // host page → device segments; of each page no more than `range`
  virtual void scatter(std::span<PageCopy> pages, ByteRange range, unsigned worker) = 0;
};

// Device memory that the CPU can address.
class CpuCopier final : public DeviceCopier {
 public:
  CpuCopier(const DevicePool& device, HostArena& host) : device_(device), host_(host) {}
  void gather(std::span<PageCopy> pages, unsigned worker) override;
  void scatter(std::span<PageCopy> pages, ByteRange range, unsigned worker) override;

 private:
  const DevicePool& device_;
  HostArena& host_;
};

// The place in the engine's own queue that a transfer has to come after.
class DeviceFence {
 public:
  virtual ~DeviceFence() = default;
};

// A device with queues of its own: batches are queued, several in each lane, and their ends looked for.
//
// fence() is called by whoever submits a transfer, on any thread; the rest by one thread. Nothing throws but fence().
class StreamCopier {
 public:
  virtual ~StreamCopier() = default;
  // After everything that the engine has queued on `stream` so far: the work that fills what a store reads, and the
  // last reader of what a load overwrites. Throws std::runtime_error when the device refuses.
  virtual std::shared_ptr<DeviceFence> fence(std::uintptr_t stream) = 0;

  virtual unsigned places() const = 0;          // batches that a lane may have under way
  virtual std::size_t batch_bytes() const = 0;  // that one of them should have
  // Queues a batch behind `fence` (null: behind nothing). `pages` stays until ended() has said so; place `place` of the
  // lane is free. A load copies no more than `range` of each page, on multiples of 16 bytes; a store all of it.
  virtual void start(Lane lane, unsigned place, std::span<PageCopy> pages, ByteRange range,
                     const DeviceFence* fence) = 0;
  // Whether the batch has ended: then its pages have their statuses, and nothing touches a byte of it any more.
  virtual bool ended(Lane lane, unsigned place) = 0;
  // Have `wake` called, on any thread, when a batch has ended; false: it cannot, so look from time to time.
  virtual bool wake_by(std::function<void()> wake) = 0;
  virtual std::string note() const = 0;  // what works worse than it could; empty: nothing
};

}  // namespace kvtier
