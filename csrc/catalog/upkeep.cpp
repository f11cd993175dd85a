// What goes for good, what comes back after a restart, and what may move down.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <unordered_map>

#include "catalog/catalog.hpp"
#include "common/sha256.hpp"

namespace kvtier {
namespace {

// How many pages `cold` looks at for each one that it is asked for: most of a tier may have its copies below already.
constexpr std::uint32_t kPruneRest = 256;

std::string key_of(const std::uint8_t* digest) { return {reinterpret_cast<const char*>(digest), kDigestBytes}; }

}  // namespace

std::size_t Catalog::invalidate(const Digest* space, std::uint64_t generation) {
  std::size_t dropped = 0;
  if (space == nullptr) generation_ = std::max(generation_, generation);
  for (const NodeId root : trie_.root_ids(space)) {
    const std::uint64_t at_least = std::max(generation, trie_.root_of(root).generation);
    const std::vector<NodeId> nodes = trie_.detach(root, at_least);
    for (const NodeId node : nodes) {
      for (int t = 0; t < pages_.tiers(); ++t) {
        dropped += pages_.page(t, node).live();
        pages_.condemn(t, node);
      }
    }
    for (const NodeId node : nodes)
      if (trie_.alive(node)) reap(node);
  }
  return dropped;
}

std::size_t Catalog::drop(Tier tier, Nodes nodes) {
  const int t = owned(tier);
  require_alive("nodes", nodes);
  std::size_t dropped = 0;
  for (const NodeId node : nodes) {
    if (!trie_.alive(node)) continue;  // went with a page dropped before it
    const Page& page = pages_.page(t, node);
    if (!page.ready() || page.pins() != 0) continue;
    pages_.condemn(t, node);
    reap(node);
    ++dropped;
  }
  return dropped;
}

std::size_t Catalog::drop_ahead(Tier tier, Nodes nodes) {
  const int t = owned(tier);
  std::vector<NodeId> left;
  std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(left),
               [&](NodeId node) { return trie_.alive(node) && pages_.page(t, node).early(); });
  return drop(tier, left);
}

Foreseen Catalog::foresee(NodeId root, Labels labels, std::size_t first, std::size_t last, Tier source, bool lost,
                          RequestId request, double now_s, double due_s) {
  trie_.root_of(root);
  const Moment due = moment_of(due_s);
  now_ = std::max(now_, moment_of(now_s));
  Match found;
  find_pages(0, walk(root, labels, SIZE_MAX), &found);
  const int from = pages_.index(source);
  const auto from_source = [&](std::size_t i) { return found.tiers[i] == from; };
  std::size_t reach = 0;
  while (reach < found.hit && !(lost && from_source(reach))) ++reach;
  const Nodes nodes = Nodes(found.nodes).first(reach);
  hold(leases_[leases_.get(request)], nodes);
  Foreseen out;
  for (std::size_t i = first; i < std::min(last, nodes.size()); ++i) {
    out.nodes.push_back(nodes[i]);
    if (due != 0) trie_.need(nodes[i], due, now_);
    if (from_source(i) && found.filling[i] == 0) out.below.push_back(nodes[i]);
  }
  return out;
}

void Catalog::need(Nodes nodes, double now_s, double due_s) {
  const Moment due = moment_of(due_s);
  now_ = std::max(now_, moment_of(now_s));
  for (const NodeId node : nodes) {
    if (trie_.alive(node)) due == 0 ? trie_.need_no_more(node) : trie_.need(node, due, now_);
  }
}

std::vector<NodeId> Catalog::cold(Tier tier, std::size_t count, Tier lower) const {
  const int t = owned(tier), below = owned(lower);
  if (below <= t) throw std::invalid_argument("lower: must be a slower tier than the one asked about");
  std::vector<NodeId> nodes;
  nodes.resize(std::min(count, pages_.order(t).size()));
  nodes.resize(pages_.order(t).coldest(nodes.data(), nodes.size()));
  std::erase_if(nodes, [&](NodeId node) { return pages_.page(below, node).residency() != Residency::kAbsent; });
  std::stable_sort(nodes.begin(), nodes.end(),
                   [&](NodeId a, NodeId b) { return trie_.position(a) < trie_.position(b); });
  return nodes;
}

