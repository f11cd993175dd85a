// Page copies on a CUDA device: the StreamCopier of the mover.
//
//   engine's stream   ── step ── step ──F                     F: fence, recorded when a transfer is submitted
//   offload stream                      └wait─ batch ─E─ batch ─E    E: event of a batch; its place is free after it
//   onboard stream                      └wait─ batch ─E
//
// Each direction has a stream of low priority. A place (event, sums, list of copies, staging) belongs to its batch
// until the batch's event has passed, so nothing that a queued copy may still read is ever written over. A load's pages
// are reported when its event has passed; what the engine queues after that sees them. No thread of the engine ever
// waits.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/handles.hpp"
#include "cuda/page_launch.hpp"
#include "cuda/pinned_arena.hpp"
#include "cuda/runtime.hpp"
#include "mover/device_copier.hpp"

namespace kvtier::cuda {

// How the pages of a batch cross the link.
enum class Path {
  kPieces,  // one copy for each contiguous piece; for pages that are one piece there is nothing better
  kBatch,   // the same pieces in one list, where the driver takes lists
  kDirect,  // a kernel reads or writes the pinned pages itself
  kStaged,  // a kernel packs pages in device memory, and each run of neighbouring pages is one copy
};
inline constexpr int kPaths = 4;
constexpr const char* path_name(Path path) {
  constexpr const char* names[kPaths] = {"pieces", "batch", "direct", "staged"};
  return names[static_cast<int>(path)];
}

struct CopierOptions {
  Path offload = Path::kDirect, onboard = Path::kDirect;
  double processor_share = 0.08;       // of the device's, that a launch may use
  unsigned places = 4;                 // batches under way in each direction
  std::size_t batch_bytes = 4u << 20;  // of one
  bool host_calls = false;             // ends are told by the driver's thread, not looked for
};

class Copier final : public StreamCopier {
 public:
  // `pinned` is of `host` and may still be pinning. Both pools outlive the copier. Throws Error, and
  // std::invalid_argument for options that make no sense, segments that are not memory of this device, and pools and
  // arenas that do not belong together.
  Copier(std::shared_ptr<Runtime> runtime, const DevicePool& device, HostArena& host,
         std::shared_ptr<const PinnedArena> pinned, const CopierOptions& options);
  ~Copier() override;

  std::shared_ptr<DeviceFence> fence(std::uintptr_t stream) override;
  unsigned places() const override { return options_.places; }
  std::size_t batch_bytes() const override { return options_.batch_bytes; }
  void start(Lane lane, unsigned place, std::span<PageCopy> pages, ByteRange range, const DeviceFence* fence) override;
  bool ended(Lane lane, unsigned place) override;
  bool wake_by(std::function<void()> wake) override;
  std::string note() const override;

  unsigned blocks() const { return blocks_; }
  std::size_t payload_bytes() const { return device_.payload_bytes(); }

 private:
  class FencePool;
  class Fence;
  struct Place {
    OwnedEvent event;
    PinnedArray<LaneSum> sums;
    DeviceArray<std::byte> staging;  // null unless its direction stages
    CopyList copies;
    PageLaunch launch;
    ByteRange range{0, 0};         // of every page, what is copied; of a store all of it
    std::vector<PageCopy*> pages;  // that were queued, in the launch's order
    bool failed = false;
    bool queued = false;    // something of it may run
    bool recorded = false;  // its event lies behind all that does
  };
  struct Direction {
    Path path = Path::kPieces;
    std::vector<Place> places;
    std::uint64_t behind = 0;  // number of the fence that the stream waits for already
    OwnedStream stream;        // goes before the places: what it runs may touch them
  };

  Direction& direction(Lane lane) { return directions_[lane == Lane::kOffload ? 0 : 1]; }
  void check(const DevicePool& device) const;
  unsigned blocks_of(double processor_share) const;
  void make_places(Direction& direction);
  void queue(Lane lane, Direction& direction, Place& place);
  void queue_pieces(Lane lane, Direction& direction, Place& place, bool as_list);
  void queue_direct(Lane lane, Direction& direction, Place& place);
  void queue_staged(Lane lane, Direction& direction, Place& place);
  void queue_runs(Lane lane, Direction& direction, Place& place);
  void launch(Way way, Direction& direction, Place& place, const std::byte* staging);
  void record_end(Direction& direction, Place& place);
  void settle(Lane lane, Place& place);
  void fail(Place& place, const char* why) noexcept;
  void remember(const char* what, const char* why) noexcept;
  bool intact(PageCopy& page) const;

  std::shared_ptr<Runtime> runtime_;
  const DevicePool& device_;
  HostArena& host_;
  std::shared_ptr<const PinnedArena> pinned_;
  const CopierOptions options_;
  const PoolShape shape_;
  unsigned blocks_;
  DeviceArray<SegmentEntry> table_;
  std::shared_ptr<FencePool> fences_;
  std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::string note_;
  // Below all that what they run may touch: they go first, once it has run out.
  Direction directions_[2];
  OwnedStream signals_;  // the calls of the driver's thread: on a stream of their own they hold up no copy
};

}  // namespace kvtier::cuda
