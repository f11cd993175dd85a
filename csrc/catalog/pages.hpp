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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
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
  bool keeps_last = true;  // what is brought ahead takes the place of no page here that is a last copy
};

struct Page {
  Slot slot;
  std::uint32_t word;     // bits 0–1 residency, bit 2 parked, bit 3 cold, bit 4 early, the rest: pins
  std::uint32_t kids;     // children that are filling or ready in this tier
  std::uint32_t blocked;  // children that keep this page from being evicted

  // kEarly: it was brought before anybody asked for it, and nobody has used it since.
  static constexpr std::uint32_t kParked = 4, kCold = 8, kEarly = 16, kPin = 32;
  Residency residency() const { return static_cast<Residency>(word & 3); }
  std::uint32_t pins() const { return word / kPin; }
  bool parked() const { return (word & kParked) != 0; }
  bool early() const { return (word & kEarly) != 0; }
  bool ready() const { return residency() == Residency::kReady; }
  bool live() const { return residency() == Residency::kFilling || ready(); }
  bool blocks() const { return residency() == Residency::kFilling || (ready() && (pins() != 0 || blocked != 0)); }
  bool evictable() const {
    return (word & ~(kParked | kEarly)) == static_cast<std::uint32_t>(Residency::kReady) && blocked == 0;
  }
};

// For what is brought before anybody asked for it, and will be needed `by` then; 0: some time.
struct Ahead {
  Moment by = 0;
  Moment now = 0;
  bool spares(Moment needed) const { return needed != 0 && needed >= now && (by == 0 || needed <= by); }
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
  bool has_page(NodeId node) const {
    const Page* pages = row(node);
    bool found = false;
    for (std::size_t t = 0; t < stride_; ++t) found |= pages[t].residency() != Residency::kAbsent;
    return found;
  }
  Ticket filler(int t, Slot slot) const { return tiers_[t].tickets[slot]; }
  NodeId in_slot(int t, Slot slot) const { return tiers_[t].owners[slot].node; }  // kNoNode: no page

  // Slots.
  Slot pop_free(int t) { return tiers_[t].free[--tiers_[t].free_count]; }  // there is one
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
  void make_ready(int t, NodeId node);                // from filling
  void adopt_private(int t, NodeId node, Slot slot);  // a private slot becomes a ready page with one pin
  void adopt_claimed(int t, NodeId node, Slot slot);  // a claimed slot becomes a ready page
  void condemn(int t, NodeId node);                   // filling or ready → draining; frees what nobody uses
  void settle_filler(int t, NodeId node, bool good);  // the transfer that fills it is done with the page
  void pin(int t, NodeId node) { pin(t, &node, 1); }

  // The same for the pages of many nodes: the first first, or where it ends a use the last first, so that the beginning
  // of a chain is the last to go. Any nodes will do; made for chains, where each is the child of the one before.
  void pin(int t, const NodeId* nodes, std::size_t count);
  // No use of the pages: they were cold and will be again, unless others pin them too.
  void pin_cold(int t, const NodeId* nodes, std::size_t count);
  // Absent pages begin to fill, each in a free slot, told in `slots`; there are enough. With one pin if `pinned`;
  // `early`: before anybody asked for them.
  void begin_filling(int t, const NodeId* nodes, std::size_t count, Ticket ticket, bool pinned, bool early,
                     Slot* slots);
  // gone(node) is called after each page that went with its last pin, or its filler.
  template <class Gone>
  void unpin(int t, const NodeId* nodes, std::size_t count, Gone&& gone);
  template <class Gone>
  void settle_fillers(int t, const NodeId* nodes, std::size_t count, Gone&& gone);  // all went well
  void used(int t, NodeId node) { at(t, node).word &= ~Page::kEarly; }
  void touch(int t, NodeId node) {
    used(t, node);
    const Page& page = this->page(t, node);
    if (!page.evictable()) return;
    page.parked() ? unpark(t, node, true) : tiers_[t].order.touch(node);
  }

  // Eviction.
  std::size_t evictable(int t) const { return tiers_[t].order.size() + tiers_[t].parked; }
  // Frees the slots of the `count` pages that are next to go, and calls gone(node) after each. Fewer when there are no
  // more. For what is brought `ahead` only pages go that are not needed sooner and, where the tier keeps last copies,
  // that are ready in a lower owned tier too: fewer when the next one is not such a one. Returns how many.
  template <class Gone>
  std::size_t evict(int t, std::size_t count, const Ahead* ahead, Gone&& gone);
  const EvictionOrder& order(int t) const { return tiers_[t].order; }

