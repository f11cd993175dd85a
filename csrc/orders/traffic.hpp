// What is under way between the tiers, as the control plane knows it: who hears of each word on a transfer, and the
// account of what was moved and what was not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "catalog/catalog.hpp"
#include "common/completion.hpp"
#include "costs/cost_model.hpp"

namespace kvtier {

class Traffic {
 public:
  // Both must outlive this.
  Traffic(Catalog& catalog, CostModel& costs) : catalog_(catalog), costs_(costs) {}

  // The data plane has taken a transfer of these pages.
  void begun(Ticket ticket, std::span<const Tier> path, std::span<const NodeId> nodes, Priority priority, double now);
  void refuse(std::size_t pages) { refused_ += pages; }  // it has not
  void drop(std::size_t pages) { dropped_ += pages; }    // they were to go down, and stay where they are

  // A word of the data plane: the catalog hears of it, and what it took is learnt. Appends to `below` what has come
  // down to host memory. Returns whether all of it went well; nothing: nobody knows the ticket (any more).
  std::optional<bool> settle(const Completion& done, std::vector<NodeId>* below);

  bool runs(Ticket ticket) const { return under_way_.contains(ticket); }  // its last word was not said
  std::size_t under_way() const { return under_way_.size(); }
  std::size_t hanging() const { return hanging_; }  // of these, whose end nobody knows
  bool moves(std::span<const Tier> path) const;     // whether something that does not hang does
  void take_disk_offline(bool offline) { disk_offline_ = offline; }
  bool disk_offline() const { return disk_offline_; }  // whether a transfer found it so
  std::uint64_t pages_moved(Lane lane) const { return moved_[index_of(lane)]; }
  std::uint64_t failures(PageStatus status) const { return failures_[static_cast<int>(status)]; }
  std::uint64_t refused() const { return refused_; }
  std::uint64_t dropped() const { return dropped_; }

 private:
  struct UnderWay {
    std::vector<Tier> path;
    std::vector<NodeId> nodes;
    bool hangs = false;  // it was reported early: when it ends nobody knows
  };
  void count(const UnderWay& transfer, const Completion& done);

  Catalog& catalog_;
  CostModel& costs_;
  std::unordered_map<Ticket, UnderWay> under_way_;
  std::size_t hanging_ = 0;
  bool disk_offline_ = false;
  std::uint64_t moved_[kLanes] = {};  // pages
  std::uint64_t failures_[kPageStatuses] = {};
  std::uint64_t refused_ = 0, dropped_ = 0;
};

}  // namespace kvtier
