#include "orders/orders.hpp"

#include <stdexcept>
#include <string>

namespace kvtier {

Issued Orders::issue(const Wish& wish, bool refuse) {
  const double due_s = wish.deadline == kNever ? 0 : to_seconds(wish.deadline.time_since_epoch());
  const Reservation reserved = catalog_.reserve(wish.path, wish.nodes, wish.request, wish.ahead, wish.cold, due_s);
  if (reserved.count == 0) return {};
  bool begun = false;
  try {
    traffic_.begun(reserved.ticket, wish.path, wish.nodes.first(reserved.count), wish.priority,
                   to_seconds(Clock::now().time_since_epoch()));
    begun = true;
    if (!refuse && submit(wish, reserved)) return {reserved.ticket, reserved.count};
  } catch (...) {
    take_back(wish, reserved, begun);
    throw;
  }
  take_back(wish, reserved, begun);
  return {};
}

bool Orders::submit(const Wish& wish, const Reservation& reserved) {
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
  const Submit said = mover_.submit(order, wish.stream);
  if (said == Submit::kDuplicate)
    throw std::invalid_argument("ticket = " + std::to_string(reserved.ticket) +
                                ": still in use by an earlier transfer");
  return said == Submit::kAccepted;
}

Ticket Orders::store(Wish wish, bool refuse) {
  const Tier target = wish.path[1];
  if (target == Tier::kDisk && traffic_.disk_offline()) {
    traffic_.drop(wish.nodes.size());
    return 0;
  }
  std::vector<NodeId> wanted = catalog_.lacking(wish.nodes, wish.path[0], target);
  const std::size_t most = wish.priority == Priority::kBackground ? traffic_.store_room(wish.path) : wanted.size();
  if (wanted.size() > most) {
    if (!wish.cold) traffic_.put_off(wish.path, std::span(wanted).subspan(most));  // else they are found again
    wanted.resize(most);
  }
  if (wanted.empty()) return 0;
  wish.nodes = wanted;
  const Issued issued = issue(wish, refuse);
  traffic_.drop(wanted.size() - issued.count);
  return issued.ticket;
}

void Orders::settle(bool spill) {
  reported_.clear();
  mover_.poll(&reported_);
  with_each(reported_, [this](const Completion& done) { traffic_.settle(done); });
  if (spill && !traffic_.below().empty()) this->spill();
}

void Orders::spill() {
  constexpr Tier kSpillPath[] = {Tier::kHost, Tier::kDisk};
  Wish wish;
  wish.path = kSpillPath;
  wish.nodes = traffic_.below();
  wish.priority = Priority::kBackground;
  try {
    store(wish);
  } catch (const std::exception&) {  // nobody waits for it, and others wait to be told what has ended
    traffic_.drop(wish.nodes.size());
  }
  traffic_.told_below();
}

void Orders::take_back(const Wish& wish, const Reservation& reserved, bool begun) {
  if (begun) traffic_.refuse(reserved.ticket);
  const std::size_t hops = wish.path.size() - 1;
  const std::vector<std::uint8_t> skipped(hops * reserved.count, static_cast<std::uint8_t>(PageStatus::kSkipped));
  catalog_.settle(reserved.ticket, skipped, hops, reserved.count);
}

}  // namespace kvtier
