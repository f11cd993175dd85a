// The catalog: what is cached where, for whom it is kept, and what goes when room is needed. It decides and never
// touches a page's bytes.
//
// Protocol, for one request, all on one thread:
//   root → match (leases what it promises) → take and reserve (slots; reserve names a ticket) → the data plane runs the
//   ticket → settle → narrow (what really arrived) → … the engine computes … → insert, adopt (full blocks) → release.
// Completions may be late, repeated, partial or reordered. Bad arguments throw std::invalid_argument before anything is
// changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "catalog/leases.hpp"
#include "catalog/pages.hpp"
#include "catalog/transfers.hpp"
#include "catalog/trie.hpp"

namespace kvtier {

// A chain, as match cuts it:   0 ........ start ............ hit ............ blocks asked for
//                              | engine's  | leased, loadable | to be computed  |
struct Match {
  std::uint32_t hit = 0;            // 0, or start and what follows it without a break
  std::vector<NodeId> nodes;        // of the blocks [start, hit); so are all below
  std::vector<std::uint8_t> tiers;  // the fastest ready one, pinned
  std::vector<Slot> slots;          // in that tier
  std::vector<Ticket> filling;      // the transfer that fills a still faster tier, or 0
};

// A chain that goes on in a request's private slots.
struct Extension {
  std::vector<NodeId> nodes;  // of its blocks, from the first
  std::vector<NodeId> fresh;  // those of them whose pages are new in the tier
};

// What there is of a chain that will be asked for.
struct Foreseen {
  std::vector<NodeId> nodes;  // of its blocks that were looked for
  std::vector<NodeId> below;  // those of them whose fastest page is in the tier asked about, and which nobody brings up
};

struct Reservation {
  Ticket ticket = 0;        // 0 when count is 0
  std::size_t count = 0;    // how many of the nodes, from the first
  std::vector<Slot> slots;  // [path][count]; kNoSlot in tiers that are not owned
};

// The pages of one tier, in the order of their slots.
struct Contents {
  std::vector<Slot> slots;
  std::vector<NodeId> nodes;
  std::vector<bool> ready;
};

struct CatalogStats {
  std::uint64_t matches = 0;
  std::uint64_t blocks_asked = 0;
  std::uint64_t blocks_hit = 0;
  std::uint64_t settled_late = 0;  // words about a ticket that is closed
  std::uint64_t pages_lost = 0;    // sources that a transfer found bad
  std::uint64_t nodes_pruned = 0;  // unreachable nodes that went because the node pool was full
  std::size_t nodes = 0;
  std::size_t max_nodes = 0;
  std::size_t roots = 0;
  std::size_t leases = 0;
  std::size_t transfers = 0;
};

class Catalog {
 public:
  using Nodes = std::span<const NodeId>;
  using Slots = std::span<const Slot>;
  using Labels = std::span<const std::uint8_t>;  // count × label_bytes

  Catalog(const std::vector<TierSpec>& tiers, std::size_t label_bytes, NodeId max_nodes);

  // catalog.cpp
  NodeId root(const Digest& space, std::uint32_t group, std::uint64_t generation);
  Match match(Nodes roots, Labels labels, std::uint32_t start, RequestId request, std::size_t limit);
  std::vector<std::uint32_t> peek(Nodes roots,
                                  Labels labels);  // [kTiers]: blocks of the hit prefix by fastest ready tier
  std::vector<NodeId> insert(NodeId parent, Labels labels, RequestId request);
  std::vector<bool> adopt(Tier tier, Nodes nodes, Slots slots, RequestId request);
  // Both at once: the first of `slots` become the pages of the chain below `parent`, as far as it can be made.
  Extension extend(NodeId parent, Labels labels, Tier tier, Slots slots, RequestId request);
  std::vector<Slot> take(Tier tier, std::size_t count, RequestId request);
  void give_back(Tier tier, Slots slots, RequestId request);
  std::uint32_t narrow(RequestId request, Tier tier);
  void hold_in(RequestId request, Tier tier);
  bool release(RequestId request);
  // The nodes that the one keeps alive and the pages that come for it are the other's from now on. It may hold no more.
  void hand_over(RequestId from, RequestId into);

  // exchange.cpp: pages on their way between tiers
  // ahead: for what nobody has asked for yet, and will be needed by `due_s`; 0: some time.
  Reservation reserve(std::span<const Tier> path, Nodes nodes, RequestId request, bool ahead, bool cold,
                      double due_s = 0);
  bool settle(Ticket ticket, std::span<const std::uint8_t> status, std::size_t hops, std::size_t count);
  bool settle_whole(Ticket ticket);  // with kOk for every page on every hop
  bool cancel(Ticket ticket);

