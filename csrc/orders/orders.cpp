#include "orders/orders.hpp"

#include <stdexcept>
#include <string>

namespace kvtier {

Issued Orders::issue(const Wish& wish, bool refuse) {
  const Reservation reserved = catalog_.reserve(wish.path, wish.nodes, wish.request, wish.backed_only, wish.cold);
  if (reserved.count == 0) return {};
  Submit said = Submit::kFull;
  try {
    if (!refuse) {
      Order order;
      order.ticket = reserved.ticket;
      order.path = wish.path;
      order.slots = reserved.slots.data();
      order.count = static_cast<std::uint32_t>(reserved.count);
      order.identity_bytes = identity_bytes(catalog_.label_bytes());
      identities_.resize(reserved.count * order.identity_bytes);
      catalog_.identities(wish.nodes.first(reserved.count), identities_.data());
      order.identities = reinterpret_cast<const std::byte*>(identities_.data());
      order.priority = wish.priority;
      order.deadline = wish.deadline;
      order.cuts = wish.cuts;
      said = mover_.submit(order, wish.stream);
      if (said == Submit::kDuplicate)
        throw std::invalid_argument("ticket = " + std::to_string(reserved.ticket) +
                                    ": still in use by an earlier transfer");
    }
  } catch (...) {
    take_back(reserved, wish.path.size() - 1);
    throw;
  }
  if (said != Submit::kAccepted) {
    take_back(reserved, wish.path.size() - 1);
    traffic_.refuse(reserved.count);
    return {};
  }
  traffic_.begun(reserved.ticket, wish.path, wish.nodes.first(reserved.count), wish.priority,
                 to_seconds(Clock::now().time_since_epoch()));
  return {reserved.ticket, reserved.count};
}

Ticket Orders::store(Wish wish, bool refuse) {
  const Tier target = wish.path[1];
  if (target == Tier::kDisk && traffic_.disk_offline()) {
    traffic_.drop(wish.nodes.size());
    return 0;
  }
  const std::vector<NodeId> wanted = catalog_.lacking(wish.nodes, wish.path[0], target);
  if (wanted.empty()) return 0;
  wish.nodes = wanted;
  const Issued issued = issue(wish, refuse);
  traffic_.drop(wanted.size() - issued.count);
  return issued.ticket;
}

std::span<const Ended> Orders::settle(bool spill) {
  reported_.clear(), below_.clear(), ended_.clear();
  mover_.poll(&reported_);
  for (const Completion& done : reported_) {
    const std::optional<bool> whole = traffic_.settle(done, &below_);
    if (whole) ended_.push_back({done.ticket, *whole});
  }
  if (spill && !below_.empty()) {
    constexpr Tier kSpillPath[] = {Tier::kHost, Tier::kDisk};
    Wish wish;
    wish.path = kSpillPath;
    wish.nodes = below_;
    wish.priority = Priority::kBackground;
    store(wish);
  }
  return ended_;
}

void Orders::take_back(const Reservation& reserved, std::size_t hops) {
  const std::vector<std::uint8_t> skipped(hops * reserved.count, static_cast<std::uint8_t>(PageStatus::kSkipped));
  catalog_.settle(reserved.ticket, skipped, hops, reserved.count);
}

}  // namespace kvtier