std::vector<NodeId> Catalog::lacking(Nodes nodes, Tier source, Tier target) const {
  const int from = owned(source), to = owned(target);
  std::vector<NodeId> out;
  out.reserve(nodes.size());
  for (const NodeId node : nodes)
    if (trie_.alive(node) && pages_.page(from, node).residency() == Residency::kReady &&
        pages_.page(to, node).residency() == Residency::kAbsent)
      out.push_back(node);
  return out;
}

std::size_t Catalog::count_ready(Tier tier, Nodes nodes) const {
  const int t = owned(tier);
  const auto ready = [&](NodeId node) { return trie_.alive(node) && pages_.page(t, node).ready(); };
  return static_cast<std::size_t>(std::count_if(nodes.begin(), nodes.end(), ready));
}

// The pool of nodes is full: what lies below a hole can't be reached by a match, so its pages and nodes go.
void Catalog::prune() {
  if (prune_rest_ != 0) {
    --prune_rest_;
    return;
  }
  const std::size_t before = trie_.free_nodes();
  std::vector<NodeId> by_depth;
  for (NodeId node = 0; node < trie_.max_nodes(); ++node)
    if (trie_.alive(node)) by_depth.push_back(node);
  std::sort(by_depth.begin(), by_depth.end(), [&](NodeId a, NodeId b) {
    return trie_.position(a) != trie_.position(b) ? trie_.position(a) < trie_.position(b) : a < b;
  });
  std::vector<bool> reachable(trie_.max_nodes(), false);
  for (const NodeId node : by_depth) {
    const NodeId parent = trie_.parent(node);
    if (!is_root(parent) && !reachable[parent]) continue;
    // A held node may yet get its page.
    reachable[node] = trie_.holds(node) != 0;
    for (int t = 0; t < pages_.tiers(); ++t) reachable[node] = reachable[node] || pages_.page(t, node).live();
  }
  for (std::size_t i = by_depth.size(); i-- > 0;) {
    const NodeId node = by_depth[i];
    if (reachable[node] || !trie_.alive(node)) continue;
    for (int t = 0; t < pages_.tiers(); ++t)
      if (pages_.page(t, node).ready() && pages_.page(t, node).pins() == 0) pages_.condemn(t, node);
    reap(node);
  }
  stats_.nodes_pruned += trie_.free_nodes() - before;
  if (trie_.free_nodes() == before) prune_rest_ = kPruneRest;
}

void Catalog::identities(Nodes nodes, std::uint8_t* out) {
  require_alive("nodes", nodes);
  for (const NodeId node : nodes) {
    trie_.identity(node, out);
    out += identity_bytes(trie_.label_bytes());
  }
}

std::vector<bool> Catalog::restore(Tier tier, Slots slots, const std::uint8_t* identities, std::size_t bytes) {
  const int t = owned(tier);
  const std::size_t size = identity_bytes(trie_.label_bytes());
  if (bytes != slots.size() * size)
    throw std::invalid_argument("identities: " + std::to_string(bytes) + " bytes given; " +
                                std::to_string(slots.size()) + " slots need " + std::to_string(size) + " each");
  if (!pages_.claim_free(t, slots.data(), slots.size()))
    throw std::invalid_argument("slots: each must be a free slot of the tier, named once");
  std::vector<bool> restored(slots.size(), false);
  std::vector<NodeId> nodes(slots.size(), kNoNode);
  std::vector<std::uint32_t> by_depth(slots.size());
  std::vector<PageIdentity> heads(slots.size());
  for (std::uint32_t i = 0; i < slots.size(); ++i) {
    by_depth[i] = i;
    std::memcpy(&heads[i], identities + i * size, kIdentityHead);
  }
  std::stable_sort(by_depth.begin(), by_depth.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return heads[a].position < heads[b].position; });
  // Parents are looked up by digest; also those that were there before.
  std::unordered_map<std::string, NodeId> by_digest;
  for (NodeId node = 0; node < trie_.max_nodes() && !slots.empty(); ++node)
    if (trie_.alive(node) && !trie_.detached(node)) by_digest[key_of(trie_.digest(node))] = node;
  for (const std::uint32_t i : by_depth) nodes[i] = restore_node(heads[i], identities + i * size, &by_digest);

  for (std::size_t i = 0; i < slots.size(); ++i) {  // oldest first, so that the newest is the hottest
    if (nodes[i] == kNoNode || pages_.page(t, nodes[i]).residency() != Residency::kAbsent) {
      pages_.unclaim(t, slots[i]);
      continue;
    }
    pages_.adopt_claimed(t, nodes[i], slots[i]);
    restored[i] = true;
  }
  return restored;
}

