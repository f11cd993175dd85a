#include "requests/growing.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "requests/labels.hpp"

namespace kvtier {
namespace {

// Where what it has computed goes: below its last node, or else its root.
std::optional<NodeId> parent_of(const Catalog& catalog, const Computed& part) {
  if (part.growing->leaf) return part.growing->leaf;
  return part.root && catalog.knows_root(*part.root) ? part.root : std::nullopt;
}

void require_computed(const Computed& part, std::size_t block_size) {
  const Growing& growing = *part.growing;
  if (part.blocks > growing.table.size())
    throw std::invalid_argument("table: it has fewer slots than blocks are computed");
  growing.content.require_whole(growing.cached, part.blocks, block_size);
}

}  // namespace

std::vector<NodeId> extend(Catalog& catalog, Tier tier, std::span<const Computed> computed) {
  for (const Computed& part : computed)
    if (part.blocks > part.growing->cached && parent_of(catalog, part)) require_computed(part, block_size_of(catalog));
  std::vector<NodeId> fresh;
  for (const Computed& part : computed) {
    Growing& growing = *part.growing;
    const std::optional<NodeId> parent = parent_of(catalog, part);
    const std::size_t first = growing.cached;
    if (part.blocks > first && parent) {
      const std::span<const Slot> slots = std::span(growing.table).subspan(first, part.blocks - first);
      const std::vector<std::uint8_t> labels = labels_of(catalog, growing.content, first, part.blocks);
      const Extension made = catalog.extend(*parent, labels, tier, slots, growing.request);
      growing.joined(made.nodes);
      fresh.insert(fresh.end(), made.fresh.begin(), made.fresh.end());
    }
    if (growing.cached < part.blocks) growing.noted = growing.cached;  // the others will be offered again
  }
  return fresh;
}

std::string Step::wrong_with(const Advance& part) const {
  const std::size_t had = part.growing->content.size(), covered = part.growing->table.size() * block_;
  if (had > covered)
    return "the " + std::to_string(had) + " tokens before them are computed in slots; the request's cover " +
           std::to_string(covered);
  const std::size_t has = had + part.made.size(), slots = catalog_.usage(tier_).capacity;
  if (blocks(has) > slots)
    return std::to_string(has) + " with those before them need " + std::to_string(blocks(has)) +
           " device slots; there are " + std::to_string(slots);
  return {};
}

void Step::take(Advance& part) {
  Growing& growing = *part.growing;
  part.had = growing.content.size();
  const std::size_t needed = blocks(part.had + part.made.size());
  if (needed <= growing.table.size()) return;
  const std::vector<Slot> slots = catalog_.take(tier_, needed - growing.table.size(), growing.request);
  growing.table.insert(growing.table.end(), slots.begin(), slots.end());
  part.grown = slots.size();
  part.lacks_room = slots.empty();
}

void Step::give_back(Advance& part) {
  std::vector<Slot>& table = part.growing->table;
  const std::size_t kept = table.size() - std::exchange(part.grown, 0);
  catalog_.give_back(tier_, std::span(table).subspan(kept), part.growing->request);
  table.resize(kept);
}

void Step::run(std::span<Advance> parts) {
  try {
    for (Advance& part : parts) take(part);
  } catch (...) {
    for (Advance& part : parts) give_back(part);
    throw;
  }
  for (Advance& part : parts) part.growing->content.append(part.made);
  for (Advance& part : parts) {
    const std::size_t full = part.had / block_;
    const std::size_t known = std::max(part.growing->noted, part.growing->cached);
    if (full <= known || !part.growing->cacheable) continue;
    part.completed = full - known;
    part.growing->noted = full;
  }
}

}  // namespace kvtier