  Usage usage(int t) const;
  std::size_t fillers(int t) const;  // slots that a transfer is filling, counted one by one
  std::size_t memory_bytes() const;
  std::string check(const std::vector<std::uint32_t>& pins) const;  // pins: by node and tier, as holders count them

 private:
  static constexpr std::uint32_t kNobody = 0xFFFFFFFFu;
  static constexpr std::size_t kAhead = 16;  // how far ahead of evictions what they touch is fetched
  struct Owner {
    NodeId node;          // of the page in this slot
    std::uint32_t lease;  // of the private slot
    std::uint32_t place;  // in that lease's list
  };
  struct Pool {
    explicit Pool(std::unique_ptr<Policy> policy) : order(std::move(policy)) {}
    Tier tier;
    Slot capacity;
    bool keeps_last;
    EvictionOrder order;
    Array<Owner> owners;
    Array<Ticket> tickets;  // the transfer that fills the slot, 0 if none
    Array<Slot> free;       // a stack
    std::size_t free_count;
    std::size_t parked = 0;
    Usage count;
  };

  // Pages on their way into the order, told to it many at a time.
  class Entering {
   public:
    explicit Entering(EvictionOrder& order) : order_(order) {}
    ~Entering() { tell(); }
    Entering(const Entering&) = delete;
    Entering& operator=(const Entering&) = delete;
    void add(NodeId page) {
      pages_[count_++] = page;
      if (count_ == kMost) tell();
    }

   private:
    static constexpr std::size_t kMost = 64;
    void tell() { order_.insert(pages_, std::exchange(count_, 0)); }

    EvictionOrder& order_;
    std::size_t count_ = 0;
    NodeId pages_[kMost];
  };

