// Pages on their way between tiers: reserve names a transfer and all its slots, settle hears what became of each page.
#include <algorithm>
#include <stdexcept>

#include "catalog/catalog.hpp"

namespace kvtier {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

bool known(std::uint8_t status) {
  return status <= static_cast<std::uint8_t>(PageStatus::kOffline) ||
         (status >= static_cast<std::uint8_t>(kFirstLost) && status <= static_cast<std::uint8_t>(PageStatus::kStale));
}

}  // namespace

bool Catalog::evict(int t, std::size_t count, bool backed_only) {
  for (; count != 0; --count) {
    const NodeId node = pages_.victim(t);
    if (node == kNoNode || (backed_only && !pages_.backed(t, node))) return false;
    trie_.prefetch_erase(node);
    pages_.evict(t, node);
    reap(node);
  }
  return true;
}

bool Catalog::has_room(int t, bool backed_only) {
  if (pages_.free_slots(t) != 0) return true;
  const NodeId node = pages_.victim(t);
  return node != kNoNode && (!backed_only || pages_.backed(t, node));
}

bool Catalog::find_slot(int t, bool backed_only, Slot* slot) {
  return pages_.pop_free(t, slot) || (evict(t, 1, backed_only) && pages_.pop_free(t, slot));
}

void Catalog::reap(NodeId node) {
  while (!is_root(node) && trie_.children(node) == 0 && trie_.holds(node) == 0 && !pages_.has_page(node)) {
    const NodeId parent = trie_.parent(node);
    trie_.erase(node);
    node = parent;
  }
}

// All of one node's pages, or none: its source pinned, a slot in each owned tier behind it.
bool Catalog::reserve_node(std::span<const Tier> path, NodeId node, Ticket ticket, bool backed_only, Slot* slots) {
  if (!trie_.alive(node) || trie_.detached(node)) return false;  // eviction for an earlier one may have ended it
  const int source = pages_.index(path[0]);
  if (source >= 0 && !pages_.page(source, node).ready()) return false;
  for (std::size_t hop = 1; hop < path.size(); ++hop) {
    const int t = pages_.index(path[hop]);
    if (t < 0) continue;
    if (pages_.page(t, node).residency() != Residency::kAbsent || !has_room(t, backed_only)) return false;
  }
  // The node must outlive what is evicted on its behalf: by its source's pin, or where that is an engine's own, by a
  // hold.
  source >= 0 ? pages_.pin(source, node) : trie_.hold(node);
  std::size_t hop = 1;
  for (; hop < path.size(); ++hop) {
    slots[hop] = kNoSlot;
    const int t = pages_.index(path[hop]);
    if (t >= 0 && !find_slot(t, backed_only, &slots[hop])) break;
  }
  const bool complete = hop == path.size();
  if (!complete) {
    for (std::size_t undo = 1; undo < hop; ++undo)
      if (slots[undo] != kNoSlot) pages_.unclaim(pages_.index(path[undo]), slots[undo]);
  } else {
    slots[0] = source >= 0 ? pages_.page(source, node).slot : kNoSlot;
    for (hop = 1; hop < path.size(); ++hop) {
      const int t = pages_.index(path[hop]);
      if (t < 0) continue;
      pages_.begin_filling(t, node, slots[hop], ticket);
      if (hop + 1 < path.size()) pages_.pin(t, node);  // the next hop's source
    }
  }
  if (source < 0) trie_.unhold(node);
  if (!complete) {
    if (source >= 0) pages_.unpin(source, node);
    reap(node);
  }
  return complete;
}

