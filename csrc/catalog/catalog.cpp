// A request's side of the catalog: match, insert, take and adopt, narrow, hold_in and release.
#include "catalog/catalog.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvtier {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::vector<TierSpec> checked(const std::vector<TierSpec>& tiers) {
  if (tiers.empty()) refuse("tiers: none given; the catalog needs at least one owned tier");
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    if (static_cast<int>(tiers[i].tier) >= kTiers)
      refuse("tiers: unknown tier " + std::to_string(static_cast<int>(tiers[i].tier)));
    if (i > 0 && tiers[i].tier <= tiers[i - 1].tier) refuse("tiers: must be listed once each, fastest first");
    if (tiers[i].slots == 0 || tiers[i].slots >= kRootBit)
      refuse("slots: " + std::to_string(tiers[i].slots) + " is out of range; 1 to 2147483647 are accepted");
  }
  return tiers;
}

std::size_t checked_label(std::size_t bytes) {
  if (bytes == 0 || bytes % 4 != 0 || bytes > (1u << 20))
    refuse("block_size: labels of " + std::to_string(bytes) + " bytes are out of range; 4 to 1048576 are accepted");
  return bytes;
}

NodeId checked_nodes(const std::vector<TierSpec>& tiers, NodeId max_nodes) {
  std::size_t slots = 0;
  for (const TierSpec& spec : tiers) slots += spec.slots;
  if (max_nodes <= slots || max_nodes > (1u << 30))
    refuse("max_nodes: " + std::to_string(max_nodes) + " is out of range; more than the " + std::to_string(slots) +
           " slots of all tiers and at most 1073741824 are accepted");
  return max_nodes;
}

}  // namespace

Catalog::Catalog(const std::vector<TierSpec>& tiers, std::size_t label_bytes, NodeId max_nodes)
    : trie_(checked_label(label_bytes), checked_nodes(checked(tiers), max_nodes)), pages_(trie_, tiers) {}

int Catalog::owned(Tier tier) const {
  const int number = static_cast<int>(tier);
  const int t = number < kTiers ? pages_.index(tier) : -1;
  if (t < 0)
    refuse("tier: " + std::string(number < kTiers ? tier_name(tier) : "an unknown tier") +
           " is not owned by this catalog");
  return t;
}

void Catalog::require_alive(const char* what, Nodes nodes) const {
  for (std::size_t i = 0; i < nodes.size(); ++i)
    if (!trie_.alive(nodes[i]))
      refuse(std::string(what) + "[" + std::to_string(i) + "]: " + std::to_string(nodes[i]) +
             " is not a node of this catalog");
}

NodeId Catalog::the_root(Nodes roots) const {
  if (roots.empty()) refuse("roots: none given; one root is needed");
  if (roots.size() > 1) refuse("roots: groups other than one full-attention group are not supported yet");
  trie_.root_of(roots[0]);
  return roots[0];
}

std::size_t Catalog::count_labels(Labels labels) const {
  if (labels.size() % trie_.label_bytes() != 0)
    refuse("labels: " + std::to_string(labels.size()) + " bytes are not whole blocks of " +
           std::to_string(trie_.label_bytes()) + " bytes; cut the trailing partial block");
  return labels.size() / trie_.label_bytes();
}

NodeId Catalog::root(const Digest& space, std::uint32_t group, std::uint64_t generation) {
  const NodeId id = trie_.root(space, group, std::max(generation, generation_));
  // Whoever names a newer generation knows of an invalidation that the catalog has not heard of: nothing older may
  // stay.
  if (trie_.root_of(id).generation < generation) invalidate(&space, generation);
  return id;
}

int Catalog::fastest(NodeId node) const {
  const Page* pages = pages_.row(node);
  for (int t = 0; t < pages_.tiers(); ++t)
    if (pages[t].ready()) return t;
  return -1;
}

std::size_t Catalog::walk(NodeId root, Labels labels, std::size_t limit) {
  const std::size_t count = std::min(count_labels(labels), limit);
  if (path_.size() < count) path_.resize(count);
  return trie_.walk(root, labels.data(), count, path_.data());
}

