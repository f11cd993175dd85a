// Transfers under way, as the catalog sees them: which pages they fill and which they keep as sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.hpp"

namespace kvtier {

struct OpenTransfer {
  Ticket ticket = 0;  // 0: this entry is free
  std::vector<Tier> path;
  std::vector<NodeId> nodes;
  std::vector<PageStatus> status;  // [hops][count]; the first word on a page's hop is the one that counts
  std::size_t pending = 0;

  std::size_t hops() const { return path.size() - 1; }
  std::size_t count() const { return nodes.size(); }
};

class Transfers {
 public:
  static constexpr std::size_t kMax = 1u << 16;

  // nullptr when there are kMax. A ticket is never used twice, so a late word about an old one finds nobody.
  OpenTransfer* open() {
    if (free_.empty()) {
      if (transfers_.size() >= kMax) return nullptr;
      free_.push_back(static_cast<std::uint32_t>(transfers_.size()));
      transfers_.emplace_back();
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    transfers_[index].ticket = (++serial_ << 16) | index;
    return &transfers_[index];
  }
  OpenTransfer* find(Ticket ticket) {
    const std::size_t index = ticket & (kMax - 1);
    return ticket != 0 && index < transfers_.size() && transfers_[index].ticket == ticket ? &transfers_[index]
                                                                                          : nullptr;
  }
  void close(OpenTransfer* transfer) {
    const auto index = static_cast<std::uint32_t>(transfer->ticket & (kMax - 1));
    transfer->ticket = 0;
    transfer->nodes.clear();
    transfer->status.clear();
    free_.push_back(index);
  }
  std::size_t size() const { return transfers_.size() - free_.size(); }
  const std::vector<OpenTransfer>& all() const { return transfers_; }

 private:
  std::vector<OpenTransfer> transfers_;
  std::vector<std::uint32_t> free_;
  Ticket serial_ = 0;
};

}  // namespace kvtier
