// What a request holds, so that one call lets all of it go.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "common/types.hpp"

namespace kvtier {

struct PagePin {
  NodeId node;
  std::uint8_t t;  // index of the tier
};

// What a match promised. A later match or narrow replaces it.
struct Promise {
  std::vector<NodeId> nodes;        // the blocks [start, hit), each with one pin on its page in …
  std::vector<std::uint8_t> tiers;  // … this tier (an index)
  std::vector<PagePin> loads;       // pages that a transfer fills for this request
};

struct Lease {
  RequestId request = 0;  // 0: this entry is free
  Promise promise;
  std::vector<PagePin> adopted;                    // pages that were this request's private slots
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
