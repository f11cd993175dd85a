// Residency: which block has a page in which owned tier, in which slot, and who keeps it there.
//
//   absent ──begin_filling──► filling ──make_ready──► ready ──(evicted, dropped)──► absent
//                                └──────condemn──────┴──► draining ──(settled and unpinned)──► absent
//
// A page is *in the order* of its tier's policy exactly when it could be evicted: ready, unpinned, and with no
// continuation in the tier that is filling, pinned or kept by such a one (`blocked` counts those). So the order's
// length is what eviction can really free. A page whose continuations could be evicted too, but come later in the
// order, is *parked* when the scan meets it: it leaves the order until its last continuation went. Each page is parked
// at most once per use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "catalog/policy.hpp"
#include "catalog/trie.hpp"
#include "common/array.hpp"
#include "common/types.hpp"

namespace kvtier {

enum class Residency : std::uint8_t { kAbsent = 0, kFilling = 1, kReady = 2, kDraining = 3 };

struct TierSpec {
  Tier tier;
  Slot slots;
  std::string policy;
};

struct Page {
  Slot slot;
  std::uint32_t word;     // bits 0–1 residency, bit 2 parked, the rest: pins
  std::uint32_t kids;     // children that are filling or ready in this tier
  std::uint32_t blocked;  // children that keep this page from being evicted

  static constexpr std::uint32_t kParked = 4, kPin = 8;
  Residency residency() const { return static_cast<Residency>(word & 3); }
  std::uint32_t pins() const { return word / kPin; }
  bool parked() const { return (word & kParked) != 0; }
  bool ready() const { return residency() == Residency::kReady; }
  bool live() const { return residency() == Residency::kFilling || ready(); }
  bool blocks() const { return residency() == Residency::kFilling || (ready() && (pins() != 0 || blocked != 0)); }
  bool evictable() const { return ready() && pins() == 0 && blocked == 0; }
};

// What one tier's slots are used for. filling counts private slots too: free + filling + ready + draining = capacity.
struct Usage {
  Slot capacity = 0;
  Slot free = 0;
  Slot filling = 0;
  Slot ready = 0;
  Slot draining = 0;
  Slot privates = 0;
  Slot pinned = 0;              // pages with at least one pin
  std::uint64_t evictions = 0;  // evicted pages that a lower owned tier still holds
  std::uint64_t dropped = 0;    // evicted pages that were the last copy
};

class Pages {
 public:
  // Tiers fastest first. `t` below is always an index into them.
  Pages(const Trie& trie, const std::vector<TierSpec>& tiers);

  int tiers() const { return static_cast<int>(tiers_.size()); }
  int index(Tier tier) const { return index_[static_cast<int>(tier)]; }  // -1: not owned
  Tier tier(int t) const { return tiers_[t].tier; }
  const Page& page(int t, NodeId node) const { return pages_[static_cast<std::size_t>(node) * stride_ + t]; }
  const Page* row(NodeId node) const { return &pages_[static_cast<std::size_t>(node) * stride_]; }
  void prefetch(NodeId node) const { __builtin_prefetch(row(node), 1); }
  bool has_page(NodeId node) const;
  Ticket filler(int t, Slot slot) const { return tiers_[t].tickets[slot]; }

  // Slots.
  bool pop_free(int t, Slot* slot);
  std::size_t free_slots(int t) const { return tiers_[t].free_count; }
  void make_private(int t, Slot slot, std::uint32_t lease, std::uint32_t place);
  bool is_private_of(int t, Slot slot, std::uint32_t lease) const { return tiers_[t].owners[slot].lease == lease; }
  std::uint32_t private_place(int t, Slot slot) const { return tiers_[t].owners[slot].place; }
  void set_private_place(int t, Slot slot, std::uint32_t place) { tiers_[t].owners[slot].place = place; }
  void free_private(int t, Slot slot);
  // Takes given free slots out of the free stack; false, and nothing done, when one is not free or named twice.
  bool claim_free(int t, const Slot* slots, std::size_t count);
  void unclaim(int t, Slot slot) { push_free(t, slot); }

  // Transitions. Each keeps the parent's counts and the order right.
  void begin_filling(int t, NodeId node, Slot slot, Ticket ticket);
  void make_ready(int t, NodeId node);                // from filling
  void adopt_private(int t, NodeId node, Slot slot);  // a private slot becomes a ready page with one pin
  void adopt_claimed(int t, NodeId node, Slot slot);  // a claimed slot becomes a ready page
  void condemn(int t, NodeId node);                   // filling or ready → draining; frees what nobody uses
  void settle_filler(int t, NodeId node, bool good);  // the transfer that fills it is done with the page
  void pin(int t, NodeId node) {
    Page& page = at(t, node);
    if (page.pins() == 0) first_pin(t, node, page);
    page.word += Page::kPin;
  }
  void unpin(int t, NodeId node) {
    Page& page = at(t, node);
    page.word -= Page::kPin;
    if (page.pins() == 0) last_unpin(t, node, page);
  }
  void touch(int t, NodeId node) {
    const Page& page = this->page(t, node);
    if (!page.evictable()) return;
    page.parked() ? unpark(t, node, true) : tiers_[t].policy->touch(node);
  }

  // Eviction.
  std::size_t evictable(int t) const { return tiers_[t].policy->size() + tiers_[t].parked; }
  NodeId victim(int t);                   // the next page to go, kNoNode when there is none; parks what must wait
  bool backed(int t, NodeId node) const;  // ready in a lower owned tier
  void evict(int t, NodeId node);         // a page that victim() named
  const Policy& order(int t) const { return *tiers_[t].policy; }

  Usage usage(int t) const;
  std::size_t fillers(int t) const;  // slots that a transfer is filling, counted one by one
  std::size_t memory_bytes() const;
  std::string check(const std::vector<std::uint32_t>& pins) const;  // pins: by node and tier, as holders count them

 private:
  static constexpr std::uint32_t kNobody = 0xFFFFFFFFu;
  struct Owner {
    NodeId node;          // of the page in this slot
    std::uint32_t lease;  // of the private slot
    std::uint32_t place;  // in that lease's list
  };
  struct Pool {
    Tier tier;
    Slot capacity;
    std::unique_ptr<Policy> policy;
    Array<Owner> owners;
    Array<Ticket> tickets;  // the transfer that fills the slot, 0 if none
    Array<Slot> free;       // a stack
    std::size_t free_count;
    std::size_t parked = 0;
    Usage count;
  };

  Page& at(int t, NodeId node) { return pages_[static_cast<std::size_t>(node) * stride_ + t]; }
  static void set(Page& page, Residency residency) {
    page.word = (page.word & ~3u) | static_cast<std::uint32_t>(residency);
  }
  void push_free(int t, Slot slot) { tiers_[t].free[tiers_[t].free_count++] = slot; }
  void enter(int t, NodeId node) { tiers_[t].policy->insert(node); }
  void leave(int t, NodeId node, Page& page);
  void unpark(int t, NodeId node, bool used);
  void first_pin(int t, NodeId node, Page& page);
  void last_unpin(int t, NodeId node, Page& page);
  void add_kid(int t, NodeId node);
  void remove_kid(int t, NodeId node);
  void block_up(int t, NodeId node);
  void unblock_up(int t, NodeId node);
  void free_page(int t, Page& page);
  std::string check_slots(int t) const;
  std::string check_order(int t) const;
  std::string check_pages(int t, const std::vector<std::uint32_t>& pins) const;

  const Trie& trie_;
  std::size_t stride_;
  int index_[kTiers];
  std::vector<Pool> tiers_;
  Array<Page> pages_;
};

}  // namespace kvtier
