#include "cuda/use_watch.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvtier::cuda {
namespace {

constexpr std::size_t kMost = 100;  // that are told

}  // namespace

void VectorClock::join(const VectorClock& other) {
  if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
  for (std::size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
}

void VectorClock::tick(std::size_t agent) {
  if (times_.size() <= agent) times_.resize(agent + 1);
  ++times_[agent];
}

void UseWatch::note(const std::string& name, std::size_t agent, const VectorClock& clock, const MemoryUse& use) {
  const auto first = reinterpret_cast<std::uintptr_t>(use.memory), end = first + use.bytes;
  std::erase_if(uses_, [&](const Use& old) {
    if (old.end <= first || end <= old.first) return false;
    const bool ordered = clock.at(old.agent) >= old.time;
    if (!ordered && (old.writes || use.writes)) {
      tell(old.name + (old.writes ? " writes" : " reads") + " what " + name + (use.writes ? " writes" : " reads") +
           ", and nothing orders the two");
    }
    return ordered && old.first >= first && old.end <= end && (use.writes || !old.writes);
  });
  uses_.push_back({first, end, agent, clock.at(agent), use.writes, name});
}

void UseWatch::forget(const void* memory, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory), end = first + bytes;
  std::erase_if(uses_, [&](const Use& old) { return old.first < end && first < old.end; });
}

void UseWatch::tell(std::string what) {
  if (found_.size() < kMost) found_.push_back(std::move(what));
}

std::vector<std::string> UseWatch::found() const {
  std::vector<std::string> all = found_;
  if (missed_ != 0) all.push_back(std::to_string(missed_) + " uses by the host went unwatched for want of memory");
  return all;
}

// ---- what is used, and where it lies -------------------------------------------------------------------------------

LaunchUses uses_of(Kernel kernel, const PageLaunch& launch, unsigned blocks) {
  const int way = static_cast<int>(kernel) % 3;  // gather, scatter, sum
  LaunchUses uses;
  for (U32 p = 0; way != 2 && p < launch.pages; ++p, ++uses.pages) {
    const U64 end = way == 0 ? std::max(launch.end, launch.padded) : launch.end;
    uses.all.push_back({reinterpret_cast<void*>(launch.page[p].page + launch.begin), end - launch.begin, way == 0});
  }
  for (U32 p = 0; p < launch.pages; ++p) {
    const PageEntry& page = launch.page[p];
    for (U32 s = 0; s < launch.segment_count; ++s) {
      const SegmentEntry& segment = launch.segments[s];
      const U64 from = std::max(segment.first, launch.begin), to = std::min(launch.segments[s + 1].first, launch.end);
      if (from >= to) continue;
      const U64 at = segment.base + page.slot * segment.stride + (from - segment.first);
      uses.all.push_back({reinterpret_cast<void*>(at), to - from, way == 1});
    }
  }
  if (launch.sums != nullptr) {
    uses.all.push_back({launch.sums, (launch.pages + blocks) * kWarps * sizeof(LaneSum), true});
  }
  return uses;
}

Where where(const Regions& regions, const void* memory, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory), end = first + bytes;
  const auto behind = regions.lower_bound(reinterpret_cast<void*>(end));
  if (behind == regions.begin()) return Where::kOutside;
  const auto& [base, size] = *std::prev(behind);
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (begin + size <= first) return Where::kOutside;
  return begin <= first && end <= begin + size ? Where::kInside : Where::kAcross;
}

}  // namespace kvtier::cuda