// The node that an identity names, made if its parent is there; kNoNode when anything about it does not fit.
NodeId Catalog::restore_node(const PageIdentity& head, const std::uint8_t* identity,
                             std::unordered_map<std::string, NodeId>* by_digest) {
  const std::uint8_t* label = identity + kIdentityHead;
  const std::size_t bytes = trie_.label_bytes();
  for (std::size_t i = bytes; i < identity_bytes(bytes) - kIdentityHead; ++i)
    if (label[i] != 0) return kNoNode;
  std::uint8_t digest[kDigestBytes];
  Sha256().add(head.parent, kDigestBytes).add(label, bytes).finish(digest);
  if (std::memcmp(digest, head.digest, kDigestBytes) != 0) return kNoNode;
  Digest space;
  std::memcpy(space.data(), head.space, space.size());
  NodeId parent;
  if (head.position == 0) {
    if (head.generation < generation_) return kNoNode;
    std::uint8_t start[kDigestBytes];
    Sha256()
        .add("kvtier.root.v1", 14)
        .add(head.space, sizeof head.space)
        .add(&head.group, sizeof head.group)
        .finish(start);
    if (std::memcmp(start, head.parent, kDigestBytes) != 0) return kNoNode;
    parent = trie_.find_root(space, head.group);
    if (parent == kNoNode && !trie_.has_room_for_root()) return kNoNode;
    if (parent == kNoNode) parent = trie_.root(space, head.group, head.generation);
    if (trie_.root_of(parent).generation != head.generation) return kNoNode;
  } else {
    const auto found = by_digest->find(key_of(head.parent));
    if (found == by_digest->end()) return kNoNode;
    parent = found->second;
    const Root& root = trie_.root_of_node(parent);
    if (root.space != space || root.group != head.group || root.generation != head.generation ||
        trie_.position(parent) + 1 != head.position)
      return kNoNode;
  }
  NodeId node;
  if (trie_.walk(parent, label, 1, &node) == 0 && trie_.create(parent, label, 1, &node) == 0) return kNoNode;
  (*by_digest)[key_of(digest)] = node;
  return node;
}

void Catalog::state(Nodes nodes, Slot* slots, std::uint8_t* residency) const {
  std::fill_n(slots, nodes.size() * kTiers, kNoSlot);
  std::fill_n(residency, nodes.size() * kTiers, 0);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!trie_.alive(nodes[i])) continue;  // a node may end with the last word of a transfer: it has no page anywhere
    for (int t = 0; t < pages_.tiers(); ++t) {
      const Page& page = pages_.page(t, nodes[i]);
      const std::size_t at = i * kTiers + static_cast<std::size_t>(pages_.tier(t));
      residency[at] = static_cast<std::uint8_t>(page.residency());
      if (page.residency() != Residency::kAbsent) slots[at] = page.slot;
    }
  }
}

Contents Catalog::contents(Tier tier) const {
  const int t = owned(tier);
  Contents contents;
  for (Slot slot = 0; slot < pages_.usage(t).capacity; ++slot) {
    const NodeId node = pages_.in_slot(t, slot);
    if (node == kNoNode) continue;
    contents.slots.push_back(slot);
    contents.nodes.push_back(node);
    contents.ready.push_back(pages_.page(t, node).ready());
  }
  return contents;
}

CatalogStats Catalog::stats() const {
  CatalogStats stats = stats_;
  stats.nodes = trie_.max_nodes() - trie_.free_nodes();
  stats.max_nodes = trie_.max_nodes();
  stats.roots = trie_.root_count();
  stats.leases = leases_.size();
  stats.transfers = transfers_.size();
  return stats;
}

}  // namespace kvtier
