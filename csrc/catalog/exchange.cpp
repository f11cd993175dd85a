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

void Catalog::make_room(int t, std::size_t slots, const Ahead* ahead) {
  const std::size_t free = pages_.free_slots(t);
  if (slots > free) pages_.evict(t, slots - free, ahead, [this](NodeId node) { reap(node); });
}

void Catalog::reap_pageless(NodeId node) {
  do {
    const NodeId parent = trie_.parent(node);
    trie_.erase(node);
    node = parent;
  } while (!is_root(node) && trie_.bare(node) && !pages_.has_page(node));
}

// How many of the nodes, from the first, are sure to be different ones, as each lies deeper than the one before, and
// have a page to move from path[0] and none in the other owned tiers.
Catalog::Run Catalog::movable(std::span<const Tier> path, Nodes nodes) const {
  const int source = pages_.index(path[0]);
  int destinations[kTiers], owned = 0;
  for (const Tier tier : path.subspan(1))
    if (pages_.index(tier) >= 0) destinations[owned++] = pages_.index(tier);
  std::size_t length = 0;
  for (; length < nodes.size(); ++length) {
    if (length + kPagesAhead < nodes.size()) pages_.prefetch(nodes[length + kPagesAhead]);
    const NodeId node = nodes[length];
    if (length > 0 && trie_.position(node) <= trie_.position(nodes[length - 1])) return {length, false};
    const Page* row = pages_.row(node);
    bool can = source < 0 || row[source].ready();
    for (int i = 0; i < owned; ++i) can &= row[destinations[i]].residency() == Residency::kAbsent;
    // Eviction for an earlier one may have ended it.
    if (!can || !trie_.alive(node) || trie_.detached(node)) return {length, true};
  }
  return {length, false};
}

// The first of the nodes, movable ones, as far as they can be had: their sources pinned, a slot in each owned tier
// behind them. slots: [path][stride]. Room is made for all of them before the first begins to fill.
std::size_t Catalog::reserve_run(std::span<const Tier> path, Nodes nodes, const Ahead* ahead, bool cold,
                                 OpenTransfer* transfer, std::uint32_t lease, Slot* slots, std::size_t stride) {
  std::size_t count = nodes.size();
  for (const Tier tier : path.subspan(1)) {
    const int t = pages_.index(tier);
    if (t >= 0) count = std::min(count, pages_.free_slots(t) + pages_.evictable(t));
  }
  // A node must outlive what is evicted on its behalf: by its source's page, or where that is an engine's own, by a
  // hold.
  const int source = pages_.index(path[0]);
  const Nodes held = source < 0 ? nodes.first(count) : Nodes();
  for (const NodeId node : held) trie_.hold(node);
  for (const Tier tier : path.subspan(1)) {
    const int t = pages_.index(tier);
    if (t < 0) continue;
    make_room(t, count, ahead);
    count = std::min(count, pages_.free_slots(t));
  }
  for (std::size_t hop = 0; hop < path.size(); ++hop) {
    const int t = pages_.index(path[hop]);
    Slot* const out = slots + hop * stride;
    const bool is_source = hop + 1 < path.size();
    if (t < 0) {
      std::fill_n(out, count, kNoSlot);
    } else if (hop == 0) {
      cold ? pages_.pin_cold(t, nodes.data(), count) : pages_.pin(t, nodes.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = pages_.page(t, nodes[i]).slot;
        if (ahead == nullptr) pages_.used(t, nodes[i]);
      }
    } else {
      pages_.begin_filling(t, nodes.data(), count, transfer->ticket, is_source || lease != Leases::kNone,
                           ahead != nullptr, out);
    }
  }
  for (const NodeId node : held) trie_.unhold(node);
  for (std::size_t i = held.size(); i-- > count;) reap(held[i]);  // what got no page after all
  return count;
}

