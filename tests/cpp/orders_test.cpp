#include "orders/orders.hpp"

#include <doctest/doctest.h>

#include "mover_rig.hpp"

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

}  // namespace
}  // namespace kvtier::test
