// What the ledger tells: which transfers have ended, how, and what became of their memory.
#include <algorithm>

#include "mover/ledger.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kSpareTransfers = 64;
constexpr std::uint32_t kSparePages = 1024;  // larger ones give their memory back

// A store that went well and that nobody waits for.
bool is_routine(const Transfer& t) {
  return !t.is_load() && t.priority >= Priority::kBackground && t.unsettled == 0 &&
         std::all_of(t.status.begin(), t.status.end(), [](PageStatus page) { return page == PageStatus::kOk; });
}

}  // namespace

void Ledger::conclude(Transfer& t, Time now) {
  if (t.unsettled == 0) {
    if (t.live_index >= live_.size() || live_[t.live_index] != &t) return;  // said already
    t.finished = now;
    live_[t.live_index] = live_.back();
    live_[t.live_index]->live_index = t.live_index;
    live_.pop_back();
    list(t, now);
    return;
  }
  if (!t.has_ended() || t.reported_early) return;
  // Copies end by themselves in microseconds; only disk I/O may hang, so only for it is an early word worth saying.
  for (int h = 0; h < t.hop_count; ++h) {
    if (!is_disk(t.hops[h].lane) && t.hops[h].in_flight != 0) return;
  }
  t.reported_early = true;
  list(t, now);
}

void Ledger::list(Transfer& t, Time now) {
  ++reports_;
  tell_from_ = std::min(tell_from_, is_routine(t) ? now + kPatience : now);
  if (t.listed) return;  // an early report not yet read becomes the final one
  t.listed = true;
  t.next_listed = nullptr;
  (last_listed_ == nullptr ? first_listed_ : last_listed_->next_listed) = &t;
  last_listed_ = &t;
}

bool Ledger::next_report(Completion* out, Time now) {
  Transfer* t = first_listed_;
  if (t == nullptr) return false;
  if (t->unsettled != 0) out->status = t->status;  // needs memory: before anything is forgotten
  first_listed_ = t->next_listed;
  if (first_listed_ == nullptr) {
    last_listed_ = nullptr;
    tell_from_ = kNever;
  }
  t->listed = false;
  out->ticket = t->ticket;
  out->final = t->unsettled == 0;
  out->count = t->count;
  out->hop_count = t->hop_count;
  out->submitted_s = to_seconds(t->submitted.time_since_epoch());
  out->finished_s = to_seconds((out->final ? t->finished : now).time_since_epoch());
  for (int h = 0; h < t->hop_count; ++h) {
    const Hop& hop = t->hops[h];
    out->hops[h] = {hop.lane,
                    hop.bytes,
                    to_seconds(hop.queue_wait),
                    to_seconds(hop.busy.total()),
                    to_seconds(hop.started.time_since_epoch()),
                    to_seconds(hop.ended.time_since_epoch()),
                    hop.carried};
  }
  if (!out->final) return true;
  out->status = std::move(t->status);
  by_ticket_.erase(t->ticket);
  held_pages_ -= t->count;
  retire(t);
  return true;
}

void Ledger::retire(Transfer* t) {
  if (abandoned_) return;  // whoever hangs may still look at it
  t->fence.reset();
  if (spare_.size() < kSpareTransfers && t->count <= kSparePages) {
    spare_.push_back(t);
    return;
  }
  const auto found = std::find_if(owned_.begin(), owned_.end(), [t](const auto& owned) { return owned.get() == t; });
  std::swap(*found, owned_.back());
  owned_.pop_back();
}

int Ledger::slices_there(Ticket ticket) const {
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end()) return -1;
  const Transfer& t = *found->second;
  return t.slices.broken() || t.has_ended() ? -1 : static_cast<int>(t.slices.there());
}

LaneStats Ledger::stats(Lane lane) const {
  const LaneState& s = lanes_[index_of(lane)];
  LaneStats out = s.totals;
  out.queued_pages = s.queued;
  out.bytes_in_flight = s.in_flight;
  out.busy_s = to_seconds(s.busy.total());
  out.queue_s = to_seconds(s.queue_wait);
  return out;
}

}  // namespace kvtier