  Page& at(int t, NodeId node) { return pages_[static_cast<std::size_t>(node) * stride_ + t]; }
  static void set(Page& page, Residency residency) {
    page.word = (page.word & ~3u) | static_cast<std::uint32_t>(residency);
  }
  void push_free(int t, Slot slot) { tiers_[t].free[tiers_[t].free_count++] = slot; }
  void enter(int t, NodeId node) { tiers_[t].order.insert(node); }
  void leave(int t, NodeId node, Page& page) {
    if (!page.parked()) {
      tiers_[t].order.remove(node);
    } else {
      page.word &= ~Page::kParked;
      --tiers_[t].parked;
    }
  }
  void park(int t, NodeId node) {  // a page that was taken out of the order and waits for its continuations
    at(t, node).word |= Page::kParked;
    ++tiers_[t].parked;
  }
  void unpark(int t, NodeId node, bool used);
  void first_pin(int t, NodeId node, Page& page) {
    ++tiers_[t].count.pinned;
    if (!page.evictable()) return;
    leave(t, node, page);
    block_up(t, node);
  }
  bool backed(int t, NodeId node) const {  // ready in a lower owned tier
    const Page* pages = row(node);
    bool found = false;
    for (int lower = t + 1; lower < tiers(); ++lower) found |= pages[lower].ready();
    return found;
  }
  NodeId evict_popped(int t, NodeId node, bool below);
  void add_kid(int t, NodeId node) {
    const NodeId parent = trie_.parent(node);
    if (!is_root(parent)) ++at(t, parent).kids;
  }
  void remove_kid(int t, NodeId node);
  // `node`'s page began to keep its ancestors' pages in the tier.
  void block_up(int t, NodeId node) {
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
  void unblock_up(int t, NodeId node, Entering& entering) {
    for (NodeId parent = trie_.parent(node); !is_root(parent); parent = trie_.parent(parent)) {
      Page& page = at(t, parent);
      --page.blocked;
      if (!page.evictable()) return;
      entering.add(parent);
    }
  }
  void unblock_up(int t, NodeId node) {
    Entering entering(tiers_[t].order);
    unblock_up(t, node, entering);
  }
  void free_page(int t, Page& page) {
    --tiers_[t].count.draining;
    free_slot(t, page);
  }
  void free_slot(int t, Page& page) {
    set(page, Residency::kAbsent);
    page.word &= ~Page::kEarly;
    tiers_[t].owners[page.slot] = {kNoNode, kNobody, 0};
    push_free(t, page.slot);
  }
  std::string check_slots(int t) const;
  std::string check_order(int t) const;
  std::string check_pages(int t, const std::vector<std::uint32_t>& pins) const;

  const Trie& trie_;
  std::size_t stride_;
  int index_[kTiers];
  std::vector<Pool> tiers_;
  Array<Page> pages_;
};

inline void Pages::make_ready(int t, NodeId node) {
  Page& page = at(t, node);
  set(page, Residency::kReady);
  --tiers_[t].count.filling;
  ++tiers_[t].count.ready;
  if (!page.evictable()) return;
  enter(t, node);
  unblock_up(t, node);
}

inline void Pages::settle_filler(int t, NodeId node, bool good) {
  Page& page = at(t, node);
  tiers_[t].tickets[page.slot] = 0;
  if (page.residency() == Residency::kFilling) {
    good ? make_ready(t, node) : condemn(t, node);
  } else if (page.pins() == 0) {  // draining
    free_page(t, page);
  }
}

template <class Gone>
void Pages::unpin(int t, const NodeId* nodes, std::size_t count, Gone&& gone) {
  Pool& pool = tiers_[t];
  Entering entering(pool.order);
  for (std::size_t i = count; i-- > 0;) {
    const NodeId node = nodes[i];
    Page& page = at(t, node);
    page.word -= Page::kPin;
    if (page.pins() != 0) continue;
    --pool.count.pinned;
    const bool cold = (page.word & Page::kCold) != 0;
    page.word &= ~Page::kCold;
    if (page.evictable()) {
      cold ? pool.order.insert_coldest(node) : entering.add(node);
      unblock_up(t, node, entering);
    } else if (page.residency() == Residency::kDraining && pool.tickets[page.slot] == 0) {
      free_page(t, page);
      gone(node);
    }
  }
}

template <class Gone>
void Pages::settle_fillers(int t, const NodeId* nodes, std::size_t count, Gone&& gone) {
  Pool& pool = tiers_[t];
  Entering entering(pool.order);
  for (std::size_t i = count; i-- > 0;) {
    const NodeId node = nodes[i];
    Page& page = at(t, node);
    pool.tickets[page.slot] = 0;
    if (page.residency() == Residency::kFilling) {
      set(page, Residency::kReady);
      --pool.count.filling;
      ++pool.count.ready;
      if (!page.evictable()) continue;
      entering.add(node);
      unblock_up(t, node, entering);
    } else if (page.pins() == 0) {  // draining
      free_page(t, page);
      gone(node);
    }
  }
}

// Answers the parent when it was parked and has nothing to wait for any more: it was colder than what it waited for, so
// it is the next to go.
inline NodeId Pages::evict_popped(int t, NodeId node, bool below) {
  Pool& pool = tiers_[t];
  ++(below ? pool.count.evictions : pool.count.dropped);
  --pool.count.ready;
  free_slot(t, at(t, node));
  const NodeId parent = trie_.parent(node);
  if (is_root(parent)) return kNoNode;
  Page& above = at(t, parent);
  if (--above.kids != 0 || !above.parked()) return kNoNode;
  leave(t, parent, above);
  return parent;
}

template <class Gone>
std::size_t Pages::evict(int t, std::size_t count, const Ahead* ahead, Gone&& gone) {
  constexpr std::size_t kBatch = 256;
  Pool& pool = tiers_[t];
  NodeId batch[kBatch];
  std::size_t evicted = 0;
  while (evicted < count) {
    std::size_t popped = pool.order.pop_coldest(batch, std::min(kBatch, count - evicted));
    if (popped == 0) break;
    for (std::size_t i = 0; i < std::min(popped, kAhead); ++i) prefetch(batch[i]), trie_.prefetch(batch[i]);
    for (std::size_t i = 0; i < popped; ++i) {
      if (i + kAhead < popped) prefetch(batch[i + kAhead]), trie_.prefetch(batch[i + kAhead]);
      NodeId node = batch[i];
      if (at(t, node).kids != 0) {
        park(t, node);
        continue;
      }
      while (node != kNoNode) {  // and what was parked until this one went
        const bool below = backed(t, node);
        const bool last = pool.keeps_last && !below;
        const bool stays = ahead != nullptr && (last || ahead->spares(trie_.needed(node)));
        if (evicted == count || stays) {  // what need not go is the coldest again
          while (popped > i + 1) pool.order.insert_coldest(batch[--popped]);
          pool.order.insert_coldest(node);
          return evicted;
        }
        const NodeId next = evict_popped(t, node, below);
        ++evicted;
        gone(node);
        node = next;
      }
    }
  }
  return evicted;
}

}  // namespace kvtier