// The blocks [start, found) of the walked path, as far as they are ready somewhere; their tiers are indices. True: some
// are also ready in a tier below the one that serves them.
bool Catalog::find_pages(std::size_t start, std::size_t found, Match* match) const {
  const std::size_t most = found - start;
  const NodeId* const nodes = path_.data() + start;
  match->tiers.resize(most);
  match->slots.resize(most);
  match->filling.resize(most);
  std::uint8_t* const served_by = match->tiers.data();
  Slot* const slots = match->slots.data();
  const int tiers = pages_.tiers();
  bool copies = false;
  std::size_t count = 0;
  for (; count < most; ++count) {
    if (count + kPagesAhead < most) pages_.prefetch(nodes[count + kPagesAhead]);
    const Page* row = pages_.row(nodes[count]);
    int t = 0;
    for (; t < tiers && !row[t].ready(); ++t) {
      if (row[t].residency() == Residency::kFilling && match->filling[count] == 0)
        match->filling[count] = pages_.filler(t, row[t].slot);
    }
    if (t == tiers) break;
    for (int lower = t + 1; lower < tiers; ++lower) copies |= row[lower].ready();
    served_by[count] = static_cast<std::uint8_t>(t);
    slots[count] = row[t].slot;
  }
  match->nodes.assign(nodes, nodes + count);
  match->tiers.resize(count);
  match->slots.resize(count);
  match->filling.resize(count);
  match->hit = static_cast<std::uint32_t>(start + count);
  return copies;
}

// The same, pinned where they are found.
bool Catalog::promise_pages(std::size_t start, std::size_t found, Match* match, Promise* promise) {
  const bool copies = find_pages(start, found, match);
  promise->pages = {match->nodes, match->tiers};
  std::uint8_t* const served_by = match->tiers.data();
  for (std::size_t first = 0, end = 0; first < match->nodes.size(); first = end) {  // a run of one tier at a time
    const std::uint8_t t = served_by[first];
    while (end < match->nodes.size() && served_by[end] == t) ++end;
    pages_.pin(t, match->nodes.data() + first, end - first);
    std::fill(served_by + first, served_by + end, static_cast<std::uint8_t>(pages_.tier(t)));
  }
  return copies;
}

void Catalog::let_go(Pins& pins) {
  std::size_t end = pins.nodes.size();
  while (end > 0) {  // the last run of one tier first
    const std::uint8_t t = pins.tiers[end - 1];
    std::size_t first = end - 1;
    while (first > 0 && pins.tiers[first - 1] == t) --first;
    unpin(t, Nodes(pins.nodes).subspan(first, end - first));
    end = first;
  }
  pins.clear();
}

Match Catalog::match(Nodes roots, Labels labels, std::uint32_t start, RequestId request, std::size_t limit) {
  const NodeId root = the_root(roots);
  const std::size_t asked = count_labels(labels);
  if (start > asked)
    refuse("start: " + std::to_string(start) + " is beyond the " + std::to_string(asked) + " blocks of labels");
  Lease& lease = leases_[leases_.get(request)];
  // The walk comes first and what an earlier match held goes after the new pins: nothing is lost in between.
  const std::size_t found = walk(root, labels, limit);
  Match match;
  Promise before;
  if (!lease.promise.pages.empty() || !lease.promise.loads.empty()) std::swap(lease.promise, before);
  const bool copies = found >= start && promise_pages(start, found, &match, &lease.promise);
  // Tail first, so that a prefix always outlives its continuations. What was pinned is touched when it is let go.
  const bool touches = copies || start != 0;
  for (std::size_t i = match.hit; i-- > 0;) {
    for (int t = 0; t < pages_.tiers(); ++t) touches ? pages_.touch(t, path_[i]) : pages_.used(t, path_[i]);
  }
  let_go(before.pages);
  let_go(before.loads);
  ++stats_.matches;
  stats_.blocks_asked += asked;
  stats_.blocks_hit += match.hit;
  return match;
}

std::vector<std::uint32_t> Catalog::peek(Nodes roots, Labels labels) {
  std::vector<std::uint32_t> counts(kTiers, 0);
  const std::size_t found = walk(the_root(roots), labels, SIZE_MAX);
  for (std::size_t i = 0; i < found; ++i) {
    const int t = fastest(path_[i]);
    if (t < 0) break;
    ++counts[static_cast<int>(pages_.tier(t))];
  }
  return counts;
}

bool Catalog::leases_node(const Lease& lease, NodeId node) const {
  // The last of a list is what is asked for nearly always.
  const auto holds = [node](const std::vector<NodeId>& list) {
    return std::find(list.rbegin(), list.rend(), node) != list.rend();
  };
  return holds(lease.holds) || holds(lease.promise.pages.nodes) || holds(lease.adopted.nodes) ||
         holds(lease.promise.loads.nodes);
}

void Catalog::hold(Lease& lease, Nodes nodes) {
  if (nodes.empty()) return;
  // A request that inserts its chain again, longer, does not hold its beginning twice.
  const std::size_t held = lease.holds.size();
  std::size_t from = 0, shift = held == 0 ? 0 : trie_.position(nodes[0]) - trie_.position(lease.holds[0]);
  while (from < nodes.size() && shift < held && lease.holds[shift] == nodes[from]) ++from, ++shift;
  const Nodes fresh = nodes.subspan(from);
  for (const NodeId node : fresh) trie_.hold(node);
  lease.holds.insert(lease.holds.end(), fresh.begin(), fresh.end());
}

