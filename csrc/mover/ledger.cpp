#include "mover/ledger.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace kvtier {
namespace {

// Worth more than a queued store: someone waits more urgently, or earlier. Arrival does not count.
bool worth_more(const Order& order, const Transfer& queued) {
  if (order.priority != queued.priority) return order.priority < queued.priority;
  return order.deadline < queued.deadline;
}

bool worth_less(const Transfer& a, const Transfer& b) {
  if (a.priority != b.priority) return a.priority > b.priority;
  if (a.deadline != b.deadline) return a.deadline > b.deadline;
  return a.sequence > b.sequence;
}

}  // namespace

Ledger::Ledger(const LedgerOptions& options) : options_(options) {
  lanes_.reserve(kLanes);
  for (int i = 0; i < kLanes; ++i) lanes_.emplace_back(options.max_transfers);
  owned_.reserve(options.max_transfers);
  spare_.reserve(options.max_transfers);
  live_.reserve(options.max_transfers);
  by_ticket_.reserve(options.max_transfers);
  victims_.reserve(options.max_transfers);
}

// ---- orders ------------------------------------------------------------------------------------------------------

Submit Ledger::submit(const Order& order, Time now) {
  if (closed_) return Submit::kClosed;
  if (by_ticket_.contains(order.ticket)) return Submit::kDuplicate;
  expire(now);
  Lane lanes[kMaxHops];
  const int hops = static_cast<int>(order.path.size()) - 1;
  for (int h = 0; h < hops; ++h) lanes[h] = *lane_between(order.path[h], order.path[h + 1]);
  if (by_ticket_.size() >= options_.max_transfers || order.count > options_.queue_pages) return Submit::kFull;
  if (held_pages_ + order.count > std::uint64_t{kLanes} * options_.queue_pages) return Submit::kFull;
  if (!can_make_room(order, {lanes, static_cast<std::size_t>(hops)})) return Submit::kFull;

  Transfer& t = *new_transfer();
  try {  // all that needs memory, before anything is dropped
    fill(t, order, now);
    by_ticket_.emplace(t.ticket, &t);
  } catch (const std::bad_alloc&) {
    retire(&t);
    throw;
  }
  make_room(order, {lanes, static_cast<std::size_t>(hops)}, now);
  held_pages_ += t.count;
  t.live_index = live_.size();
  live_.push_back(&t);
  next_deadline_ = std::min(next_deadline_, t.deadline);
  for (int h = 0; h < hops; ++h) {
    state(lanes[h]).queued += t.count;
    ++state(lanes[h]).totals.transfers;
  }
  for (std::uint32_t place = 0; place < t.slices.count() * t.count; ++place) queue_page(t.hops[0], place, now);
  conclude(t, now);
  return Submit::kAccepted;
}

std::uint64_t Ledger::shortage(Lane lane, std::uint32_t count) const {
  const std::uint64_t wanted = lanes_[index_of(lane)].queued + count;
  return wanted > options_.queue_pages ? wanted - options_.queue_pages : 0;
}

// Of a queued store: pages of this lane that would be free if it were dropped for the order.
std::uint64_t Ledger::droppable(const Transfer& t, Lane lane, const Order& order) {
  if (t.is_load() || t.has_ended() || !worth_more(order, t)) return 0;
  for (int h = 0; h < t.hop_count; ++h) {
    if (t.hops[h].lane == lane) return t.hops[h].unsettled - t.hops[h].in_flight;
  }
  return 0;
}

bool Ledger::can_make_room(const Order& order, std::span<const Lane> lanes) const {
  for (const Lane lane : lanes) {  // nothing is dropped in vain
    const std::uint64_t missing = shortage(lane, order.count);
    if (missing == 0) continue;
    if (!is_store(lanes[0])) return false;
    std::uint64_t gain = 0;
    for (const Transfer* t : live_) gain += droppable(*t, lane, order);
    if (gain < missing) return false;
  }
  return true;
}

void Ledger::make_room(const Order& order, std::span<const Lane> lanes, Time now) {
  for (const Lane lane : lanes) {
    if (shortage(lane, order.count) == 0) continue;
    victims_.clear();
    for (Transfer* t : live_) {
      if (droppable(*t, lane, order) != 0) victims_.push_back(t);
    }
    std::sort(victims_.begin(), victims_.end(),
              [](const Transfer* a, const Transfer* b) { return worth_less(*a, *b); });
    for (auto victim = victims_.begin(); shortage(lane, order.count) != 0; ++victim) {
      end(**victim, PageStatus::kCancelled, now);
    }
  }
}

