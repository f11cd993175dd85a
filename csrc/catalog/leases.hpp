// What a request holds, so that one call lets all of it go.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/types.hpp"

namespace kvtier {

// Pages with one pin each, as a rule those of a chain from its beginning.
struct Pins {
  std::vector<NodeId> nodes;
  std::vector<std::uint8_t> tiers;  // indexes

  bool empty() const { return nodes.empty(); }
  void add(std::span<const NodeId> more, std::uint8_t tier) {
    nodes.insert(nodes.end(), more.begin(), more.end());
    tiers.insert(tiers.end(), more.size(), tier);
  }
  // Whether those from `first` on are the ones of `part`, in `tier`.
  bool holds(std::size_t first, std::span<const NodeId> part, std::uint8_t tier) const {
    if (nodes.size() - first < part.size()) return false;
    const auto same_tier = [tier](std::uint8_t t) { return t == tier; };
    return std::ranges::equal(std::span(nodes).subspan(first, part.size()), part) &&
           std::ranges::all_of(std::span(tiers).subspan(first, part.size()), same_tier);
  }
  void drop_first(std::size_t count) {
    nodes.erase(nodes.begin(), nodes.begin() + static_cast<std::ptrdiff_t>(count));
    tiers.erase(tiers.begin(), tiers.begin() + static_cast<std::ptrdiff_t>(count));
  }
  void clear() {
    nodes.clear();
    tiers.clear();
  }
};

// What a match promised. A later match or narrow replaces it.
struct Promise {
  Pins pages;  // of the blocks [start, hit)
  Pins loads;  // what a transfer fills for this request
};

struct Lease {
  RequestId request = 0;  // 0: this entry is free
  Promise promise;
  Pins adopted;                                    // pages that were this request's private slots
  std::vector<NodeId> holds;                       // nodes that it inserted, or found by insert
  std::array<std::vector<Slot>, kTiers> privates;  // by index of the tier
};

class Leases {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  static constexpr std::size_t kMax = 1u << 20;

  std::uint32_t find(RequestId request) const {
    const auto found = index_.find(request);
    return found == index_.end() ? kNone : found->second;
  }
  std::uint32_t get(RequestId request);  // finds or creates; throws when there are kMax
  void erase(std::uint32_t lease);
  Lease& operator[](std::uint32_t lease) { return leases_[lease]; }
  const Lease& operator[](std::uint32_t lease) const { return leases_[lease]; }
  std::size_t size() const { return index_.size(); }
  std::size_t entries() const { return leases_.size(); }

 private:
  std::vector<Lease> leases_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<RequestId, std::uint32_t> index_;
};

}  // namespace kvtier