std::vector<NodeId> Catalog::insert(NodeId parent, Labels labels, RequestId request) {
  const std::size_t count = count_labels(labels);
  if (is_root(parent)) {
    trie_.root_of(parent);
  } else {
    const std::uint32_t known = leases_.find(request);
    if (!trie_.alive(parent) || known == Leases::kNone || !leases_node(leases_[known], parent))
      refuse("parent: " + std::to_string(parent) + " is neither a root nor leased by request " +
             std::to_string(request));
  }
  Lease& lease = leases_[leases_.get(request)];
  std::vector<NodeId> nodes(count);
  const std::size_t found = trie_.walk(parent, labels.data(), count, nodes.data());
  hold(lease, Nodes(nodes).first(found));
  if (trie_.free_nodes() < count - found) prune();
  const NodeId last = found == 0 ? parent : nodes[found - 1];
  const std::size_t made =
      found + trie_.create(last, labels.data() + found * trie_.label_bytes(), count - found, nodes.data() + found);
  hold(lease, Nodes(nodes).subspan(found, made - found));
  nodes.resize(made);
  return nodes;
}

void Catalog::require_private(int t, Slots slots, std::uint32_t lease) {
  // Places are marked while they are checked, so that a slot named twice is seen without another table.
  constexpr std::uint32_t kMark = 0x80000000u;
  std::size_t good = 0;
  for (; good < slots.size(); ++good) {
    const Slot slot = slots[good];
    if (slot >= pages_.usage(t).capacity || lease == Leases::kNone || !pages_.is_private_of(t, slot, lease)) break;
    const std::uint32_t place = pages_.private_place(t, slot);
    if ((place & kMark) != 0) break;
    pages_.set_private_place(t, slot, place | kMark);
  }
  for (std::size_t i = 0; i < good; ++i)
    pages_.set_private_place(t, slots[i], pages_.private_place(t, slots[i]) & ~kMark);
  if (good < slots.size())
    refuse("slots[" + std::to_string(good) + "]: " + std::to_string(slots[good]) +
           " is not a private slot of this request, or is named twice");
}

void Catalog::forget_private(Lease& lease, int t, Slot slot) {
  const std::uint32_t place = pages_.private_place(t, slot);
  const Slot last = lease.privates[t].back();
  lease.privates[t][place] = last;
  pages_.set_private_place(t, last, place);
  lease.privates[t].pop_back();
}

std::vector<bool> Catalog::adopt(Tier tier, Nodes nodes, Slots slots, RequestId request) {
  const int t = owned(tier);
  if (nodes.size() != slots.size())
    refuse("slots: " + std::to_string(slots.size()) + " given for " + std::to_string(nodes.size()) +
           " nodes; one each is needed");
  require_alive("nodes", nodes);
  const std::uint32_t lease = leases_.find(request);
  require_private(t, slots, lease);
  std::vector<bool> adopted(nodes.size(), false);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (pages_.page(t, nodes[i]).residency() != Residency::kAbsent || trie_.detached(nodes[i])) continue;
    forget_private(leases_[lease], t, slots[i]);
    pages_.adopt_private(t, nodes[i], slots[i]);
    leases_[lease].adopted.add({&nodes[i], 1}, static_cast<std::uint8_t>(t));
    adopted[i] = true;
  }
  return adopted;
}

Extension Catalog::extend(NodeId parent, Labels labels, Tier tier, Slots slots, RequestId request) {
  if (count_labels(labels) != slots.size())
    refuse("slots: " + std::to_string(slots.size()) + " given for " + std::to_string(count_labels(labels)) +
           " blocks; one each is needed");
  require_private(owned(tier), slots, leases_.find(request));
  Extension out{insert(parent, labels, request), {}};
  const std::vector<bool> adopted = adopt(tier, out.nodes, slots.first(out.nodes.size()), request);
  for (std::size_t i = 0; i < out.nodes.size(); ++i)
    if (adopted[i]) out.fresh.push_back(out.nodes[i]);
  return out;
}

std::vector<Slot> Catalog::take(Tier tier, std::size_t count, RequestId request) {
  const int t = owned(tier);
  const std::uint32_t lease = leases_.get(request);
  std::vector<Slot> slots;
  const std::size_t free = pages_.free_slots(t);
  // All or nothing: nobody's page is evicted for a call that then fails.
  if (count > free + pages_.evictable(t)) return slots;
  make_room(t, count, nullptr);
  std::vector<Slot>& privates = leases_[lease].privates[t];
  slots.resize(count);
  for (Slot& slot : slots) {
    slot = pages_.pop_free(t);
    pages_.make_private(t, slot, lease, static_cast<std::uint32_t>(privates.size()));
    privates.push_back(slot);
  }
  return slots;
}

