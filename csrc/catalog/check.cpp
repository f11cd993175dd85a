// Proof of what must always hold, computed anew from what the holders say. Linear in everything; for tests and
// diagnosis.
#include <string>
#include <unordered_map>

#include "catalog/catalog.hpp"

namespace kvtier {
namespace {

std::string name(const char* what, std::uint64_t number) { return std::string(what) + " " + std::to_string(number); }

// What keeps a page from being evicted, in words.
const char* keeper(const Page& page) {
  if (page.pins() != 0) return "it is pinned";
  if (!page.ready()) return "it is not ready";
  return page.blocked != 0 ? "it has a continuation that stays" : "it is parked";
}

}  // namespace

std::string Catalog::check() const {
  std::string wrong = trie_.check();
  if (!wrong.empty()) return wrong;
  const std::size_t nodes = trie_.max_nodes();
  std::vector<std::uint32_t> pins(nodes * static_cast<std::size_t>(pages_.tiers()), 0), holds(nodes, 0);
  if (wrong = check_leases(&pins, &holds); !wrong.empty()) return wrong;
  if (wrong = check_transfers(&pins); !wrong.empty()) return wrong;
  if (wrong = pages_.check(pins); !wrong.empty()) return wrong;
  for (NodeId node = 0; node < nodes; ++node) {
    if (!trie_.alive(node)) {
      if (pages_.has_page(node)) return name("dead node", node) + " has a page";
      continue;
    }
    if (trie_.holds(node) != holds[node]) return name("node", node) + " is held by others than the leases that say so";
    if (trie_.children(node) == 0 && holds[node] == 0 && !pages_.has_page(node))
      return name("node", node) + " lives for nothing";
    for (int t = 0; t < pages_.tiers() && trie_.detached(node); ++t)
      if (pages_.page(t, node).live()) return name("node", node) + " was invalidated and still has a live page";
  }
  return {};
}

std::string Catalog::check_leases(std::vector<std::uint32_t>* pins, std::vector<std::uint32_t>* holds) const {
  const auto tiers = static_cast<std::size_t>(pages_.tiers());
  std::vector<std::size_t> privates(tiers, 0);
  std::size_t known = 0;
  for (std::uint32_t index = 0; index < leases_.entries(); ++index) {
    const Lease& lease = leases_[index];
    if (lease.request == 0) continue;
    ++known;
    if (leases_.find(lease.request) != index) return name("lease of request", lease.request) + " is not found";
    for (const Pins* held : {&lease.promise.pages, &lease.promise.loads, &lease.adopted}) {
      if (held->nodes.size() != held->tiers.size())
        return name("lease of request", lease.request) + " has ragged lists";
      for (std::size_t i = 0; i < held->nodes.size(); ++i) ++(*pins)[held->nodes[i] * tiers + held->tiers[i]];
    }
    for (const NodeId node : lease.holds) ++(*holds)[node];
    for (std::size_t t = 0; t < tiers; ++t) {
      privates[t] += lease.privates[t].size();
      for (std::size_t i = 0; i < lease.privates[t].size(); ++i) {
        const Slot slot = lease.privates[t][i];
        if (!pages_.is_private_of(static_cast<int>(t), slot, index) ||
            pages_.private_place(static_cast<int>(t), slot) != i)
          return name("private slot", slot) + name(" of request", lease.request) + " is not known as such";
      }
    }
  }
  if (known != leases_.size()) return "leases are not all found by their request";
  for (std::size_t t = 0; t < tiers; ++t)
    if (privates[t] != pages_.usage(static_cast<int>(t)).privates) return "private slots exist that no lease owns";
  return {};
}

std::string Catalog::check_transfers(std::vector<std::uint32_t>* pins) const {
  const auto tiers = static_cast<std::size_t>(pages_.tiers());
  std::size_t open = 0;
  std::vector<std::size_t> filled(tiers, 0);
  for (const OpenTransfer& transfer : transfers_.all()) {
    if (transfer.ticket == 0) continue;
    ++open;
    std::size_t pending = 0;
    for (std::size_t i = 0; i < transfer.count(); ++i) {
      const NodeId node = transfer.nodes[i];
      bool settled = true;
      for (std::size_t hop = 0; hop < transfer.hops(); ++hop) {
        if (transfer.status[hop * transfer.count() + i] != PageStatus::kPending) continue;
        settled = false;
        ++pending;
        const int t = pages_.index(transfer.path[hop + 1]);
        if (t < 0) continue;
        const Page& page = pages_.page(t, node);
        if (page.residency() != Residency::kFilling && page.residency() != Residency::kDraining)
          return name("ticket", transfer.ticket) + name(" still fills the page of node", node) +
                 (page.ready() ? ", which is ready already" : ", whose slot was freed");
        if (pages_.filler(t, page.slot) != transfer.ticket)
          return name("ticket", transfer.ticket) + " fills a slot of another";
        ++filled[static_cast<std::size_t>(t)];
      }
      for (std::size_t hop = 0; hop < transfer.hops() && !settled; ++hop) {
        const int t = pages_.index(transfer.path[hop]);
        if (t >= 0) ++(*pins)[node * tiers + static_cast<std::size_t>(t)];
      }
    }
    if (pending != transfer.pending)
      return name("ticket", transfer.ticket) + name(" counts", transfer.pending) + " settlements to come, and" +
             name("", pending) + " are: one was taken twice or not at all";
    if (pending == 0) return name("ticket", transfer.ticket) + " has nothing pending and is still open";
  }
  if (open != transfers_.size()) return "transfers in use and free do not add up";
  for (std::size_t t = 0; t < tiers; ++t)
    if (filled[t] != pages_.fillers(static_cast<int>(t))) return "a slot is being filled by a ticket that is not open";
  return {};
}

std::size_t Pages::fillers(int t) const {
  std::size_t count = 0;
  for (Slot slot = 0; slot < tiers_[t].capacity; ++slot) count += tiers_[t].tickets[slot] != 0;
  return count;
}

std::string Pages::check(const std::vector<std::uint32_t>& pins) const {
  for (int t = 0; t < tiers(); ++t) {
    std::string wrong = check_slots(t);
    if (wrong.empty()) wrong = check_pages(t, pins);
    if (wrong.empty()) wrong = check_order(t);
    if (!wrong.empty()) return name("tier", static_cast<std::uint64_t>(tiers_[t].tier)) + ": " + wrong;
  }
  return {};
}

std::string Pages::check_slots(int t) const {
  const Pool& pool = tiers_[t];
  const Usage use = usage(t);
  if (use.free + use.filling + use.ready + use.draining != use.capacity)
    return "free + filling + ready + draining is not the capacity";
  std::vector<bool> free(pool.capacity, false);
  for (std::size_t i = 0; i < pool.free_count; ++i) {
    if (free[pool.free[i]]) return name("slot", pool.free[i]) + " is free twice";
    free[pool.free[i]] = true;
  }
  Slot privates = 0;
  for (Slot slot = 0; slot < pool.capacity; ++slot) {
    const Owner& owner = pool.owners[slot];
    const bool is_private = owner.lease != kNobody, is_page = owner.node != kNoNode;
    privates += is_private;
    if (is_private + is_page + free[slot] != 1) return name("slot", slot) + " has not exactly one owner";
    if (!is_page && pool.tickets[slot] != 0) return name("slot", slot) + " is being filled and holds no page";
    if (!is_page) continue;
    const Page& page = this->page(t, owner.node);
    if (page.residency() == Residency::kAbsent || page.slot != slot)
      return name("slot", slot) + " is not the one its page names";
  }
  if (privates != use.privates) return "private slots are miscounted";
  return {};
}

std::string Pages::check_pages(int t, const std::vector<std::uint32_t>& pins) const {
  const Pool& pool = tiers_[t];
  const NodeId nodes = trie_.max_nodes();
  std::vector<std::uint32_t> kids(nodes, 0), blocked(nodes, 0);
  Slot by_residency[4] = {}, pinned = 0;
  std::size_t parked = 0;
  for (NodeId node = 0; node < nodes; ++node) {
    const Page& page = this->page(t, node);
    ++by_residency[static_cast<int>(page.residency())];
    if (page.pins() != pins[static_cast<std::size_t>(node) * stride_ + t])
      return name("page of node", node) + " has " + name("pins:", page.pins()) +
             name(", holders count", pins[static_cast<std::size_t>(node) * stride_ + t]);
    if (page.pins() != 0 && page.residency() == Residency::kAbsent)
      return name("absent page of node", node) + " is pinned";
    pinned += page.pins() != 0;
    parked += page.parked();
    if (page.parked() && (!page.evictable() || page.kids == 0))
      return name("page of node", node) + " is parked for nothing";
    if (page.residency() == Residency::kFilling && pool.tickets[page.slot] == 0)
      return name("page of node", node) + " is filled by nobody";
    if (page.ready() && pool.tickets[page.slot] != 0) return name("page of node", node) + " is ready and being filled";
    if (page.residency() == Residency::kDraining && page.pins() == 0 && pool.tickets[page.slot] == 0)
      return name("page of node", node) + " drains for nobody";
    if (page.residency() == Residency::kAbsent || is_root(trie_.parent(node))) continue;
    kids[trie_.parent(node)] += page.live();
    blocked[trie_.parent(node)] += page.blocks();
  }
  for (NodeId node = 0; node < nodes; ++node) {
    if (page(t, node).kids != kids[node]) return name("page of node", node) + " miscounts its continuations";
    if (page(t, node).blocked != blocked[node]) return name("page of node", node) + " miscounts what keeps it";
  }
  const Usage use = usage(t);
  if (by_residency[1] + use.privates != use.filling || by_residency[2] != use.ready || by_residency[3] != use.draining)
    return "pages by residency are miscounted";
  if (pinned != use.pinned) return "pinned pages are miscounted";
  if (parked != pool.parked) return "parked pages are miscounted";
  return {};
}

std::string Pages::check_order(int t) const {
  const EvictionOrder& order = tiers_[t].order;
  std::vector<bool> seen(trie_.max_nodes(), false);
  std::size_t length = 0, evictable = 0;
  NodeId first = kNoNode;
  order.coldest(&first, 1);
  for (NodeId node = first; node != kNoNode; node = order.hotter(node)) {
    if (seen[node] || ++length > order.size()) return "the order runs in a circle";
    seen[node] = true;
    if (!page(t, node).evictable() || page(t, node).parked())
      return name("page of node", node) + " is in the order of eviction and must not go: " + keeper(page(t, node));
  }
  for (NodeId node = 0; node < trie_.max_nodes(); ++node) {
    evictable += page(t, node).evictable();
    if (page(t, node).evictable() && !page(t, node).parked() && !seen[node])
      return name("page of node", node) + " can go and is not in the order";
  }
  if (length != order.size() || evictable != this->evictable(t)) return "evictable pages are miscounted";
  return {};
}

}  // namespace kvtier
