// One transfer: an order to copy pages along one or two hops, and all that is known of it until it is reported.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/completion.hpp"
#include "common/identity.hpp"
#include "common/lane.hpp"
#include "common/types.hpp"
#include "mover/slices.hpp"

namespace kvtier {

class DeviceFence;

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: the same numbers as Python's time.monotonic()
using Time = Clock::time_point;
inline constexpr Time kNever = Time::max();

inline double to_seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// What a caller asks for; nothing in it is kept by reference.
struct Order {
  Ticket ticket = 0;
  std::span<const Tier> path;             // 2 or 3 tiers, neighbours joined by a lane
  const Slot* slots = nullptr;            // [path][count]
  std::uint32_t count = 0;                // pages
  const std::byte* identities = nullptr;  // [count][identity_bytes]
  std::size_t identity_bytes = 0;
  Priority priority = Priority::kDemand;
  Time deadline = kNever;
  std::shared_ptr<DeviceFence> fence{};  // what its copies on the device come after; null: nothing
  std::span<const std::size_t> cuts{};   // of host → device alone: see Slices; empty: whole pages
};

// Adds up the time during which at least one of several overlapping pieces of work ran.
class BusyMeter {
 public:
  void begin(Time now) {
    if (active_++ == 0) since_ = now;
  }
  void end(Time now) {
    if (--active_ == 0) total_ += now - since_;
  }
  bool active() const { return active_ != 0; }
  Clock::duration total() const { return total_; }

 private:
  std::uint32_t active_ = 0;
  Time since_{};
  Clock::duration total_{};
};

struct Transfer;

// One hop of one transfer: what a lane queues. `ready[head..]` is what this hop may take now: pages, each of which
// enters it once, so that it never wraps; of a transfer in slices slice · count + page.
struct Hop {
  Transfer* transfer = nullptr;
  int index = 0;  // within the transfer
  Lane lane = Lane::kOffload;
  int heap_index = -1;  // place in the lane's queue, -1: not queued
  std::vector<std::uint32_t> ready;
  std::size_t head = 0;
  std::uint32_t in_flight = 0;  // of these, what an executor holds
  std::uint32_t unsettled = 0;  // pages without a status
  std::uint64_t bytes = 0;      // moved with status OK
  std::uint64_t carried = 0;    // moved, also where nobody wanted it any more
  bool waited = false;          // its first page was taken: queue_wait is final
  Time ready_since{};
  Clock::duration queue_wait{};
  Time started{};  // its first page was taken
  Time ended{};    // its last page so far came back
  BusyMeter busy;

  bool has_ready() const { return head < ready.size(); }
};

struct Transfer {
  Ticket ticket = 0;
  Priority priority = Priority::kDemand;
  Time deadline = kNever;  // the latest of those who want it: then it ends
  Time due = kNever;       // the earliest of those who wait for it: the order of service
  std::shared_ptr<DeviceFence> fence;
  Time submitted{};
  Time finished{};
  std::uint64_t sequence = 0;  // order of arrival
  std::uint32_t count = 0;
  int hop_count = 0;
  Hop hops[kMaxHops];
  std::vector<Slot> slots;                // [hop_count + 1][count]
  std::vector<std::uint64_t> identities;  // [count][identity_words]; words, because a PageIdentity is 8-aligned
  std::size_t identity_words = 0;
  std::vector<PageStatus> status;  // [hop_count][count]
  std::uint32_t unsettled = 0;
  Slices slices;  // of its one hop, if it is cut

  // kPending while it runs; kCancelled or kOverdue once no further hop of it may start. Executors read it
  // without the ledger's lock.
  std::atomic<PageStatus> ended{PageStatus::kPending};
  bool reported_early = false;
  bool listed = false;  // waits in the list of reports
  Transfer* next_listed = nullptr;
  std::size_t live_index = 0;

  Slot slot(int place, std::uint32_t page) const { return slots[static_cast<std::size_t>(place) * count + page]; }
  const PageIdentity* identity(std::uint32_t page) const {
    return reinterpret_cast<const PageIdentity*>(identities.data() + page * identity_words);
  }
  PageStatus& at(int hop, std::uint32_t page) { return status[static_cast<std::size_t>(hop) * count + page]; }
  bool is_load() const { return !is_store(hops[0].lane); }
  bool has_ended() const { return ended.load(std::memory_order_relaxed) != PageStatus::kPending; }
};

// Order of service: who waits, loads before stores, who waits until earlier, arrival.
inline bool serves_before(const Hop& a, const Hop& b) {
  const Transfer &x = *a.transfer, &y = *b.transfer;
  if (x.priority != y.priority) return x.priority < y.priority;
  if (is_store(a.lane) != is_store(b.lane)) return !is_store(a.lane);
  if (x.due != y.due) return x.due < y.due;
  return x.sequence < y.sequence;
}

// Pages of one hop, or one slice of them, that an executor has taken and must finish.
struct Chunk {
  static constexpr std::uint32_t kMaxPages = 64;
  Transfer* transfer = nullptr;
  int hop = 0;
  Lane lane = Lane::kOffload;
  std::uint32_t slice = 0;
  std::uint32_t count = 0;
  std::uint32_t pages[kMaxPages];
};

}  // namespace kvtier
