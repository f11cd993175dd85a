// What is under way between the tiers, as the control plane knows it: who hears of each word on a transfer, and the
// account of what was moved and what was not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "catalog/catalog.hpp"
#include "common/completion.hpp"
#include "costs/cost_model.hpp"
#include "orders/backlog.hpp"

namespace kvtier {

struct Ended {
  Ticket ticket = 0;
  bool whole = false;
};

class Traffic {
 public:
  // Both must outlive this.
  Traffic(Catalog& catalog, CostModel& costs) : catalog_(catalog), costs_(costs), backlog_(costs) {}

  // The data plane will be asked for a transfer of these pages. Said before it is, so that none runs whose ticket
  // nobody knows; where this throws, nothing has changed.
  void begun(Ticket ticket, std::span<const Tier> path, std::span<const NodeId> nodes, Priority priority, double now);
  void refuse(Ticket ticket);                          // it has not taken it
  void drop(std::size_t pages) { dropped_ += pages; }  // they were to go down, and stay where they are
  // Somebody needs room for so many pages where stores along `path` begin: which of those that nobody waits for are to
  // be cancelled for it, the latest ones, which have hardly begun. They are stored later if they are still there.
  std::vector<Ticket> give_way(std::span<const Tier> path, std::size_t pages);
  // How many pages that nobody waits for may be copied down along `path` now. See Backlog.
  std::size_t store_room(std::span<const Tier> path) const;
  void put_off(std::span<const Tier> path, std::span<const NodeId> nodes);
  std::vector<NodeId> take_put_off(std::span<const Tier> path, std::size_t most);
  bool has_put_off() const { return backlog_.waiting(Lane::kOffload) + backlog_.waiting(Lane::kSpill) != 0; }
  void count_put_off(std::size_t pages) { backlog_.count(pages); }  // that can't be stored later
  std::uint64_t pages_put_off() const { return backlog_.counted(); }

  // A word of the data plane: the catalog hears of it, and what it took is learnt. Of a transfer that nobody knows (any
  // more) only the catalog hears. Throws std::invalid_argument, and nothing has changed, for what it cannot have said.
  void settle(const Completion& done);
  // What the words since the last told() have ended or given up, and what came down to host memory.
  std::span<const Ended> ended() const { return ended_; }
  std::span<const NodeId> below() const { return below_; }
  void told_below() { below_.clear(); }
  void told() { ended_.clear(), below_.clear(); }

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
    std::optional<Lane> store;  // that nobody waits for, and along which lane
    bool hangs = false;         // it was reported early: when it ends nobody knows
    bool gives_way = false;     // it was cancelled for the room that it keeps
  };
  void check(const UnderWay& transfer, const Completion& done, bool whole) const;
  void count(const UnderWay& transfer, const Completion& done);
  void note_end(const UnderWay& transfer);

  Catalog& catalog_;
  CostModel& costs_;
  Backlog backlog_;
  std::unordered_map<Ticket, UnderWay> under_way_;
  std::vector<Ended> ended_;  // these two keep their memory: a steady state allocates next to nothing
  std::vector<NodeId> below_;
  std::size_t hanging_ = 0;
  bool disk_offline_ = false;
  std::uint64_t moved_[kLanes] = {};  // pages
  std::uint64_t failures_[kPageStatuses] = {};
  std::uint64_t refused_ = 0, dropped_ = 0;
};

// Does `work` with each of them; what it throws for one keeps no other from it. The first is thrown at the end.
template <class All, class Work>
void with_each(All&& all, Work&& work) {
  std::exception_ptr first;
  for (auto&& one : all) {
    try {
      work(one);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace kvtier
