#include "costs/cost_model.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

namespace kvtier {
namespace {

constexpr std::uint64_t kSample = 7;  // of how many stores one is learnt from
constexpr double kNearZero = 1e-9, kNoTime = 1e-15;
constexpr double kLaneRidge[] = {1e-3, 1e-6}, kPrefillRidge[] = {1e-3, 1e-6, 1e-4};
constexpr double kMemory = 32;
constexpr std::size_t kLaneWindow = 3;
constexpr std::size_t kPrefillWindow = 7;  // a request has many passes, so more of them may agree

// The lanes of a path into `out`; how many.
int lanes_of(std::span<const Tier> path, Lane* out) {
  if (path.size() < 2 || path.size() > kMaxHops + 1)
    throw std::invalid_argument("path: " + std::to_string(path.size()) + " tiers; accepted: 2 or 3");
  for (std::size_t hop = 0; hop + 1 < path.size(); ++hop) {
    const std::optional<Lane> lane = lane_between(path[hop], path[hop + 1]);
    if (!lane) throw std::invalid_argument("path: no lane joins its tiers; accepted: device, host, disk, neighbours");
    out[hop] = *lane;
  }
  return static_cast<int>(path.size()) - 1;
}

void check(Priority priority) {
  if (!is_priority(priority))
    throw std::invalid_argument("priority: " + std::to_string(static_cast<int>(priority)) +
                                "; accepted: " + kPrioritiesText);
}

// Whether it ran, in a time that is one.
bool is_timed(const HopReport& hop) {
  return hop.carried != 0 && hop.started_s > 0 && hop.ended_s > hop.started_s && std::isfinite(hop.ended_s);
}

std::array<double, 3> prefill_features(double passes, std::uint64_t tokens, std::uint64_t context) {
  const double n = static_cast<double>(tokens);
  return {passes, n, n * (static_cast<double>(context) + 0.5 * n)};
}

}  // namespace

CostModel::LaneCosts::LaneCosts() : fit(kLaneRidge, kMemory, kLaneWindow) {}

CostModel::CostModel(std::size_t page_bytes, std::size_t bytes_in_flight)
    : page_bytes_(page_bytes),
      in_flight_(bytes_in_flight),
      prefill_(kPrefillRidge, kMemory, kPrefillWindow, /*kinds=*/true) {
  if (page_bytes < 1) throw std::invalid_argument("page_bytes: 0; accepted: 1 or more");
}

const CostModel::UnderWay* CostModel::find(Ticket ticket) const {
  const auto found = under_way_.find(ticket);
  return found == under_way_.end() ? nullptr : &found->second;
}

// ---- learning ----------------------------------------------------------------------------------------------------

bool CostModel::LaneCosts::idle() const {
  return std::all_of(queued, queued + kPriorities, [](std::uint64_t bytes) { return bytes == 0; });
}

void CostModel::submitted(Ticket ticket, Path path, std::size_t blocks, Priority priority, double now) {
  check(priority);
  Lane lanes[kMaxHops];
  const int hops = lanes_of(path, lanes);
  const auto [place, is_new] = under_way_.try_emplace(ticket);
  if (!is_new) throw std::invalid_argument("ticket: " + std::to_string(ticket) + " is under way; accepted: a new one");
  UnderWay& entry = place->second;  // from here on nothing throws
  entry.hops = hops;
  std::copy_n(lanes, hops, entry.lanes);
  entry.bytes = blocks * page_bytes_;
  entry.priority = priority;
  entry.submitted = now;
  if (!is_store(entry.lanes[0])) {  // for what goes down nobody waits
    const std::optional<double> seconds = load(path, blocks, now, priority);
    if (seconds) entry.expected_end = now + *seconds;
  }
  for (const Lane name : entry.path()) {
    LaneCosts& lane = at(name);
    if (lane.idle()) lane.busy_since = now;
    lane.queued[static_cast<int>(priority)] += entry.bytes;
  }
}

void CostModel::forget(Ticket ticket) {
  const auto found = under_way_.find(ticket);
  if (found == under_way_.end()) return;
  const UnderWay& entry = found->second;
  for (const Lane name : entry.path()) at(name).queued[static_cast<int>(entry.priority)] -= entry.bytes;
  under_way_.erase(found);
}

void CostModel::promoted(Ticket ticket, Priority priority) {
  check(priority);
  const auto found = under_way_.find(ticket);
  if (found == under_way_.end()) return;
  UnderWay& entry = found->second;
  priority = std::min(priority, entry.priority);
  for (const Lane name : entry.path()) {
    at(name).queued[static_cast<int>(entry.priority)] -= entry.bytes;
    at(name).queued[static_cast<int>(priority)] += entry.bytes;
  }
  entry.priority = priority;
}

void CostModel::completed(const Completion& done) {
  if (!done.final) return;
  forget(done.ticket);
  for (int index = 0; index < done.hop_count; ++index) {
    const HopReport& hop = done.hops[index];
    if (!is_timed(hop)) continue;
    LaneCosts& lane = at(hop.lane);
    ++lane.seen;
    if (is_store(hop.lane) && lane.seen % kSample != 1) {  // no decision needs it: a sample is enough to tell of
      lane.ended = std::max(lane.ended, hop.ended_s);
    } else if (index == 0) {
      lane.learn(hop.carried, hop.started_s, hop.ended_s);
    } else {  // it was fed by the hop before, and idle in between
      lane.ended = std::max(lane.ended, hop.ended_s);
      const double features[] = {0.0, static_cast<double>(hop.carried)};
      lane.observe(features, hop.busy_s);
    }
  }
}

// The lane's time between two ends, or from an idle lane's start, belongs to the bytes that ended with it.
void CostModel::LaneCosts::learn(std::uint64_t size, double started_s, double ended_s) {
  if (ended_s <= ended || started_s < began) {  // overtaken by others, or others were served in between
    if (ended_s <= ended) pending += size;
    ended = std::max(ended, ended_s);
    return;
  }
  const bool found_idle = started_s >= ended;
  const double seconds = ended_s - (found_idle ? started_s : ended);
  if (!found_idle) size += pending;
  began = started_s, ended = ended_s, pending = 0;
  const double features[] = {found_idle ? 1.0 : 0.0, static_cast<double>(size)};
  observe(features, seconds);
}

void CostModel::LaneCosts::observe(Fit::Features features, double seconds) {
  const bool is_first = !fit.known();
  if (fit.observe(features, seconds)) only = is_first ? std::optional(seconds) : std::nullopt;
}

void CostModel::overran(std::span<const Ticket> tickets, double now) {
  std::optional<Lane> name;
  std::uint64_t size = 0;
  double first = now;
  for (const Ticket ticket : tickets) {
    const UnderWay* entry = find(ticket);
    if (entry == nullptr) continue;
    if (!name) name = entry->lanes[0];
    if (entry->lanes[0] != *name) continue;
    size += entry->bytes;
    first = std::min(first, entry->submitted);
  }
  if (!name) return;
  LaneCosts& lane = at(*name);
  const double seconds = now - std::max(lane.ended, first), features[] = {1.0, static_cast<double>(size)};
  const std::optional<double> expected = lane.fit.predict(features);
  if (expected && seconds <= *expected) return;
  lane.fit.observe(features, seconds);
  lane.only.reset();
}

void CostModel::observe_prefill(std::uint64_t new_tokens, std::uint64_t context, double seconds) {
  if (new_tokens < 1) throw std::invalid_argument("new_tokens: 0; accepted: 1 or more");
  if (prefill_.observe(prefill_features(1, new_tokens, context), seconds))
    pass_tokens_ = std::max(new_tokens, pass_tokens_);
}

// ---- predicting --------------------------------------------------------------------------------------------------

// One transfer does not tell a fixed cost from a rate. Until a second has, whichever takes less: a load teaches, and
// one that overruns is cut, while one that is not made would leave it at that.
double CostModel::LaneCosts::takes(double bytes) const {
  const double seconds = fit.coefficients()[0] + fit.coefficients()[1] * bytes;
  return only ? std::min(seconds, *only) : seconds;
}

double CostModel::LaneCosts::occupied(std::uint64_t ahead, double now) const {
  if (ahead == 0) return 0;
  const double each = fit.known() ? fit.coefficients()[1] : 0;
  const double spent = now - std::max(ended, busy_since);
  return std::max(0.0, static_cast<double>(ahead) * each - std::max(0.0, spent));
}

double CostModel::queue_wait(Lane name, double now, Priority priority) const {
  check(priority);
  const LaneCosts& lane = at(name);
  std::uint64_t ahead = 0, later = 0;
  for (int p = 0; p < kPriorities; ++p) (p <= static_cast<int>(priority) ? ahead : later) += lane.queued[p];
  return lane.occupied(ahead + std::min(later, in_flight_), now);
}

// Hops overlap, so the slowest lane counts, and of the others what they take for one page.
std::optional<double> CostModel::load(Path path, std::size_t blocks, double now, Priority priority) const {
  if (blocks < 1) return 0.0;
  Lane lanes[kMaxHops];
  const int hops = lanes_of(path, lanes);
  double slowest = 0, rest = 0;
  for (int hop = 0; hop < hops; ++hop) {
    const LaneCosts& lane = at(lanes[hop]);
    if (!lane.fit.known()) return std::nullopt;
    const double page = static_cast<double>(page_bytes_), one = lane.takes(page);
    const double whole = queue_wait(lanes[hop], now, priority) + lane.takes(page * static_cast<double>(blocks));
    if (whole > slowest) {
      if (slowest != 0) rest += std::min(one, slowest);
      slowest = whole;
    } else {
      rest += one;
    }
  }
  return slowest + rest;
}

std::optional<double> CostModel::recompute(std::uint64_t tokens, std::uint64_t context) const {
  if (tokens < 1) return 0.0;
  const double passes = std::ceil(static_cast<double>(tokens) / static_cast<double>(pass_tokens_));
  return prefill_.predict(prefill_features(passes, tokens, context));
}

std::optional<double> CostModel::expected_end(std::span<const Ticket> tickets) const {
  double latest = 0;
  for (const Ticket ticket : tickets) {
    const UnderWay* entry = find(ticket);
    if (entry == nullptr) continue;
    if (!entry->expected_end) return std::nullopt;
    latest = std::max(latest, *entry->expected_end);
  }
  return latest;
}

bool CostModel::onboards(Ticket ticket) const {
  const UnderWay* entry = find(ticket);
  return entry != nullptr && entry->path().back() == Lane::kOnboard;
}

// ---- a profile ---------------------------------------------------------------------------------------------------

std::optional<std::pair<double, double>> CostModel::lane_speed(Lane lane) const {
  const Fit& fit = at(lane).fit;
  if (!fit.known()) return std::nullopt;
  return std::pair(fit.coefficients()[0], 1.0 / std::max(fit.coefficients()[1], kNoTime));
}

std::optional<CostModel::PrefillSpeed> CostModel::prefill_speed() const {
  if (!prefill_.known()) return std::nullopt;
  return PrefillSpeed{prefill_.coefficients(), pass_tokens_};
}

void CostModel::seed_lane(Lane lane, double fixed_s, double bytes_per_s) {
  if (!(bytes_per_s > 0) || !(fixed_s >= 0) || !std::isfinite(fixed_s) || !std::isfinite(bytes_per_s))
    throw std::invalid_argument("lane '" + std::string(lane_name(lane)) + "': " + std::to_string(fixed_s) + " s, " +
                                std::to_string(bytes_per_s) +
                                " bytes/s; accepted: 0 or more seconds, more than 0 bytes/s");
  const double coefficients[] = {std::max(fixed_s, kNearZero), 1.0 / bytes_per_s};
  at(lane).fit.seed(coefficients);
  at(lane).only.reset();
}

void CostModel::seed_prefill(std::span<const double> coefficients, std::uint64_t pass_tokens) {
  if (pass_tokens < 1) throw std::invalid_argument("pass_tokens: 0; accepted: 1 or more");
  prefill_.seed(coefficients);
  pass_tokens_ = pass_tokens;
}

void CostModel::recall(const CostModel& other) {
  for (int index = 0; index < kLanes; ++index) {
    LaneCosts& lane = lanes_[index];
    const LaneCosts& heard = other.lanes_[index];
    lane.fit = heard.fit, lane.only = heard.only;
    lane.began = heard.began, lane.ended = heard.ended;
    lane.seen = heard.seen, lane.pending = heard.pending;
  }
  prefill_ = other.prefill_;
  pass_tokens_ = other.pass_tokens_;
}

}  // namespace kvtier
