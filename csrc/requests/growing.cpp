#include "requests/growing.hpp"

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
    part.completed = full > part.growing->noted;
    if (part.completed) part.growing->noted = full;
  }
}

}  // namespace kvtier
