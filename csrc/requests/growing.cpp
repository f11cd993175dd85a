#include "requests/growing.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvtier {

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

std::size_t block_size_of(const Catalog& catalog) {
  const std::size_t bytes = catalog.label_bytes();
  if (bytes <= kDigestBytes)
    throw std::invalid_argument("content: this catalog's labels of " + std::to_string(bytes) + " bytes are not of it");
  return (bytes - kDigestBytes) / sizeof(std::uint32_t);
}

std::vector<std::uint8_t> labels_of(const Catalog& catalog, const Content& content, std::size_t first,
                                    std::size_t last) {
  const std::size_t block_size = block_size_of(catalog);
  content.require_whole(first, last, block_size);
  std::vector<std::uint8_t> out((last - first) * catalog.label_bytes());
  content.labels(first, last, block_size, out.data());
  return out;
}

std::vector<NodeId> extend(Catalog& catalog, Tier tier, std::span<const Computed> computed) {
  std::vector<NodeId> fresh;
  for (const Computed& part : computed) {
    Growing& growing = *part.growing;
    std::optional<NodeId> parent = growing.leaf;
    if (!parent && part.root && catalog.knows_root(*part.root)) parent = part.root;
    const std::size_t first = growing.cached;
    if (part.blocks > first && parent) {
      const std::span<const Slot> table(growing.table);
      if (part.blocks > table.size()) throw std::invalid_argument("table: it has fewer slots than blocks are computed");
      const std::vector<std::uint8_t> labels = labels_of(catalog, growing.content, first, part.blocks);
      const Extension made =
          catalog.extend(*parent, labels, tier, table.subspan(first, part.blocks - first), growing.request);
      growing.joined(made.nodes);
      fresh.insert(fresh.end(), made.fresh.begin(), made.fresh.end());
    }
    if (growing.cached < part.blocks) growing.noted = growing.cached;  // the others will be offered again
  }
  return fresh;
}

void Step::run(std::span<Advance> parts) {
  for (Advance& part : parts) {
    part.had = part.growing->content.size();
    part.growing->content.append(part.made);
  }
  for (Advance& part : parts) {
    std::vector<Slot>& table = part.growing->table;
    const std::size_t needed = blocks(part.growing->content.size());
    if (needed <= table.size()) continue;
    const std::vector<Slot> slots = catalog_.take(tier_, needed - table.size(), part.growing->request);
    table.insert(table.end(), slots.begin(), slots.end());
    part.grown = slots.size();
    part.lacks_room = slots.empty();
  }
  for (Advance& part : parts) {
    const std::size_t full = part.had / block_;
    const std::size_t known = std::max(part.growing->noted, part.growing->cached);
    if (full <= known || !part.growing->cacheable) continue;
    part.completed = full - known;
    part.growing->noted = full;
  }
}

}  // namespace kvtier
