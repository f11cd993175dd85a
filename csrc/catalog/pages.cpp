#include "catalog/pages.hpp"

#include <algorithm>

namespace kvtier {

Pages::Pages(const Trie& trie, const std::vector<TierSpec>& tiers)
    : trie_(trie), stride_(tiers.size()), pages_(tiers.size() * trie.max_nodes()) {
  std::fill_n(index_, kTiers, -1);
  for (const TierSpec& spec : tiers) {
    index_[static_cast<int>(spec.tier)] = static_cast<int>(tiers_.size());
    Pool& pool = tiers_.emplace_back(make_policy(spec.policy, trie.max_nodes()));
    pool.tier = spec.tier;
    pool.capacity = spec.slots;
    pool.keeps_last = spec.keeps_last;
    pool.owners = Array<Owner>(spec.slots);
    pool.tickets = Array<Ticket>(spec.slots);
    pool.free = Array<Slot>(spec.slots);
    pool.free_count = spec.slots;
    std::fill_n(pool.owners.data(), spec.slots, Owner{kNoNode, kNobody, 0});
    for (Slot i = 0; i < spec.slots; ++i) pool.free[i] = spec.slots - 1 - i;
  }
}

std::size_t Pages::memory_bytes() const {
  std::size_t bytes = pages_.bytes();
  for (const Pool& pool : tiers_)
    bytes += pool.order.memory_bytes() + pool.owners.bytes() + pool.tickets.bytes() + pool.free.bytes();
  return bytes;
}

void Pages::make_private(int t, Slot slot, std::uint32_t lease, std::uint32_t place) {
  tiers_[t].owners[slot] = {kNoNode, lease, place};
  ++tiers_[t].count.privates;
}

void Pages::free_private(int t, Slot slot) {
  tiers_[t].owners[slot] = {kNoNode, kNobody, 0};
  --tiers_[t].count.privates;
  push_free(t, slot);
}

bool Pages::claim_free(int t, const Slot* slots, std::size_t count) {
  Pool& pool = tiers_[t];
  std::vector<bool> wanted(pool.capacity, false);
  for (std::size_t i = 0; i < count; ++i) {
    if (slots[i] >= pool.capacity || wanted[slots[i]]) return false;
    wanted[slots[i]] = true;
  }
  const std::size_t left = static_cast<std::size_t>(
      std::count_if(pool.free.data(), pool.free.data() + pool.free_count, [&](Slot slot) { return !wanted[slot]; }));
  if (pool.free_count - left != count) return false;
  std::remove_if(pool.free.data(), pool.free.data() + pool.free_count, [&](Slot slot) { return wanted[slot]; });
  pool.free_count = left;
  return true;
}

void Pages::unpark(int t, NodeId node, bool used) {
  at(t, node).word &= ~Page::kParked;
  --tiers_[t].parked;
  used ? tiers_[t].order.insert(node) : tiers_[t].order.insert_coldest(node);
}

void Pages::pin(int t, const NodeId* nodes, std::size_t count) {
  Pool& pool = tiers_[t];
  std::size_t leaving = 0;  // what lies from here on leaves the order, and is told to it at once
  NodeId last = kNoNode;
  Page* above = nullptr;  // the last one's page: it is pinned, so there is nothing more to tell its ancestors
  for (std::size_t i = 0; i < count; ++i) {
    const NodeId node = nodes[i];
    Page& page = at(t, node);
    if (page.evictable() && !page.parked()) {
      ++pool.count.pinned;
      trie_.parent(node) == last ? void(++above->blocked) : block_up(t, node);
    } else {
      if (leaving != i) pool.order.remove(nodes + leaving, i - leaving);
      leaving = i + 1;
      if (page.pins() == 0) first_pin(t, node, page);
    }
    page.word = (page.word & ~Page::kCold) + Page::kPin;
    above = &page;
    last = node;
  }
  pool.order.remove(nodes + leaving, count - leaving);
}

void Pages::pin_cold(int t, const NodeId* nodes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const bool first = page(t, nodes[i]).pins() == 0;
    pin(t, nodes[i]);
    if (first) at(t, nodes[i]).word |= Page::kCold;
  }
}

void Pages::begin_filling(int t, const NodeId* nodes, std::size_t count, Ticket ticket, bool pinned, bool early,
                          Slot* slots) {
  Pool& pool = tiers_[t];
  const std::uint32_t state =
      static_cast<std::uint32_t>(Residency::kFilling) + (pinned ? Page::kPin : 0) + (early ? Page::kEarly : 0);
  NodeId last = kNoNode;
  Page* above = nullptr;  // the last one's page: it is filling, so there is nothing more to tell its ancestors
  for (std::size_t i = 0; i < count; ++i) {
    const NodeId node = nodes[i];
    const Slot slot = pop_free(t);
    Page& page = at(t, node);
    page.slot = slots[i] = slot;
    page.word = state;
    pool.owners[slot] = {node, kNobody, 0};
    pool.tickets[slot] = ticket;
    if (trie_.parent(node) == last) {
      ++above->kids;
      ++above->blocked;
    } else {
      add_kid(t, node);
      block_up(t, node);
    }
    above = &page;
    last = node;
  }
  pool.count.filling += static_cast<Slot>(count);
  if (pinned) pool.count.pinned += static_cast<Slot>(count);
}

void Pages::remove_kid(int t, NodeId node) {
  const NodeId parent = trie_.parent(node);
  if (is_root(parent)) return;
  Page& page = at(t, parent);
  // It was colder than what it waited for, so it is the next to go now.
  if (--page.kids == 0 && page.parked()) unpark(t, parent, false);
}

void Pages::adopt_private(int t, NodeId node, Slot slot) {
  --tiers_[t].count.privates;
  adopt_claimed(t, node, slot);
  pin(t, node);
}

void Pages::adopt_claimed(int t, NodeId node, Slot slot) {
  Page& page = at(t, node);
  page.slot = slot;
  set(page, Residency::kReady);
  tiers_[t].owners[slot] = {node, kNobody, 0};
  ++tiers_[t].count.ready;
  add_kid(t, node);
  page.evictable() ? enter(t, node) : block_up(t, node);
}

void Pages::condemn(int t, NodeId node) {
  Page& page = at(t, node);
  if (!page.live()) return;
  if (page.evictable()) leave(t, node, page);
  const bool blocked = page.blocks();
  --(page.ready() ? tiers_[t].count.ready : tiers_[t].count.filling);
  ++tiers_[t].count.draining;
  set(page, Residency::kDraining);
  remove_kid(t, node);
  if (blocked) unblock_up(t, node);
  if (page.pins() == 0 && tiers_[t].tickets[page.slot] == 0) free_page(t, page);
}

Usage Pages::usage(int t) const {
  const Pool& pool = tiers_[t];
  Usage usage = pool.count;
  usage.capacity = pool.capacity;
  usage.free = static_cast<Slot>(pool.free_count);
  usage.filling += usage.privates;
  return usage;
}

}  // namespace kvtier