Transfer* Ledger::new_transfer() {
  if (!spare_.empty()) {
    Transfer* t = spare_.back();
    spare_.pop_back();
    return t;
  }
  owned_.push_back(std::make_unique<Transfer>());
  return owned_.back().get();
}

void Ledger::fill(Transfer& t, const Order& order, Time now) {
  t.ticket = order.ticket;
  t.priority = order.priority;
  t.due = t.deadline = order.deadline;
  t.fence = order.fence;
  t.submitted = now;
  t.sequence = ++sequence_;
  t.count = order.count;
  t.hop_count = static_cast<int>(order.path.size()) - 1;
  t.slots.assign(order.slots, order.slots + order.path.size() * order.count);
  t.identity_words = order.identity_bytes / sizeof(std::uint64_t);
  t.identities.resize(t.identity_words * order.count);
  if (order.count != 0) std::memcpy(t.identities.data(), order.identities, order.identity_bytes * order.count);
  t.status.assign(static_cast<std::size_t>(t.hop_count) * order.count, PageStatus::kPending);
  t.unsettled = order.count * static_cast<std::uint32_t>(t.hop_count);
  t.slices.reset(order.cuts, order.count);
  t.ended.store(PageStatus::kPending, std::memory_order_relaxed);
  t.reported_early = t.listed = false;
  t.next_listed = nullptr;
  for (int h = 0; h < t.hop_count; ++h) {
    Hop& hop = t.hops[h];
    std::vector<std::uint32_t> ready = std::move(hop.ready);
    ready.clear();
    ready.reserve(std::size_t{order.count} * t.slices.count());
    hop = Hop{};
    hop.ready = std::move(ready);
    hop.transfer = &t;
    hop.index = h;
    hop.lane = *lane_between(order.path[h], order.path[h + 1]);
    hop.unsettled = order.count;
  }
}

bool Ledger::cancel(Ticket ticket, Time now) {
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end() || found->second->unsettled == 0) return false;
  if (!found->second->has_ended()) end(*found->second, PageStatus::kCancelled, now);
  return true;
}

bool Ledger::promote(Ticket ticket, Priority priority, Time deadline) {
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end() || found->second->unsettled == 0 || found->second->has_ended()) return false;
  Transfer& t = *found->second;
  Hop* queued[kMaxHops];  // out of the queues while what orders them changes
  int count = 0;
  for (int h = 0; h < t.hop_count; ++h) {
    LaneQueue& queue = state(t.hops[h].lane).queue;
    if (!queue.contains(t.hops[h])) continue;
    queue.remove(t.hops[h]);
    queued[count++] = &t.hops[h];
  }
  t.due = t.priority == Priority::kDemand ? std::min(t.due, deadline) : deadline;
  t.deadline = std::max(t.deadline, deadline);  // whoever wants it already would go without, if another's ended it
  t.priority = std::min(t.priority, priority);
  for (int i = 0; i < count; ++i) state(queued[i]->lane).queue.push(*queued[i]);
  return true;
}

void Ledger::expire(Time now) {
  if (now < next_deadline_) return;
  next_deadline_ = kNever;
  for (std::size_t i = live_.size(); i-- > 0;) {  // backwards: ending one may take it out of live_
    Transfer& t = *live_[i];
    if (t.has_ended()) continue;
    if (t.deadline <= now) {
      end(t, PageStatus::kOverdue, now);
    } else {
      next_deadline_ = std::min(next_deadline_, t.deadline);
    }
  }
}

void Ledger::end(Transfer& t, PageStatus why, Time now) {
  if (t.has_ended() || t.unsettled == 0) return;
  t.ended.store(why, std::memory_order_relaxed);
  for (int h = 0; h < t.hop_count; ++h) fail_waiting(t, t.hops[h], why, why);
  for (int h = 0; h + 1 < t.hop_count; ++h) {  // what is in flight goes no further
    for (std::uint32_t page = 0; page < t.count; ++page) {
      if (t.at(h, page) == PageStatus::kPending && t.at(h + 1, page) == PageStatus::kPending) mark(t, h + 1, page, why);
    }
  }
  conclude(t, now);
}