Reservation Catalog::reserve(std::span<const Tier> path, Nodes nodes, RequestId request, bool ahead, bool cold,
                             double due_s) {
  if (path.size() < 2 || path.size() > kTiers)
    refuse("path: " + std::to_string(path.size()) + " tiers given; 2 to 4 are accepted");
  int owned_destinations = 0;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (static_cast<int>(path[i]) >= kTiers || std::find(path.begin(), path.begin() + i, path[i]) != path.begin() + i)
      refuse("path: must name known tiers, each once");
    owned_destinations += i > 0 && pages_.index(path[i]) >= 0;
  }
  if (owned_destinations == 0 && pages_.index(path[0]) < 0) refuse("path: no tier on it is owned by this catalog");
  require_alive("nodes", nodes);
  const int last = pages_.index(path.back());
  const std::uint32_t lease = request != 0 && last >= 0 ? leases_.get(request) : Leases::kNone;

  Reservation reservation;
  OpenTransfer* transfer = nodes.empty() ? nullptr : transfers_.open();
  if (transfer == nullptr) return reservation;
  const std::size_t stride = nodes.size();
  std::vector<Slot> slots(path.size() * stride);
  std::size_t count = 0;
  const Ahead sparing{moment_of(due_s), now_};
  const Ahead* const prefetch = ahead ? &sparing : nullptr;
  while (count < stride) {
    // Of two tiers one may have nothing to give up: then nothing may have gone from the other for it in advance.
    const Nodes rest = nodes.subspan(count, owned_destinations > 1 && ahead ? 1 : stride - count);
    const Run run = movable(path, rest);
    const std::size_t got =
        reserve_run(path, rest.first(run.length), prefetch, cold, transfer, lease, slots.data() + count, stride);
    count += got;
    if (run.cut || got != run.length) break;
  }
  if (count == 0) {
    transfers_.close(transfer);
    return reservation;
  }
  if (lease != Leases::kNone) leases_[lease].promise.loads.add(nodes.first(count), static_cast<std::uint8_t>(last));
  for (std::size_t i = 1; i < path.size() && count != stride; ++i)
    std::copy_n(slots.begin() + static_cast<std::ptrdiff_t>(i * stride), count,
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

// The first word on a page's hop counts. True: this was one.
bool Catalog::settle_hop(OpenTransfer& transfer, const int* t, std::size_t hop, std::size_t i, PageStatus now) {
  const std::size_t count = transfer.count();
  PageStatus& kept = transfer.status[hop * count + i];
  if (kept != PageStatus::kPending || now == PageStatus::kPending) return false;
  kept = now;
  --transfer.pending;
  const NodeId node = transfer.nodes[i];
  // What a later hop wrote is only good if each earlier one is known to be.
  bool good = now == PageStatus::kOk;
  for (std::size_t earlier = 0; earlier < hop; ++earlier)
    good = good && transfer.status[earlier * count + i] == PageStatus::kOk;
  if (now >= kFirstLost) {
    ++stats_.pages_lost;
    if (t[hop] >= 0) pages_.condemn(t[hop], node);
  }
  if (t[hop + 1] >= 0) pages_.settle_filler(t[hop + 1], node, good);
  return true;
}

// Every page arrived, hop by hop, and this is the first word on all of them: what settle_pages would do, at once.
void Catalog::settle_fillers(const OpenTransfer& transfer, const int* t) {
  const Nodes nodes = transfer.nodes;
  for (std::size_t hop = 0; hop < transfer.hops(); ++hop)
    if (t[hop + 1] >= 0)
      pages_.settle_fillers(t[hop + 1], nodes.data(), nodes.size(), [this](NodeId node) { reap(node); });
  for (std::size_t hop = 0; hop < transfer.hops(); ++hop)
    if (t[hop] >= 0) unpin(t[hop], nodes);
}

void Catalog::settle_pages(OpenTransfer& transfer, const int* t, std::span<const std::uint8_t> status) {
  const std::size_t count = transfer.count(), hops = transfer.hops();
  // Tail first: of pages that become evictable together, the beginning of the chain is to go last.
  for (std::size_t i = count; i-- > 0;) {
    bool news = false, done = true;
    for (std::size_t hop = 0; hop < hops; ++hop) {
      news |= settle_hop(transfer, t, hop, i, static_cast<PageStatus>(status[hop * count + i]));
      done &= transfer.status[hop * count + i] != PageStatus::kPending;
    }
    if (!news || !done) continue;
    // Sources are let go when no hop can touch them any more.
    const NodeId node = transfer.nodes[i];
    for (std::size_t hop = 0; hop < hops; ++hop)
      if (t[hop] >= 0) unpin(t[hop], {&node, 1});
    if (trie_.alive(node)) reap(node);
  }
}

bool Catalog::settle(Ticket ticket, std::span<const std::uint8_t> status, std::size_t hops, std::size_t count) {
  bool all_known = true, all_well = true;
  for (const std::uint8_t word : status) {
    all_known &= known(word);
    all_well &= word == static_cast<std::uint8_t>(PageStatus::kOk);
  }
  if (!all_known) {
    const auto bad = std::find_if_not(status.begin(), status.end(), known);
    refuse("status: " + std::to_string(*bad) + " is not a PageStatus");
  }
  OpenTransfer* transfer = transfers_.find(ticket);
  if (transfer == nullptr) {
    ++stats_.settled_late;
    return false;
  }
  if (hops != transfer->hops() || count != transfer->count())
    refuse("status: shape (" + std::to_string(hops) + ", " + std::to_string(count) + ") given; this ticket has (" +
           std::to_string(transfer->hops()) + ", " + std::to_string(transfer->count()) + ")");
  int t[kTiers];
  for (std::size_t i = 0; i <= hops; ++i) t[i] = pages_.index(transfer->path[i]);
  if (all_well && transfer->pending == status.size()) {
    settle_fillers(*transfer, t);
    transfer->pending = 0;
  } else {
    settle_pages(*transfer, t, status);
  }
  if (transfer->pending == 0) transfers_.close(transfer);
  return true;
}

bool Catalog::settle_whole(Ticket ticket) {
  const OpenTransfer* transfer = transfers_.find(ticket);
  const std::size_t hops = transfer == nullptr ? 0 : transfer->hops(),
                    count = transfer == nullptr ? 0 : transfer->count();
  const std::vector<std::uint8_t> ok(hops * count, static_cast<std::uint8_t>(PageStatus::kOk));
  return settle(ticket, ok, hops, count);
}

bool Catalog::cancel(Ticket ticket) {
  OpenTransfer* transfer = transfers_.find(ticket);
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
