#include "catalog/pages.hpp"

#include <algorithm>

namespace kvtier {

Pages::Pages(const Trie& trie, const std::vector<TierSpec>& tiers)
    : trie_(trie), stride_(tiers.size()), pages_(tiers.size() * trie.max_nodes()) {
  std::fill_n(index_, kTiers, -1);
  for (const TierSpec& spec : tiers) {
    index_[static_cast<int>(spec.tier)] = static_cast<int>(tiers_.size());
    Pool& pool = tiers_.emplace_back();
    pool.tier = spec.tier;
    pool.capacity = spec.slots;
    pool.policy = make_policy(spec.policy, trie.max_nodes());
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
    bytes += pool.policy->memory_bytes() + pool.owners.bytes() + pool.tickets.bytes() + pool.free.bytes();
  return bytes;
}

bool Pages::has_page(NodeId node) const {
  const Page* pages = row(node);
  for (int t = 0; t < tiers(); ++t)
    if (pages[t].residency() != Residency::kAbsent) return true;
  return false;
}

bool Pages::pop_free(int t, Slot* slot) {
  Pool& pool = tiers_[t];
  if (pool.free_count == 0) return false;
  *slot = pool.free[--pool.free_count];
  return true;
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

void Pages::leave(int t, NodeId node, Page& page) {
  if (page.parked()) {
    page.word &= ~Page::kParked;
    --tiers_[t].parked;
  } else {
    tiers_[t].policy->remove(node);
  }
}

void Pages::unpark(int t, NodeId node, bool used) {
  at(t, node).word &= ~Page::kParked;
  --tiers_[t].parked;
  used ? tiers_[t].policy->insert(node) : tiers_[t].policy->insert_coldest(node);
}

void Pages::add_kid(int t, NodeId node) {
  const NodeId parent = trie_.parent(node);
  if (!is_root(parent)) ++at(t, parent).kids;
}

void Pages::remove_kid(int t, NodeId node) {
  const NodeId parent = trie_.parent(node);
  if (is_root(parent)) return;
  Page& page = at(t, parent);
  // It was colder than what it waited for, so it is the next to go now.
  if (--page.kids == 0 && page.parked()) unpark(t, parent, false);
}

// `node`'s page began to keep its ancestors' pages in the tier.
void Pages::block_up(int t, NodeId node) {
  for (NodeId parent = trie_.parent(node); !is_root(parent); parent = trie_.parent(parent)) {
    Page& page = at(t, parent);
    const bool was_evictable = page.evictable();
    ++page.blocked;
    if (!was_evictable) return;  // it blocks already, or is not there to block anything
    leave(t, parent, page);
  }
}

// `node`'s page ceased to keep its ancestors' pages. They enter the order after it: a prefix outlives what continues
// it.
void Pages::unblock_up(int t, NodeId node) {
  for (NodeId parent = trie_.parent(node); !is_root(parent); parent = trie_.parent(parent)) {
    Page& page = at(t, parent);
    --page.blocked;
    if (!page.evictable()) return;
    enter(t, parent);
  }
}

void Pages::begin_filling(int t, NodeId node, Slot slot, Ticket ticket) {
  Page& page = at(t, node);
  page.slot = slot;
  set(page, Residency::kFilling);
  tiers_[t].owners[slot] = {node, kNobody, 0};
  tiers_[t].tickets[slot] = ticket;
  ++tiers_[t].count.filling;
  add_kid(t, node);
  block_up(t, node);
}

void Pages::make_ready(int t, NodeId node) {
  Page& page = at(t, node);
  set(page, Residency::kReady);
  --tiers_[t].count.filling;
  ++tiers_[t].count.ready;
  if (!page.evictable()) return;
  enter(t, node);
  unblock_up(t, node);
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

void Pages::settle_filler(int t, NodeId node, bool good) {
  Page& page = at(t, node);
  tiers_[t].tickets[page.slot] = 0;
  if (page.residency() == Residency::kFilling) {
    good ? make_ready(t, node) : condemn(t, node);
  } else if (page.pins() == 0) {  // draining
    free_page(t, page);
  }
}

void Pages::free_page(int t, Page& page) {
  set(page, Residency::kAbsent);
  tiers_[t].owners[page.slot] = {kNoNode, kNobody, 0};
  --tiers_[t].count.draining;
  push_free(t, page.slot);
}

void Pages::first_pin(int t, NodeId node, Page& page) {
  ++tiers_[t].count.pinned;
  if (!page.evictable()) return;
  leave(t, node, page);
  block_up(t, node);
}

void Pages::last_unpin(int t, NodeId node, Page& page) {
  --tiers_[t].count.pinned;
  if (page.evictable()) {
    enter(t, node);
    unblock_up(t, node);
  } else if (page.residency() == Residency::kDraining && tiers_[t].tickets[page.slot] == 0) {
    free_page(t, page);
  }
}

NodeId Pages::victim(int t) {
  Pool& pool = tiers_[t];
  for (;;) {
    const NodeId node = pool.policy->coldest();
    if (node == kNoNode) return kNoNode;
    Page& page = at(t, node);
    if (page.kids == 0) return node;
    pool.policy->remove(node);
    page.word |= Page::kParked;
    ++pool.parked;
  }
}

bool Pages::backed(int t, NodeId node) const {
  const Page* pages = row(node);
  for (int lower = t + 1; lower < tiers(); ++lower)
    if (pages[lower].ready()) return true;
  return false;
}

void Pages::evict(int t, NodeId node) {
  ++(backed(t, node) ? tiers_[t].count.evictions : tiers_[t].count.dropped);
  condemn(t, node);
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
