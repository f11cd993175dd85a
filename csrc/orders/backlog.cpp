#include "orders/backlog.hpp"

#include <algorithm>

namespace kvtier {

// By what is under way and not by when it should end: of a lane that hangs, or has become slow, that would be now.
std::size_t Backlog::room(Lane lane) const {
  const auto speed = costs_.lane_speed(lane);
  const double bytes = kMostSeconds * (speed ? speed->second : kUnknownBytesPerSecond);
  const double pages = std::min(bytes / static_cast<double>(costs_.page_bytes()), 1e9);
  const std::size_t most = std::max<std::size_t>(1, static_cast<std::size_t>(pages));
  const std::size_t under_way = lanes_[index_of(lane)].under_way;
  return most > under_way ? most - under_way : 0;
}

void Backlog::remember(Lane lane, std::span<const NodeId> nodes) {
  std::deque<NodeId>& waiting = at(lane).nodes;
  waiting.insert(waiting.end(), nodes.begin(), nodes.end());
  if (waiting.size() > kMostPages)
    waiting.erase(waiting.begin(), waiting.end() - static_cast<std::ptrdiff_t>(kMostPages));
}

std::vector<NodeId> Backlog::take(Lane lane, std::size_t most) {
  std::deque<NodeId>& waiting = at(lane).nodes;
  const auto end = waiting.begin() + static_cast<std::ptrdiff_t>(std::min({waiting.size(), most, room(lane)}));
  std::vector<NodeId> next(waiting.begin(), end);
  waiting.erase(waiting.begin(), end);
  return next;
}

}  // namespace kvtier
