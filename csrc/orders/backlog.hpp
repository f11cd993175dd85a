// Stores that nobody waits for, and how far they may be behind. What a store reads stays where it is until it was read,
// so a lane that is slow or busy would in the end keep the room that requests need. Beyond some seconds of a lane's
// time pages are not ordered but put off: they may be evicted meanwhile, and are stored later if they are still there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "common/lane.hpp"
#include "costs/cost_model.hpp"

namespace kvtier {

class Backlog {
 public:
  static constexpr double kMostSeconds = 1.0;            // that a lane is behind
  static constexpr double kUnknownBytesPerSecond = 1e9;  // of a lane that has never moved anything
  static constexpr std::size_t kMostPages = 1u << 16;    // that are remembered of what was put off, the latest

  explicit Backlog(const CostModel& costs) : costs_(costs) {}  // must outlive this

  void begun(Lane lane, std::size_t pages) { at(lane).under_way += pages; }
  void ended(Lane lane, std::size_t pages) { at(lane).under_way -= pages; }
  std::size_t room(Lane lane) const;  // pages that may be ordered now; of an idle lane at least one
  void count(std::size_t pages) { put_off_ += pages; }
  void remember(Lane lane, std::span<const NodeId> nodes);  // to store them later, in this order
  // The next of these, as many as there is room for and `most` at most. Some may have gone since, or be stored.
  std::vector<NodeId> take(Lane lane, std::size_t most);
  std::size_t waiting(Lane lane) const { return lanes_[index_of(lane)].nodes.size(); }
  std::uint64_t counted() const { return put_off_; }

 private:
  struct State {
    std::size_t under_way = 0;  // pages
    std::deque<NodeId> nodes;
  };
  State& at(Lane lane) { return lanes_[index_of(lane)]; }

  const CostModel& costs_;
  State lanes_[kLanes];
  std::uint64_t put_off_ = 0;
};

}  // namespace kvtier
