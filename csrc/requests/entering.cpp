#include "requests/entering.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "requests/labels.hpp"

namespace kvtier {
namespace {

std::optional<NodeId> root_of(Catalog& catalog, const Digest& space, std::uint64_t generation) {
  try {
    return catalog.root(space, 0, generation);
  } catch (const std::overflow_error&) {
    return std::nullopt;
  }
}

}  // namespace

Match find(Catalog& catalog, const Digest& space, std::uint64_t generation, Growing& growing, std::size_t limit) {
  const std::size_t tokens = growing.content.size();
  const std::size_t blocks = tokens == 0 ? 0 : (tokens - 1) / block_size_of(catalog);
  const std::optional<NodeId> root = root_of(catalog, space, generation);
  growing.cacheable = root.has_value();
  if (!root) return {};
  return catalog.match({&*root, 1}, labels_of(catalog, growing.content, 0, blocks), 0, growing.request, limit);
}

bool give_first(Catalog& catalog, Tier tier, Growing& growing, std::size_t blocks) {
  const std::vector<Slot> slots = catalog.take(tier, blocks, growing.request);
  if (slots.size() < blocks) return false;
  growing.table = slots;
  growing.cached = 0;
  return true;
}

}  // namespace kvtier
