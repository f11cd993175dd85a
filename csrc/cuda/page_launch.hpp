// A pool as the page kernels see it, and what they are launched with.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "common/identity.hpp"
#include "copy/segments.hpp"
#include "cuda/kernels.hpp"

namespace kvtier::cuda {

enum class Way { kGather, kScatter, kSum };

// The segment table and the shape of one pool. Immutable.
class PoolShape {
 public:
  explicit PoolShape(const DevicePool& pool);

  // [segments + 1] entries, for memory that the kernels can read.
  std::span<const SegmentEntry> table() const { return table_; }
  bool on_lanes() const { return on_lanes_; }  // every segment, base and stride is a multiple of 16 bytes
  Kernel kernel(Way way) const;
  // A launch over whole pages, none named yet. `table` is where the segment table was copied to; `page_bytes`: gather
  // fills the page with zeros up to there, 0 for other ways.
  PageLaunch whole(const SegmentEntry* table, std::size_t page_bytes, LaneSum* sums) const;
  // Over some bytes of each page only: a range of layers. Where the pool is on lanes, so must the range be. Sums of
  // ranges add up to the whole page's; a pool that is not on lanes has sums of whole pages only.
  PageLaunch range(const SegmentEntry* table, ByteRange range, LaneSum* sums) const;

 private:
  std::vector<SegmentEntry> table_;
  std::size_t payload_;
  std::size_t segment_lanes_ = 0;
  bool on_lanes_ = true;
};

// Names a page of the launch; at most kLaunchPages of them.
void add_page(PageLaunch& launch, const void* page, Slot slot, ChecksumKey key);

// Entries that `sums` needs for launches of this many blocks.
constexpr std::size_t sum_entries(unsigned blocks) { return (kLaunchPages + blocks) * std::size_t{kWarps}; }

// One page's sum, from what the blocks of the ended launch kept.
LaneSum page_sum(const PageLaunch& launch, unsigned blocks, unsigned page);
// Its checksum, when the launch was over whole pages.
std::uint64_t page_checksum(const PageLaunch& launch, unsigned blocks, unsigned page);

}  // namespace kvtier::cuda
