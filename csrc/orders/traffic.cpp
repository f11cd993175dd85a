#include "orders/traffic.hpp"

#include <algorithm>

namespace kvtier {

void Traffic::begun(Ticket ticket, std::span<const Tier> path, std::span<const NodeId> nodes, Priority priority,
                    double now) {
  costs_.submitted(ticket, path, nodes.size(), priority, now);
  under_way_.try_emplace(ticket, UnderWay{{path.begin(), path.end()}, {nodes.begin(), nodes.end()}});
}

std::optional<bool> Traffic::settle(const Completion& done, std::vector<NodeId>* below) {
  const auto* words = reinterpret_cast<const std::uint8_t*>(done.status.data());
  catalog_.settle(done.ticket, {words, done.status.size()}, static_cast<std::size_t>(done.hop_count), done.count);
  const auto found = under_way_.find(done.ticket);
  if (found == under_way_.end()) return std::nullopt;
  UnderWay& transfer = found->second;
  const bool whole = done.whole();
  if (!done.final) {
    // What still runs may write its slots at any time: nobody may have them before it has ended.
    catalog_.cancel(done.ticket);
    hanging_ += transfer.hangs ? 0 : 1;
    transfer.hangs = true;
    return whole;
  }
  costs_.completed(done);
  count(transfer, done);
  if (transfer.path[0] == Tier::kDevice) {
    for (std::size_t page = 0; page < std::min<std::size_t>(done.count, transfer.nodes.size()); ++page)
      if (done.status[page] == PageStatus::kOk) below->push_back(transfer.nodes[page]);
  }
  hanging_ -= transfer.hangs ? 1 : 0;
  under_way_.erase(found);
  return whole;
}

void Traffic::count(const UnderWay& transfer, const Completion& done) {
  for (std::size_t hop = 0; hop + 1 < transfer.path.size() && hop < static_cast<std::size_t>(done.hop_count); ++hop) {
    const std::optional<Lane> lane = lane_between(transfer.path[hop], transfer.path[hop + 1]);
    for (std::size_t page = 0; page < done.count; ++page) {
      const PageStatus status = done.status[hop * done.count + page];
      if (status == PageStatus::kOk) {
        if (lane) ++moved_[index_of(*lane)];
      } else if (status != PageStatus::kSkipped) {
        ++failures_[static_cast<int>(status)];
        disk_offline_ |= status == PageStatus::kOffline;
      }
    }
  }
}

bool Traffic::moves(std::span<const Tier> path) const {
  return std::any_of(under_way_.begin(), under_way_.end(), [path](const auto& entry) {
    return !entry.second.hangs &&
           std::equal(path.begin(), path.end(), entry.second.path.begin(), entry.second.path.end());
  });
}

}  // namespace kvtier