void Catalog::give_back(Tier tier, Slots slots, RequestId request) {
  const int t = owned(tier);
  const std::uint32_t lease = leases_.find(request);
  require_private(t, slots, lease);
  for (std::size_t i = slots.size(); i-- > 0;) {
    forget_private(leases_[lease], t, slots[i]);
    pages_.free_private(t, slots[i]);
  }
}

std::uint32_t Catalog::narrow(RequestId request, Tier tier) {
  const int t = owned(tier);
  const std::uint32_t index = leases_.find(request);
  if (index == Leases::kNone) return 0;
  Lease& lease = leases_[index];
  Promise before;
  std::swap(lease.promise, before);
  const Nodes promised = before.pages.nodes;
  const std::vector<std::uint8_t>& tiers = before.pages.tiers;
  std::size_t count = 0;
  while (count < promised.size() && pages_.page(t, promised[count]).ready()) ++count;
  // A pin that is there already stays: the match's own in this tier, or that of the load which brought the page.
  std::size_t loads = 0;
  Pins other;
  for (std::size_t first = 0, end = 0; first < count; first = end) {  // a run of one tier at a time
    while (end < count && tiers[end] == tiers[first]) ++end;
    if (tiers[first] == t) continue;
    const Nodes run = promised.subspan(first, end - first);
    if (before.loads.holds(loads, run, static_cast<std::uint8_t>(t))) {
      loads += run.size();
    } else {
      pages_.pin(t, run.data(), run.size());
    }
    other.add(run, tiers[first]);
  }
  for (std::size_t i = count; i < promised.size(); ++i) other.add(promised.subspan(i, 1), tiers[i]);
  let_go(other);
  before.loads.drop_first(loads);
  let_go(before.loads);
  lease.promise.pages.add(promised.first(count), static_cast<std::uint8_t>(t));
  return static_cast<std::uint32_t>(count);
}

void Catalog::hold_in(RequestId request, Tier tier) {
  const auto t = static_cast<std::uint8_t>(owned(tier));
  const std::uint32_t index = leases_.find(request);
  if (index == Leases::kNone) return;
  Pins& pages = leases_[index].promise.pages;
  Pins other;
  for (std::size_t i = 0; i < pages.nodes.size(); ++i) {
    if (pages.tiers[i] == t || !pages_.page(t, pages.nodes[i]).ready()) continue;
    pages_.pin(t, &pages.nodes[i], 1);
    other.add({&pages.nodes[i], 1}, pages.tiers[i]);
    pages.tiers[i] = t;
  }
  let_go(other);
}

void Catalog::hand_over(RequestId from, RequestId into) {
  const std::uint32_t index = leases_.find(from);
  if (index == Leases::kNone || from == into) return;
  const auto has_more = [](const Lease& lease) {
    return !lease.promise.pages.empty() || !lease.adopted.empty() ||
           std::any_of(lease.privates.begin(), lease.privates.end(), [](const auto& slots) { return !slots.empty(); });
  };
  if (has_more(leases_[index]))
    refuse("source: request " + std::to_string(from) + " holds slots, or was promised pages; it can only be released");
  const std::uint32_t heir = leases_.get(into);
  Lease &lease = leases_[index], &other = leases_[heir];
  Pins &loads = lease.promise.loads, &others = other.promise.loads;
  others.nodes.reserve(others.nodes.size() + loads.nodes.size());  // what needs memory, before anything has changed
  others.tiers.reserve(others.tiers.size() + loads.tiers.size());
  hold(other, lease.holds);  // once, however many handed the same over
  for (const NodeId node : lease.holds) trie_.unhold(node);
  lease.holds.clear();
  others.nodes.insert(others.nodes.end(), loads.nodes.begin(), loads.nodes.end());
  others.tiers.insert(others.tiers.end(), loads.tiers.begin(), loads.tiers.end());
  loads.clear();
  leases_.erase(index);
}

bool Catalog::release(RequestId request) {
  const std::uint32_t index = leases_.find(request);
  if (index == Leases::kNone) return false;
  Lease& lease = leases_[index];
  for (int t = 0; t < pages_.tiers(); ++t) {
    for (std::size_t i = lease.privates[t].size(); i-- > 0;) pages_.free_private(t, lease.privates[t][i]);
    lease.privates[t].clear();
  }
  // What was computed last lies deepest in the chain: it goes first, so that the beginning is used last.
  let_go(lease.adopted);
  let_go(lease.promise.pages);
  let_go(lease.promise.loads);
  for (std::size_t i = lease.holds.size(); i-- > 0;) {
    trie_.unhold(lease.holds[i]);
    reap(lease.holds[i]);
  }
  lease.holds.clear();
  leases_.erase(index);
  return true;
}

}  // namespace kvtier
