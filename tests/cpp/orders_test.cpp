#include "orders/orders.hpp"

#include <doctest/doctest.h>

#include "mover_rig.hpp"
#include "orders/traffic.hpp"

namespace kvtier::test {
namespace {

struct Joined : Rig {
  Joined() : catalog({{D, kSlots, "lru"}, {H, kSlots, "lru"}, {S, kSlots, "lru"}}, kLabelBytes, 4 * kSlots) {
    Digest space{};
    const NodeId root = catalog.root(space, 0, 0);
    std::vector<std::uint8_t> labels(kLabelBytes * 8);
    for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<std::uint8_t>(i / kLabelBytes);
    nodes = catalog.insert(root, labels, 1);
    const std::vector<Slot> slots = catalog.take(D, nodes.size(), 1);
    catalog.adopt(D, nodes, slots, 1);
  }

  Catalog catalog;
  std::vector<NodeId> nodes;
};

TEST_CASE("an order is reserved and moved, or neither") {
  Joined rig;
  CostModel costs(1024, 8u << 20);
  Traffic traffic(rig.catalog, costs);
  Orders orders(rig.catalog, *rig.mover, traffic);
  const Tier down[] = {D, H};
  Wish wish;
  wish.path = down;
  wish.nodes = rig.nodes;
  CHECK(orders.issue(wish, true).ticket == 0);
  CHECK(traffic.refused() == rig.nodes.size());
  wish.priority = static_cast<Priority>(9);
  CHECK_THROWS(orders.issue(wish));
  CHECK(rig.catalog.stats().transfers == 0);
  CHECK(rig.catalog.check().empty());

  wish.priority = Priority::kDemand;
  const Issued issued = orders.issue(wish);
  REQUIRE(issued.ticket != 0);
  CHECK(issued.count == rig.nodes.size());
  CHECK(orders.issue(wish).count == 0);  // they are on their way
  std::vector<Completion> others;
  const Completion done = next_report(*rig.mover, &others, issued.ticket);
  CHECK(done.final);
  CHECK(rig.catalog.settle_whole(issued.ticket));
  CHECK(rig.catalog.usage(H).ready == rig.nodes.size());
  CHECK(rig.catalog.check().empty());
}

TEST_CASE("what came down goes on to the disk, and only what a tier lacks is stored") {
  Joined rig;
  CostModel costs(1024, 8u << 20);
  Traffic traffic(rig.catalog, costs);
  Orders orders(rig.catalog, *rig.mover, traffic);
  const auto settle_all = [&] {
    std::size_t whole = 0;
    while (traffic.under_way() != 0) {
      rig.mover->wait(std::chrono::seconds(1), rig.mover->reports());
      orders.settle(true);
      for (const Ended& ended : traffic.ended()) whole += ended.whole ? 1 : 0;
      traffic.told();
    }
    return whole;
  };
  const Tier down[] = {D, H};
  Wish wish;
  wish.path = down;
  wish.nodes = std::span(rig.nodes).first(3);
  REQUIRE(orders.store(wish) != 0);
  CHECK(traffic.moves(down));
  CHECK(settle_all() == 2);  // the store and the spill that followed it
  CHECK(rig.catalog.usage(S).ready == 3);
  wish.nodes = rig.nodes;
  REQUIRE(orders.store(wish) != 0);
  CHECK(settle_all() == 2);
  CHECK(rig.catalog.usage(S).ready == rig.nodes.size());
  CHECK(traffic.pages_moved(Lane::kOffload) == rig.nodes.size());
  CHECK(traffic.pages_moved(Lane::kSpill) == rig.nodes.size());
  CHECK(orders.store(wish) == 0);  // nothing lacks
  CHECK(traffic.dropped() == 0);
  CHECK(rig.catalog.check().empty());
}

TEST_CASE("what a lane has no time for is put off, and stores give their pages' room to who needs it") {
  Joined rig;
  CostModel costs(1024, 8u << 20);
  Traffic traffic(rig.catalog, costs);
  Orders orders(rig.catalog, *rig.mover, traffic);
  costs.seed_lane(Lane::kOffload, 0, 3 * 1024 / Backlog::kMostSeconds);
  const Tier down[] = {D, H}, below[] = {H, S}, up[] = {H, D};
  CHECK(traffic.store_room(down) == 3);
  CHECK(traffic.store_room(below) > 100'000);  // nobody knows yet
  CHECK(traffic.store_room(up) == SIZE_MAX);
  Wish wish;
  wish.path = down;
  wish.nodes = rig.nodes;
  wish.priority = Priority::kBackground;
  wish.cold = true;
  REQUIRE(orders.store(wish) != 0);
  CHECK(rig.catalog.usage(H).filling == 3);
  CHECK_FALSE(traffic.has_put_off());  // they are found again
  wish.cold = false;
  CHECK(orders.store(wish) == 0);
  CHECK(traffic.pages_put_off() == rig.nodes.size() - 3);
  CHECK(traffic.take_put_off(down, 9).empty());  // there is no time yet
  const auto settle_all = [&] {
    while (traffic.under_way() != 0) {
      rig.mover->wait(std::chrono::seconds(1), rig.mover->reports());
      orders.settle(false);
      traffic.told();
    }
  };
  settle_all();
  CHECK(traffic.take_put_off(down, 2) == std::vector(rig.nodes.begin() + 3, rig.nodes.begin() + 5));
  wish.priority = Priority::kPrefetch;
  REQUIRE(orders.store(wish) != 0);  // somebody's swapping out is not put off
  CHECK(traffic.give_way(down, 1).empty());
  settle_all();
  CHECK(rig.catalog.usage(H).ready == rig.nodes.size());
  CHECK(traffic.dropped() == 0);

  // Of stores that nobody waits for the latest give way, as many as it takes, and once.
  const auto begin = [&](std::size_t first, std::size_t count) {
    const std::span<const NodeId> nodes = std::span(rig.nodes).subspan(first, count);
    const Ticket ticket = rig.catalog.reserve(below, nodes, 0, false, false).ticket;
    traffic.begun(ticket, below, nodes, Priority::kBackground, 1.0);
    return ticket;
  };
  const Ticket first = begin(0, 2), second = begin(2, 2), third = begin(4, 1);
  const std::size_t before = traffic.pages_put_off();
  CHECK(traffic.give_way(below, 2) == std::vector{third, second});
  CHECK(traffic.give_way(below, 9) == std::vector{first});
  Completion done;
  done.ticket = second;
  done.hop_count = 1;
  done.count = 2;
  done.status = {PageStatus::kOk, PageStatus::kCancelled};
  traffic.settle(done);
  CHECK(traffic.pages_put_off() == before + 1);
  CHECK(traffic.failures(PageStatus::kCancelled) == 0);
  CHECK(traffic.take_put_off(below, 2) == std::vector{rig.nodes[4], rig.nodes[2]});
  CHECK(rig.catalog.check().empty());
}

TEST_CASE("a word on a transfer reaches whom it concerns, and is counted once") {
  Joined rig;
  CostModel costs(1024, 8u << 20);
  Traffic traffic(rig.catalog, costs);
  const Tier down[] = {D, H};
  const std::span<const NodeId> nodes = std::span(rig.nodes).first(3);
  const Reservation reserved = rig.catalog.reserve(down, nodes, 0, false, false);
  REQUIRE(reserved.count == 3);
  Completion done;
  done.ticket = reserved.ticket;
  done.hop_count = 1;
  done.count = 3;
  done.status = {PageStatus::kOk, PageStatus::kPending, PageStatus::kPending};
  done.final = false;
  done.hops[0] = {Lane::kOffload, 1024, 0, 1e-3, 1.0, 1.001, 1024};
  const auto said = [&] {  // what is told of the word, in its order
    traffic.told();
    traffic.settle(done);
    std::vector<bool> whole;
    for (const Ended& ended : traffic.ended()) whole.push_back(ended.whole);
    return whole;
  };
  CHECK(said().empty());  // nobody has begun it
  traffic.begun(reserved.ticket, down, nodes, Priority::kBackground, 1.0);
  CHECK(said() == std::vector{false});
  CHECK(traffic.under_way() == 1);
  CHECK(traffic.hanging() == 1);
  CHECK_FALSE(traffic.moves(down));
  CHECK(traffic.below().empty());
  CHECK_FALSE(costs.lane_speed(Lane::kOffload));

  done.final = true;
  CHECK_THROWS_WITH_AS(said(), doctest::Contains("are PENDING"), std::invalid_argument);
  CHECK(traffic.under_way() == 1);
  done.status = {PageStatus::kOk, PageStatus::kOffline, PageStatus::kSkipped};
  CHECK(said() == std::vector{false});
  REQUIRE(traffic.below().size() == 1);
  CHECK(traffic.below()[0] == nodes[0]);
  CHECK(traffic.under_way() + traffic.hanging() == 0);
  CHECK(traffic.disk_offline());
  CHECK(traffic.pages_moved(Lane::kOffload) == 1);
  CHECK(traffic.failures(PageStatus::kOffline) == 1);
  CHECK(traffic.failures(PageStatus::kSkipped) == 0);
  CHECK(costs.lane_speed(Lane::kOffload));
  CHECK(said().empty());  // said again
  CHECK(traffic.below().empty());
  CHECK(rig.catalog.check().empty());
}

}  // namespace
}  // namespace kvtier::test