Reservation Catalog::reserve(std::span<const Tier> path, Nodes nodes, RequestId request, bool backed_only) {
  if (path.size() < 2 || path.size() > kTiers)
    refuse("path: " + std::to_string(path.size()) + " tiers given; 2 to 4 are accepted");
  bool any_owned = false;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (static_cast<int>(path[i]) >= kTiers || std::find(path.begin(), path.begin() + i, path[i]) != path.begin() + i)
      refuse("path: must name known tiers, each once");
    any_owned = any_owned || pages_.index(path[i]) >= 0;
  }
  if (!any_owned) refuse("path: no tier on it is owned by this catalog");
  require_alive("nodes", nodes);
  const int last = pages_.index(path.back());
  const std::uint32_t lease = request != 0 && last >= 0 ? leases_.get(request) : Leases::kNone;

  Reservation reservation;
  Transfer* transfer = nodes.empty() ? nullptr : transfers_.open();
  if (transfer == nullptr) return reservation;
  std::vector<Slot> slots(path.size() * nodes.size());
  std::size_t count = 0;
  for (; count < nodes.size(); ++count) {
    Slot of_node[kTiers];
    if (!reserve_node(path, nodes[count], transfer->ticket, backed_only, of_node)) break;
    for (std::size_t i = 0; i < path.size(); ++i) slots[i * nodes.size() + count] = of_node[i];
    if (lease != Leases::kNone) {
      pages_.pin(last, nodes[count]);
      leases_[lease].promise.loads.push_back({nodes[count], static_cast<std::uint8_t>(last)});
    }
  }
  if (count == 0) {
    transfers_.close(transfer);
    return reservation;
  }
  for (std::size_t i = 1; i < path.size(); ++i)
    std::copy_n(slots.begin() + static_cast<std::ptrdiff_t>(i * nodes.size()), count,
                slots.begin() + static_cast<std::ptrdiff_t>(i * count));
  slots.resize(path.size() * count);
  transfer->path.assign(path.begin(), path.end());
  transfer->nodes.assign(nodes.begin(), nodes.begin() + static_cast<std::ptrdiff_t>(count));
  transfer->status.assign(transfer->hops() * count, PageStatus::kPending);
  transfer->pending = transfer->status.size();
  reservation.ticket = transfer->ticket;
  reservation.count = count;
  reservation.slots = std::move(slots);
  return reservation;
}

void Catalog::settle_hop(Transfer& transfer, std::size_t hop, std::size_t i) {
  const NodeId node = transfer.nodes[i];
  const std::size_t count = transfer.count();
  const PageStatus status = transfer.status[hop * count + i];
  // What a later hop wrote is only good if each earlier one is known to be.
  bool good = status == PageStatus::kOk;
  for (std::size_t earlier = 0; earlier < hop; ++earlier)
    good = good && transfer.status[earlier * count + i] == PageStatus::kOk;
  const int source = pages_.index(transfer.path[hop]);
  if (status >= kFirstLost) {
    ++stats_.pages_lost;
    if (source >= 0) pages_.condemn(source, node);
  }
  const int destination = pages_.index(transfer.path[hop + 1]);
  if (destination >= 0) pages_.settle_filler(destination, node, good);
}

void Catalog::unpin_sources(const Transfer& transfer, std::size_t i) {
  for (std::size_t hop = 0; hop < transfer.hops(); ++hop) {
    if (transfer.status[hop * transfer.count() + i] == PageStatus::kPending) return;  // all hops, or none yet
  }
  for (std::size_t hop = 0; hop < transfer.hops(); ++hop) {
    const int t = pages_.index(transfer.path[hop]);
    if (t >= 0) pages_.unpin(t, transfer.nodes[i]);
  }
  reap(transfer.nodes[i]);
}

bool Catalog::settle(Ticket ticket, std::span<const std::uint8_t> status, std::size_t hops, std::size_t count) {
  const auto bad = std::find_if_not(status.begin(), status.end(), known);
  if (bad != status.end()) refuse("status: " + std::to_string(*bad) + " is not a PageStatus");
  Transfer* transfer = transfers_.find(ticket);
  if (transfer == nullptr) {
    ++stats_.settled_late;
    return false;
  }
  if (hops != transfer->hops() || count != transfer->count())
    refuse("status: shape (" + std::to_string(hops) + ", " + std::to_string(count) + ") given; this ticket has (" +
           std::to_string(transfer->hops()) + ", " + std::to_string(transfer->count()) + ")");
  // Tail first: of pages that become evictable together, the beginning of the chain is to go last.
  for (std::size_t i = count; i-- > 0;) {
    if (i >= 16) pages_.prefetch(transfer->nodes[i - 16]);
    bool news = false;
    for (std::size_t hop = 0; hop < hops; ++hop) {
      PageStatus& kept = transfer->status[hop * count + i];
      const auto now = static_cast<PageStatus>(status[hop * count + i]);
      if (kept != PageStatus::kPending || now == PageStatus::kPending) continue;  // the first word counts
      kept = now;
      --transfer->pending;
      news = true;
      settle_hop(*transfer, hop, i);
    }
    if (news) unpin_sources(*transfer, i);
  }
  if (transfer->pending == 0) transfers_.close(transfer);
  return true;
}

bool Catalog::cancel(Ticket ticket) {
  Transfer* transfer = transfers_.find(ticket);
  if (transfer == nullptr) return false;
  for (std::size_t i = transfer->count(); i-- > 0;) {
    for (std::size_t hop = 0; hop < transfer->hops(); ++hop) {
      if (transfer->status[hop * transfer->count() + i] != PageStatus::kPending) continue;
      const int t = pages_.index(transfer->path[hop + 1]);
      if (t >= 0) pages_.condemn(t, transfer->nodes[i]);
    }
  }
  return true;
}

}  // namespace kvtier