void Ledger::take_disk_offline(Time now) {
  if (offline_) return;
  offline_ = true;
  for (std::size_t i = live_.size(); i-- > 0;) {
    Transfer& t = *live_[i];
    for (int h = 0; h < t.hop_count; ++h) {
      if (is_disk(t.hops[h].lane)) fail_waiting(t, t.hops[h], PageStatus::kOffline, PageStatus::kSkipped);
    }
    conclude(t, now);
  }
}

void Ledger::stall_disk(Time now) {
  for (std::size_t i = live_.size(); i-- > 0;) {
    Transfer& t = *live_[i];
    const bool there = std::any_of(t.hops, t.hops + t.hop_count,
                                   [](const Hop& hop) { return is_disk(hop.lane) && hop.in_flight != 0; });
    if (there) end(t, PageStatus::kOverdue, now);
  }
  take_disk_offline(now);
}

void Ledger::close(Time now) {
  closed_ = true;
  for (std::size_t i = live_.size(); i-- > 0;) end(*live_[i], PageStatus::kCancelled, now);
}

void Ledger::abandon(Time now) {
  abandoned_ = true;
  for (std::size_t i = live_.size(); i-- > 0;) {
    Transfer& t = *live_[i];
    for (int h = 0; h < t.hop_count; ++h) {
      for (std::uint32_t page = 0; page < t.count; ++page) {
        if (t.at(h, page) == PageStatus::kPending) mark(t, h, page, PageStatus::kCancelled);
      }
    }
    conclude(t, now);
  }
}

// ---- pages -------------------------------------------------------------------------------------------------------

// `place` is a page, of a transfer in slices slice · count + page; disk hops have no slices.
void Ledger::queue_page(Hop& hop, std::uint32_t place, Time now) {
  if (offline_ && is_disk(hop.lane)) {
    mark(*hop.transfer, hop.index, place, PageStatus::kOffline);
    for (int h = hop.index + 1; h < hop.transfer->hop_count; ++h) mark(*hop.transfer, h, place, PageStatus::kSkipped);
    return;
  }
  if (hop.ready.empty()) hop.ready_since = now;
  hop.ready.push_back(place);
  LaneQueue& queue = state(hop.lane).queue;
  if (!queue.contains(hop)) queue.push(hop);
}

// Settles the pages that wait for this hop, and their later hops.
void Ledger::fail_waiting(Transfer& t, Hop& hop, PageStatus status, PageStatus later) {
  LaneQueue& queue = state(hop.lane).queue;
  if (queue.contains(hop)) queue.remove(hop);
  for (; hop.has_ready(); ++hop.head) {
    const std::uint32_t place = hop.ready[hop.head], page = place % t.count;
    const PageStatus whole = t.slices.note(place / t.count, page, status);
    if (whole == PageStatus::kPending) continue;  // another slice of it is under way
    mark(t, hop.index, page, whole);
    for (int h = hop.index + 1; h < t.hop_count; ++h) mark(t, h, page, later);
  }
}

void Ledger::mark(Transfer& t, int index, std::uint32_t page, PageStatus status) {
  Hop& hop = t.hops[index];
  LaneState& lane = state(hop.lane);
  t.at(index, page) = status;
  --t.unsettled;
  --hop.unsettled;
  --lane.queued;
  ++lane.totals.by_status[static_cast<int>(status)];
  if (status != PageStatus::kOk) return;
  hop.bytes += page_bytes(hop.lane);
  lane.totals.bytes += page_bytes(hop.lane);
  ++lane.totals.pages;
}

// A disk reads and writes by the same means: while somebody waits for pages of it, those that nobody waits for are
// written one by one.
std::size_t Ledger::allowed_in_flight(Lane lane) const {
  const auto is_awaited = [this](Lane name) {
    const LaneQueue& queue = lanes_[index_of(name)].queue;
    return !queue.empty() && queue.best()->transfer->priority == Priority::kDemand;
  };
  const bool yields = lane == Lane::kSpill && !is_awaited(lane) && is_awaited(Lane::kStage);
  return yields ? 0 : most_in_flight(lane);
}

