// Orders: where the catalog and the mover of one process meet. What both planes say to each other by messages
// elsewhere (kvtier/messages.py: Transfer, Completion) is a call here; neither room knows the other, nor this one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "catalog/catalog.hpp"
#include "mover/mover.hpp"
#include "orders/traffic.hpp"

namespace kvtier {

// Pages that are to be moved; see Catalog::reserve and Order.
struct Wish {
  std::span<const Tier> path;
  std::span<const NodeId> nodes;
  RequestId request = 0;
  bool ahead = false;
  bool cold = false;
  Priority priority = Priority::kDemand;
  Time deadline = kNever;
  std::span<const std::size_t> cuts;
  std::uintptr_t stream = 0;
};

struct Issued {
  Ticket ticket = 0;      // 0: nothing moves
  std::size_t count = 0;  // of the nodes, from the first, that move
};

class Orders {
 public:
  // All must outlive this; all calls from the one thread that calls the catalog.
  Orders(Catalog& catalog, Mover& mover, Traffic& traffic) : catalog_(catalog), mover_(mover), traffic_(traffic) {}

  // Reserves slots for as many of the pages as can be had and has them moved. What the mover refuses (`refuse`: this
  // was decided already), or throws for, leaves no ticket open and no page filling. Throws std::invalid_argument.
  Issued issue(const Wish& wish, bool refuse = false);
  // Has those of the pages copied down that the next tier lacks. What finds no room or no place is dropped, and in the
  // background what the lane has no time for is put off.
  Ticket store(Wish wish, bool refuse = false);
  // Settles what the mover has reported. `spill`: what came down to host memory goes on to the disk, or is dropped
  // where that is refused. What has ended, traffic says until told(); also where this throws, for a word that was
  // refused.
  void settle(bool spill);
  Traffic& traffic() const { return traffic_; }

 private:
  bool submit(const Wish& wish, const Reservation& reserved);
  void spill();
  void take_back(const Wish& wish, const Reservation& reserved, bool begun);

  Catalog& catalog_;
  Mover& mover_;
  Traffic& traffic_;
  // Of the call under way; kept, so that a steady state allocates next to nothing.
  std::vector<std::uint8_t> identities_;
  std::vector<Completion> reported_;
};

}  // namespace kvtier
