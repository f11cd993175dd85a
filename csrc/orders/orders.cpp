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
  if (said == Submit::kAccepted) return {reserved.ticket, reserved.count};
  take_back(reserved, wish.path.size() - 1);
  return {0, reserved.count};
}

void Orders::take_back(const Reservation& reserved, std::size_t hops) {
  const std::vector<std::uint8_t> skipped(hops * reserved.count, static_cast<std::uint8_t>(PageStatus::kSkipped));
  catalog_.settle(reserved.ticket, skipped, hops, reserved.count);
}

}  // namespace kvtier