  // upkeep.cpp: what goes, what comes back, what may move down
  std::size_t invalidate(const Digest* space, std::uint64_t generation);
  std::size_t drop(Tier tier, Nodes nodes);
  // Those that were brought ahead and that nobody has used since; some of the nodes may have ended.
  std::size_t drop_ahead(Tier tier, Nodes nodes);
  // Of the chain's cached prefix the blocks [first, last), kept alive for the request, their pages free to go, but not
  // for what is needed later than `due_s`; 0: for whatever. Where `source` is lost, its pages end the prefix.
  Foreseen foresee(NodeId root, Labels labels, std::size_t first, std::size_t last, Tier source, bool lost,
                   RequestId request, double now_s = 0, double due_s = 0);
  void need(Nodes nodes, double now_s, double due_s);  // of those that there are still; 0: nobody does any more
  std::vector<NodeId> cold(Tier tier, std::size_t count, Tier lower) const;
  std::vector<NodeId> lacking(Nodes nodes, Tier source, Tier target) const;  // ready in `source`, absent in `target`
  std::size_t count_ready(Tier tier, Nodes nodes) const;                     // some of the nodes may have ended
  std::vector<bool> restore(Tier tier, Slots slots, const std::uint8_t* identities, std::size_t bytes);
  void identities(Nodes nodes, std::uint8_t* out);
  void state(Nodes nodes, Slot* slots, std::uint8_t* residency) const;  // [count][kTiers] each

  std::size_t evictable(Tier tier) const { return pages_.evictable(owned(tier)); }
  bool has_room(Tier tier, std::size_t slots) const {
    return slots <= pages_.free_slots(owned(tier)) + pages_.evictable(owned(tier));
  }
  Usage usage(Tier tier) const { return pages_.usage(owned(tier)); }
  Contents contents(Tier tier) const;
  CatalogStats stats() const;
  std::size_t memory_bytes() const { return trie_.memory_bytes() + pages_.memory_bytes(); }
  std::size_t label_bytes() const { return trie_.label_bytes(); }
  bool knows_root(NodeId id) const { return trie_.knows_root(id); }  // an empty one goes where another needs its place
  std::string check() const;  // check.cpp: empty, or the first broken promise found

 private:
  static constexpr std::size_t kPagesAhead = 16;  // how far ahead of the work on a chain its pages are fetched

  int owned(Tier tier) const;  // index, or throws
  void require_alive(const char* what, Nodes nodes) const;
  NodeId the_root(Nodes roots) const;
  std::size_t count_labels(Labels labels) const;
  int fastest(NodeId node) const;
  std::size_t walk(NodeId root, Labels labels, std::size_t limit);  // into path_

  void make_room(int t, std::size_t slots, const Ahead* ahead);  // evicts what is missing, as far as it goes
  void reap(NodeId node) {                                       // and its ancestors, as far as nothing keeps them
    if (trie_.bare(node) && !pages_.has_page(node)) reap_pageless(node);
  }
  void reap_pageless(NodeId node);
  void prune();

  void hold(Lease& lease, Nodes nodes);  // the rest of a chain that it may hold the beginning of
  bool find_pages(std::size_t start, std::size_t found, Match* match) const;
  bool promise_pages(std::size_t start, std::size_t found, Match* match, Promise* promise);
  void let_go(Pins& pins);
  void unpin(int t, Nodes nodes) {  // and what nothing keeps any more
    pages_.unpin(t, nodes.data(), nodes.size(), [this](NodeId node) { reap(node); });
  }
  void require_private(int t, Slots slots, std::uint32_t lease);
  void forget_private(Lease& lease, int t, Slot slot);
  bool leases_node(const Lease& lease, NodeId node) const;

  struct Run {
    std::size_t length = 0;  // nodes, from the first
    bool cut = false;        // by one that can't be moved
  };
  Run movable(std::span<const Tier> path, Nodes nodes) const;
  std::size_t reserve_run(std::span<const Tier> path, Nodes nodes, const Ahead* ahead, bool cold,
                          OpenTransfer* transfer, std::uint32_t lease, Slot* slots, std::size_t stride);
  NodeId restore_node(const PageIdentity& head, const std::uint8_t* identity,
                      std::unordered_map<std::string, NodeId>* by_digest);
  void settle_fillers(const OpenTransfer& transfer, const int* t);
  void settle_pages(OpenTransfer& transfer, const int* t, std::span<const std::uint8_t> status);
  bool settle_hop(OpenTransfer& transfer, const int* t, std::size_t hop, std::size_t i, PageStatus now);

  std::string check_leases(std::vector<std::uint32_t>* pins, std::vector<std::uint32_t>* holds) const;
  std::string check_transfers(std::vector<std::uint32_t>* pins) const;

  Trie trie_;
  Pages pages_;
  Leases leases_;
  Transfers transfers_;
  std::vector<NodeId> path_;      // of the walk under way
  std::uint64_t generation_ = 0;  // no namespace is older
  Moment now_ = 0;                // when somebody foresaw something last
  std::uint32_t prune_rest_ = 0;  // inserts that don't try to prune, after one that found nothing
  CatalogStats stats_;
};

}  // namespace kvtier
