// The ledger behind one mutex: where callers and executors meet. Every critical section is a few loads and stores per
// page; bytes are moved outside of it. Callers may hold Python's GIL; executors never need it.
//
// An idle executor waits without a time limit: a page that may be taken always has an executor awake for it (woken by
// whoever made it takeable), and deadlines are looked at whenever one looks for work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "mover/ledger.hpp"

namespace kvtier {

class Scheduler {
 public:
  explicit Scheduler(const LedgerOptions& options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // -- for callers
  Submit submit(const Order& order);
  bool cancel(Ticket ticket);
  bool promote(Ticket ticket, Priority priority, Time deadline);
  std::size_t poll(std::vector<Completion>* out);  // drains, as far as there is memory for it; never waits
  // Whether there is something to poll; nearly always without the lock. `routine`: also where it is only of what the
  // ledger would tell later.
  bool has_reports(Time now, bool routine = true);
  // Waits until there is something to poll, or something was reported after `seen` reports (another thread may have
  // polled it already). False: neither by `until`, or before the mover was closed.
  bool wait(Time until, std::uint64_t seen);
  std::uint64_t reports() const;
  // Waits until `count` slices of a transfer are there. False: not by `until`, or there is no such transfer (any more),
  // or it will never be whole.
  bool wait_slices(Ticket ticket, int count, Time until);
  int fd() const { return fd_; }  // readable while armed and something waits to be polled
  void arm(bool on);
  std::size_t pending() const;
  bool knows(Ticket ticket) const;
  LaneStats stats(Lane lane) const;
  bool offline() const;
  void close();  // cancels all; executors then run dry

  // -- for executors
  bool take_copy(Chunk* chunk);                                        // waits for work; false: closed, none left
  bool take_copy_now(Lane lane, std::size_t max_bytes, Chunk* chunk);  // never waits
  // Waits until `until` for work of these lanes, or for wake_copies(). False: closed, none left.
  bool wait_copy(std::span<const Lane> lanes, Time until);
  void wake_copies();
  bool take_disk(std::uint32_t max_pages, std::size_t max_bytes, Chunk* chunk);  // never waits
  bool wait_disk();  // with nothing in flight: waits for work; false: closed, none left
  // With I/O in flight: called before the executor waits for it. While it waits, new work that it could take
  // (`wants_work`) and close() call the waker. Returns until when to wait at most, the past if there is work already.
  Time before_reap(bool wants_work);
  void set_waker(std::function<void()> waker);  // null before what it wakes is gone
  bool closed() const;
  void finish(const Chunk& chunk, const PageStatus* status);
  void finish(Transfer& transfer, int hop, std::span<const std::uint32_t> pages, const PageStatus* status,
              bool release_bytes = true);
  void landed(Lane lane, std::size_t pages);  // their I/O has ended, and others may begin; finish() tells how it went
  void stalled(Transfer& transfer, Lane lane, std::size_t pages);  // an I/O hangs: stop waiting for it, not owning it
  void take_disk_offline();
  void stall_disk();  // the executor of the disk's lanes hangs as a whole
  void abandon();     // and will not come back before the end: settles what it holds; what it still says is not heard

 private:
  // Who has something to do now. Told while the lock is held, they would wake only to wait for it.
  struct News {
    bool copies = false;
    bool disk = false;
    bool reports = false;
  };
  News news();     // call with the lock held
  void publish();  // likewise, after whatever may have led to reports or to another deadline
  void tell(const News& news);
  void announce() { tell(news()); }  // for who keeps the lock
  void wake_reaper();

  mutable std::mutex mutex_;
  std::condition_variable copy_work_, disk_work_, reported_, slice_there_;
  Ledger ledger_;
  std::function<void()> waker_;
  bool waker_armed_ = false;
  bool copies_woken_ = false;
  std::uint64_t announced_ = 0;
  // Of the ledger, for who looks without the lock.
  std::atomic<Clock::rep> tell_from_{kNever.time_since_epoch().count()};
  std::atomic<Clock::rep> next_deadline_{kNever.time_since_epoch().count()};
  int fd_ = -1;
  bool armed_ = false;
  bool signalled_ = false;
};

}  // namespace kvtier
