#include "orders/traffic.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

namespace kvtier {
namespace {

std::optional<Lane> store_along(std::span<const Tier> path) {
  const std::optional<Lane> lane = lane_between(path[0], path[1]);
  return lane && is_store(*lane) ? lane : std::nullopt;
}

}  // namespace

void Traffic::begun(Ticket ticket, std::span<const Tier> path, std::span<const NodeId> nodes, Priority priority,
                    double now) {
  const auto [place, is_new] = under_way_.try_emplace(ticket);
  if (!is_new) throw std::invalid_argument("ticket: " + std::to_string(ticket) + " is under way; accepted: a new one");
  try {
    place->second.path.assign(path.begin(), path.end());
    place->second.nodes.assign(nodes.begin(), nodes.end());
    if (priority == Priority::kBackground && path.size() == 2) place->second.store = store_along(path);
    costs_.submitted(ticket, path, nodes.size(), priority, now);
  } catch (...) {
    under_way_.erase(place);
    throw;
  }
  if (place->second.store) backlog_.begun(*place->second.store, nodes.size());
}

void Traffic::note_end(const UnderWay& transfer) {
  if (transfer.store) backlog_.ended(*transfer.store, transfer.nodes.size());
}

std::size_t Traffic::store_room(std::span<const Tier> path) const {
  const std::optional<Lane> lane = store_along(path);
  return lane ? backlog_.room(*lane) : SIZE_MAX;
}

void Traffic::put_off(std::span<const Tier> path, std::span<const NodeId> nodes) {
  const std::optional<Lane> lane = store_along(path);
  if (!lane) return;
  backlog_.count(nodes.size());
  backlog_.remember(*lane, nodes);
}

std::vector<NodeId> Traffic::take_put_off(std::span<const Tier> path, std::size_t most) {
  const std::optional<Lane> lane = store_along(path);
  return lane ? backlog_.take(*lane, most) : std::vector<NodeId>{};
}

std::vector<Ticket> Traffic::give_way(std::span<const Tier> path, std::size_t pages) {
  std::vector<Ticket> latest;
  for (const auto& [ticket, transfer] : under_way_) {
    const bool waits = transfer.store && transfer.store == store_along(path);
    if (waits && !transfer.hangs && !transfer.gives_way) latest.push_back(ticket);
  }
  std::sort(latest.begin(), latest.end(), std::greater<>());
  std::size_t count = 0;
  for (std::size_t gained = 0; count < latest.size() && gained < pages; ++count) {
    UnderWay& transfer = under_way_.at(latest[count]);
    transfer.gives_way = true;
    gained += transfer.nodes.size();
    backlog_.remember(*transfer.store, transfer.nodes);
  }
  latest.resize(count);
  return latest;
}

void Traffic::refuse(Ticket ticket) {
  const auto found = under_way_.find(ticket);
  if (found == under_way_.end()) return;
  refused_ += found->second.nodes.size();
  costs_.forget(ticket);
  note_end(found->second);
  under_way_.erase(found);
}

void Traffic::check(const UnderWay& transfer, const Completion& done, bool whole) const {
  const std::size_t hops = transfer.path.size() - 1, pages = transfer.nodes.size();
  const auto refuse = [&](const std::string& why) { throw std::invalid_argument("status: " + why); };
  if (static_cast<std::size_t>(done.hop_count) != hops || done.count != pages)
    refuse(std::to_string(done.hop_count) + " hops of " + std::to_string(done.count) + " pages; accepted: ticket " +
           std::to_string(done.ticket) + "'s own, " + std::to_string(hops) + " of " + std::to_string(pages));
  if (whole || !done.final) return;
  const auto pending = std::count(done.status.begin(), done.status.end(), PageStatus::kPending);
  if (pending != 0)
    refuse(std::to_string(pending) + " of " + std::to_string(done.status.size()) + " of ticket " +
           std::to_string(done.ticket) + " are PENDING; accepted where the word is not final");
}

void Traffic::settle(const Completion& done) {
  const auto* words = reinterpret_cast<const std::uint8_t*>(done.status.data());
  const bool whole = done.whole();
  const auto found = under_way_.find(done.ticket);
  const bool known = found != under_way_.end();
  if (known) {
    check(found->second, done, whole);
    ended_.reserve(ended_.size() + 1), below_.reserve(below_.size() + done.count);
  }
  catalog_.settle(done.ticket, {words, done.status.size()}, static_cast<std::size_t>(done.hop_count), done.count);
  if (!known) return;
  UnderWay& transfer = found->second;
  ended_.push_back({done.ticket, whole});
  if (!done.final) {
    // What still runs may write its slots at any time: nobody may have them before it has ended.
    catalog_.cancel(done.ticket);
    hanging_ += transfer.hangs ? 0 : 1;
    transfer.hangs = true;
    return;
  }
  costs_.completed(done);
  count(transfer, done);
  if (transfer.path[0] == Tier::kDevice) {
    for (std::size_t page = 0; page < done.count; ++page)
      if (done.status[page] == PageStatus::kOk) below_.push_back(transfer.nodes[page]);
  }
  hanging_ -= transfer.hangs ? 1 : 0;
  note_end(transfer);
  under_way_.erase(found);
}

void Traffic::count(const UnderWay& transfer, const Completion& done) {
  for (std::size_t hop = 0; hop + 1 < transfer.path.size(); ++hop) {
    const std::optional<Lane> lane = lane_between(transfer.path[hop], transfer.path[hop + 1]);
    for (std::size_t page = 0; page < done.count; ++page) {
      const PageStatus status = done.status[hop * done.count + page];
      if (status == PageStatus::kOk) {
        if (lane) ++moved_[index_of(*lane)];
      } else if (transfer.gives_way && status == PageStatus::kCancelled) {
        backlog_.count(1);
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