bool Ledger::allows(Lane lane) const {
  const LaneState& s = lanes_[index_of(lane)];
  return !s.queue.empty() && (s.in_flight == 0 || s.in_flight + page_bytes(lane) <= allowed_in_flight(lane));
}

bool Ledger::has_work(std::span<const Lane> lanes) const {
  return std::any_of(lanes.begin(), lanes.end(), [this](Lane lane) { return allows(lane); });
}

bool Ledger::take(std::span<const Lane> lanes, std::uint32_t max_pages, std::size_t max_bytes, Time now, Chunk* chunk) {
  expire(now);
  Hop* hop = nullptr;
  for (const Lane lane : lanes) {
    if (!allows(lane)) continue;
    Hop* best = state(lane).queue.best();
    if (hop == nullptr || serves_before(*best, *hop)) hop = best;
  }
  if (hop == nullptr || max_pages == 0) return false;

  LaneState& lane = state(hop->lane);
  const std::uint32_t pages = hop->transfer->count, slice = hop->ready[hop->head] / pages;
  const std::size_t size = bytes_of(*hop->transfer, hop->index, slice);
  const std::size_t most = allowed_in_flight(hop->lane);
  const std::size_t room = most > lane.in_flight ? most - lane.in_flight : 0;
  const std::size_t fits = std::max<std::size_t>(1, std::min(room, max_bytes) / size);
  const std::size_t same = std::min<std::size_t>(
      hop->ready.size() - hop->head,  // of a slice those are side by side
      slice + 1 == hop->transfer->slices.count() ? hop->ready.size() : (slice + 1) * pages - hop->ready[hop->head]);
  const std::size_t limit = std::min<std::size_t>({fits, max_pages, Chunk::kMaxPages, same});
  chunk->transfer = hop->transfer;
  chunk->hop = hop->index;
  chunk->lane = hop->lane;
  chunk->slice = slice;
  chunk->count = static_cast<std::uint32_t>(limit);
  std::transform(hop->ready.begin() + static_cast<std::ptrdiff_t>(hop->head),
                 hop->ready.begin() + static_cast<std::ptrdiff_t>(hop->head + limit), chunk->pages,
                 [pages](std::uint32_t place) { return place % pages; });
  hop->head += limit;
  if (!hop->has_ready()) lane.queue.remove(*hop);

  if (!hop->waited) {
    hop->waited = true;
    hop->started = now;
    hop->queue_wait = now - hop->ready_since;
    lane.queue_wait += hop->queue_wait;
  }
  lane.in_flight += limit * size;
  for (std::size_t i = 0; i < limit; ++i) {
    hop->busy.begin(now);
    lane.busy.begin(now);
  }
  hop->in_flight += chunk->count;
  return true;
}

std::size_t Ledger::bytes_of(const Transfer& t, int hop, std::uint32_t slice) const {
  return t.slices.cut() ? t.slices.range(slice).size() : page_bytes(t.hops[hop].lane);
}

void Ledger::finish(const Chunk& chunk, const PageStatus* status, Time now) {
  state(chunk.lane).in_flight -= chunk.count * bytes_of(*chunk.transfer, chunk.hop, chunk.slice);
  finish(*chunk.transfer, chunk.hop, chunk.slice, {chunk.pages, chunk.count}, status, now);
}

void Ledger::finish(Transfer& t, int index, std::uint32_t slice, std::span<const std::uint32_t> pages,
                    const PageStatus* status, Time now) {
  Hop& hop = t.hops[index];
  LaneState& lane = state(hop.lane);
  hop.in_flight -= static_cast<std::uint32_t>(pages.size());
  hop.ended = now;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    hop.busy.end(now);
    lane.busy.end(now);
    if (status[i] == PageStatus::kOk || status[i] == PageStatus::kCancelled) hop.carried += bytes_of(t, index, slice);
    const PageStatus whole = t.slices.note(slice, pages[i], status[i]);
    if (whole == PageStatus::kPending) continue;
    mark(t, index, pages[i], whole);
    const int next = index + 1;
    if (next == t.hop_count || t.at(next, pages[i]) != PageStatus::kPending) continue;
    if (whole == PageStatus::kOk) {
      queue_page(t.hops[next], pages[i], now);
    } else {
      mark(t, next, pages[i], PageStatus::kSkipped);
    }
  }
  conclude(t, now);
}

}  // namespace kvtier
