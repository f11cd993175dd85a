// The mover's book-keeping: which transfers live, which pages wait for which lane, what became of each. It has no
// thread, no lock and no clock of its own: the scheduler guards it and tells it the time, and tests drive it alone.
//
// Memory is asked for by submit() and for next_report() alone. All else is called by threads in which nobody could
// catch what is thrown, and finds the room that it may need: a hop's for its pages, a lane's for every transfer's hop.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "mover/lane_queue.hpp"
#include "mover/transfer.hpp"

namespace kvtier {

struct LedgerOptions {
  std::size_t device_page_bytes = 0;       // moved by a device lane: the payload
  std::size_t disk_page_bytes = 0;         // moved by a disk lane: the padded page
  std::size_t bytes_in_flight = 8u << 20;  // per lane; one page may always move
  std::size_t device_bytes_in_flight = 0;  // of a device lane, if it is another number
  std::uint32_t queue_pages = 1u << 15;    // unsettled pages per lane; 4 × this many not yet polled
  std::uint32_t max_transfers = 4096;      // not yet polled, finished or not
};

enum class Submit { kAccepted, kFull, kClosed, kDuplicate };

struct LaneStats {
  std::uint64_t transfers = 0;  // hops queued
  std::uint64_t pages = 0;      // moved with status OK
  std::uint64_t bytes = 0;
  std::uint64_t queued_pages = 0;  // unsettled now
  std::uint64_t bytes_in_flight = 0;
  double busy_s = 0;
  double queue_s = 0;
  std::uint64_t by_status[kPageStatuses] = {};
};

class Ledger {
 public:
  static constexpr Clock::duration kPatience = std::chrono::milliseconds(100);

  explicit Ledger(const LedgerOptions& options);

  // A store that finds the queue full first drops queued stores that are worth less, if that makes room. Throws
  // std::bad_alloc, and has taken and dropped nothing then.
  Submit submit(const Order& order, Time now);
  bool cancel(Ticket ticket, Time now);
  // Somebody else wants it, by this deadline: serve it with at least this priority and for whoever waits until earlier,
  // and end it at the later deadline. False when there is nothing left to serve.
  bool promote(Ticket ticket, Priority priority, Time deadline);
  void expire(Time now);  // ends what is overdue
  Time next_deadline() const { return next_deadline_; }

  bool has_work(std::span<const Lane> lanes) const;  // that the caps allow now
  // Pages for an executor of these lanes, in the order of service; false if there are none that the caps allow.
  bool take(std::span<const Lane> lanes, std::uint32_t max_pages, std::size_t max_bytes, Time now, Chunk* chunk);
  // The taken pages have ended, with a status each: all of what was taken,
  void finish(const Chunk& chunk, const PageStatus* status, Time now);
  // or, of a transfer that is not cut, some of them, whose bytes are released by another call.
  void finish(Transfer& transfer, int hop, std::span<const std::uint32_t> pages, const PageStatus* status, Time now) {
    finish(transfer, hop, 0, pages, status, now);
  }
  // Their bytes no longer count as in flight: they ended, or hang and must not hold up the rest.
  void release_bytes(Lane lane, std::size_t pages) { lanes_[index_of(lane)].in_flight -= pages * page_bytes(lane); }
  void end(Transfer& transfer, PageStatus why, Time now);  // no further hop of it starts
  void take_disk_offline(Time now);                        // queued and future disk hops fail at once
  void stall_disk(Time now);                               // the same, and what is under way there is overdue
  void close(Time now);                                    // cancels all, refuses more
  // Once closed: settles what is under way as cancelled. Whoever has it may still look at it, but finish it no more.
  void abandon(Time now);

  bool has_reports() const { return first_listed_ != nullptr; }
  // From when on somebody should be told: at once, but of stores in the background that went well kPatience after the
  // first of them, so that many are told together. kNever: there are no reports.
  Time tell_from() const { return tell_from_; }
  std::uint64_t reports() const { return reports_; }   // listed since construction
  bool next_report(Completion* completion, Time now);  // throws std::bad_alloc, and the report is still there then

  std::size_t pending() const { return by_ticket_.size(); }  // not yet reported to their end
  bool knows(Ticket ticket) const { return by_ticket_.contains(ticket); }
  // Of a transfer that is known: how many slices, from the first, are there; -1: not all of it will ever be.
  int slices_there(Ticket ticket) const;
  bool closed() const { return closed_; }
  bool abandoned() const { return abandoned_; }
  bool offline() const { return offline_; }
  LaneStats stats(Lane lane) const;
  std::size_t page_bytes(Lane lane) const {
    return is_disk(lane) ? options_.disk_page_bytes : options_.device_page_bytes;
  }
  std::size_t most_in_flight(Lane lane) const {
    const bool own = !is_disk(lane) && options_.device_bytes_in_flight != 0;
    return own ? options_.device_bytes_in_flight : options_.bytes_in_flight;
  }

 private:
  struct LaneState {
    explicit LaneState(std::size_t capacity) : queue(capacity) {}
    LaneQueue queue;
    std::uint64_t queued = 0;
    std::size_t in_flight = 0;  // bytes
    BusyMeter busy;
    Clock::duration queue_wait{};
    LaneStats totals;
  };

  LaneState& state(Lane lane) { return lanes_[index_of(lane)]; }
  std::size_t allowed_in_flight(Lane lane) const;
  bool allows(Lane lane) const;
  std::size_t bytes_of(const Transfer& transfer, int hop, std::uint32_t slice) const;
  void finish(Transfer& transfer, int hop, std::uint32_t slice, std::span<const std::uint32_t> pages,
              const PageStatus* status, Time now);
  std::uint64_t shortage(Lane lane, std::uint32_t count) const;
  static std::uint64_t droppable(const Transfer& transfer, Lane lane, const Order& order);
  bool can_make_room(const Order& order, std::span<const Lane> lanes) const;
  void make_room(const Order& order, std::span<const Lane> lanes, Time now);
  Transfer* new_transfer();
  void fill(Transfer& transfer, const Order& order, Time now);
  void queue_page(Hop& hop, std::uint32_t place, Time now);
  void mark(Transfer& transfer, int hop, std::uint32_t page, PageStatus status);
  void fail_waiting(Transfer& transfer, Hop& hop, PageStatus status, PageStatus later);
  void conclude(Transfer& transfer, Time now);
  void list(Transfer& transfer, Time now);
  void retire(Transfer* transfer);

  LedgerOptions options_;
  std::vector<LaneState> lanes_;
  std::vector<std::unique_ptr<Transfer>> owned_;
  std::vector<Transfer*> spare_;  // recycled, with their memory: a steady state allocates next to nothing
  std::vector<Transfer*> live_;
  std::vector<Transfer*> victims_;  // of make_room
  std::unordered_map<Ticket, Transfer*> by_ticket_;
  std::uint64_t held_pages_ = 0;  // of transfers not yet polled to their end: bounds the memory
  std::uint64_t sequence_ = 0;
  Time next_deadline_ = kNever;
  bool offline_ = false;
  bool closed_ = false;
  bool abandoned_ = false;
  Transfer* first_listed_ = nullptr;
  Transfer* last_listed_ = nullptr;
  std::uint64_t reports_ = 0;
  Time tell_from_ = kNever;
};

}  // namespace kvtier
