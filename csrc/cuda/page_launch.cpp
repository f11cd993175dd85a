#include "cuda/page_launch.hpp"

#include <algorithm>

#include "copy/lanes.hpp"

namespace kvtier::cuda {
namespace {

U64 tiles_of(const PageLaunch& launch) {
  const U64 stop = std::max(launch.padded, launch.end);
  const U64 first = launch.begin / kLaneBytes, last = (stop + kLaneBytes - 1) / kLaneBytes;
  return (last - first + kTileLanes - 1) / kTileLanes;
}

}  // namespace

PoolShape::PoolShape(const DevicePool& pool) : payload_(pool.payload_bytes()) {
  const std::vector<Segment>& segments = pool.segments();
  U64 first = 0;
  bool alike = true;
  for (const Segment& s : segments) {
    const U64 base = reinterpret_cast<std::uintptr_t>(s.base);
    table_.push_back({base, s.stride, first});
    first += s.length;
    on_lanes_ &= base % kLaneBytes == 0 && s.length % kLaneBytes == 0;
    on_lanes_ &= s.stride % kLaneBytes == 0 || pool.slots() == 1;
    alike &= s.length == segments[0].length;
  }
  table_.push_back({0, 0, first});
  if (alike && on_lanes_) segment_lanes_ = segments[0].length / kLaneBytes;
}

Kernel PoolShape::kernel(Way way) const {
  const int bytes = on_lanes_ ? 0 : static_cast<int>(Kernel::kGatherBytes);
  return static_cast<Kernel>(static_cast<int>(way) + bytes);
}

PageLaunch PoolShape::whole(const SegmentEntry* table, std::size_t page_bytes, LaneSum* sums) const {
  PageLaunch launch = range(table, {0, payload_}, sums);
  launch.padded = page_bytes > payload_ ? page_bytes : 0;
  return launch;
}

PageLaunch PoolShape::range(const SegmentEntry* table, ByteRange range, LaneSum* sums) const {
  PageLaunch launch;
  launch.segments = table;
  launch.sums = sums;
  launch.begin = range.begin;
  launch.end = range.end;
  launch.payload = payload_;
  launch.padded = 0;
  launch.segment_lanes = static_cast<U32>(segment_lanes_);
  launch.segment_count = static_cast<U32>(table_.size() - 1);
  launch.pages = 0;
  launch.unused = 0;
  return launch;
}

void add_page(PageLaunch& launch, const void* page, Slot slot, ChecksumKey key) {
  const lanes::Keys keys = lanes::derive(key);
  launch.page[launch.pages++] = {reinterpret_cast<std::uintptr_t>(page), keys.k1, keys.k2, slot, 0};
}

LaneSum page_sum(const PageLaunch& launch, unsigned blocks, unsigned page) {
  const U64 tiles = tiles_of(launch), all = tiles * launch.pages;
  LaneSum total{0, 0};
  for (U64 block = 0; block < blocks; ++block) {
    const U64 from = std::max(all * block / blocks, page * tiles);
    const U64 to = std::min(all * (block + 1) / blocks, (page + 1) * tiles);
    if (from >= to) continue;
    for (U32 warp = 0; warp < kWarps; ++warp) {
      const LaneSum& part = launch.sums[(page + block) * kWarps + warp];
      total.a += part.a;
      total.b += part.b;
    }
  }
  return total;
}

std::uint64_t page_checksum(const PageLaunch& launch, unsigned blocks, unsigned page) {
  const LaneSum sum = page_sum(launch, blocks, page);
  return lanes::finish({sum.a, sum.b}, launch.payload, {launch.page[page].k1, launch.page[page].k2});
}

}  // namespace kvtier::cuda
