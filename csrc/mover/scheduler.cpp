#include "mover/scheduler.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

namespace kvtier {

Scheduler::Scheduler(const LedgerOptions& options) : ledger_(options), fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Scheduler::~Scheduler() { ::close(fd_); }

Scheduler::News Scheduler::news() {
  News news;
  news.copies = ledger_.has_work(kCopyLanes);
  news.disk = ledger_.has_work(kDiskLanes);
  news.reports = ledger_.reports() != announced_;
  announced_ = ledger_.reports();
  publish();
  if (news.disk) wake_reaper();
  if (armed_ && !signalled_ && ledger_.has_reports()) {
    signalled_ = eventfd_write(fd_, 1) == 0;
  }
  return news;
}

void Scheduler::publish() {
  tell_from_.store(ledger_.tell_from().time_since_epoch().count(), std::memory_order_relaxed);
  next_deadline_.store(ledger_.next_deadline().time_since_epoch().count(), std::memory_order_relaxed);
}

void Scheduler::tell(const News& news) {
  if (news.copies) copy_work_.notify_one();
  if (news.disk) disk_work_.notify_one();
  if (news.reports) {
    reported_.notify_all();
    slice_there_.notify_all();
  }
}

void Scheduler::wake_reaper() {
  if (!waker_armed_ || !waker_) return;
  waker_armed_ = false;
  waker_();
}

// ---- callers -----------------------------------------------------------------------------------------------------

Submit Scheduler::submit(const Order& order) {
  std::unique_lock lock(mutex_);
  Submit result{};
  try {
    result = ledger_.submit(order, Clock::now());
  } catch (const std::bad_alloc&) {
    announce();  // what it found overdue
    throw;
  }
  const News news = this->news();
  lock.unlock();
  tell(news);
  return result;
}

bool Scheduler::cancel(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const bool known = ledger_.cancel(ticket, Clock::now());
  announce();
  slice_there_.notify_all();  // of what is under way there is nothing to report yet, but it will never be whole
  return known;
}

bool Scheduler::promote(Ticket ticket, Priority priority, Time deadline) {
  const std::lock_guard lock(mutex_);
  const bool known = ledger_.promote(ticket, priority, deadline);
  publish();
  return known;
}

std::size_t Scheduler::poll(std::vector<Completion>* out) {
  const std::lock_guard lock(mutex_);
  const Time now = Clock::now();
  ledger_.expire(now);
  std::size_t count = 0;
  try {
    for (; ledger_.has_reports(); ++count) {
      if (out->size() == out->capacity()) out->reserve(2 * out->size() + 8);
      Completion completion;
      ledger_.next_report(&completion, now);
      out->push_back(std::move(completion));
    }
  } catch (const std::bad_alloc&) {  // the rest is told when there is memory for it
    announce();
    if (count == 0) throw;
  }
  if (signalled_ && !ledger_.has_reports()) {  // whoever armed it stays armed: this poll may be another thread's
    eventfd_t ignored;
    eventfd_read(fd_, &ignored);
    signalled_ = false;
  }
  announce();  // what expired, to others who wait
  return count;
}

bool Scheduler::has_reports(Time now, bool routine) {
  const Time until = routine ? kNever - Clock::duration(1) : now;
  const auto told_by = [until](Time from) { return from <= until; };
  if (told_by(Time(Clock::duration(tell_from_.load(std::memory_order_relaxed))))) return true;
  if (now.time_since_epoch().count() < next_deadline_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(mutex_);
  ledger_.expire(now);
  announce();
  return told_by(ledger_.tell_from());
}

bool Scheduler::wait(Time until, std::uint64_t seen) {
  std::unique_lock lock(mutex_);
  const auto something = [&] { return ledger_.has_reports() || ledger_.reports() != seen; };
  reported_.wait_until(lock, until, [&] { return something() || ledger_.closed(); });
  return something();
}

bool Scheduler::wait_slices(Ticket ticket, int count, Time until) {
  std::unique_lock lock(mutex_);
  for (;;) {
    ledger_.expire(Clock::now());
    announce();
    const int there = ledger_.slices_there(ticket);
    if (there < 0 || there >= count) return there >= count;
    if (ledger_.closed() || Clock::now() >= until) return false;
    slice_there_.wait_until(lock, std::min(until, ledger_.next_deadline()));
  }
}

std::uint64_t Scheduler::reports() const {
  const std::lock_guard lock(mutex_);
  return ledger_.reports();
}

void Scheduler::arm(bool on) {
  const std::lock_guard lock(mutex_);
  armed_ = on;
  announce();
}

std::size_t Scheduler::pending() const {
  const std::lock_guard lock(mutex_);
  return ledger_.pending();
}

bool Scheduler::knows(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  return ledger_.knows(ticket);
}

LaneStats Scheduler::stats(Lane lane) const {
  const std::lock_guard lock(mutex_);
  return ledger_.stats(lane);
}

bool Scheduler::offline() const {
  const std::lock_guard lock(mutex_);
  return ledger_.offline();
}

void Scheduler::close() {
  const std::lock_guard lock(mutex_);
  ledger_.close(Clock::now());
  announce();
  wake_reaper();
  copy_work_.notify_all();
  disk_work_.notify_all();
  reported_.notify_all();
  slice_there_.notify_all();
}

// ---- executors ---------------------------------------------------------------------------------------------------

bool Scheduler::take_copy(Chunk* chunk) {
  // Small enough that a demand load waits for a background store's chunk for a fraction of a millisecond.
  constexpr std::size_t kChunkBytes = 1u << 20;
  std::unique_lock lock(mutex_);
  for (;;) {
    const bool taken = ledger_.take(kCopyLanes, Chunk::kMaxPages, kChunkBytes, Clock::now(), chunk);
    announce();  // what expired; and another thread, if there is more to take
    if (taken) return true;
    if (ledger_.closed()) return false;
    copy_work_.wait(lock);
  }
}

bool Scheduler::take_copy_now(Lane lane, std::size_t max_bytes, Chunk* chunk) {
  const std::lock_guard lock(mutex_);
  const bool taken = ledger_.take({&lane, 1}, Chunk::kMaxPages, max_bytes, Clock::now(), chunk);
  announce();
  return taken;
}

bool Scheduler::wait_copy(std::span<const Lane> lanes, Time until) {
  std::unique_lock lock(mutex_);
  const auto something = [&] { return ledger_.has_work(lanes) || copies_woken_; };
  if (until == kNever) {  // a wait with a time limit so far away overflows
    copy_work_.wait(lock, [&] { return something() || ledger_.closed(); });
  } else {
    copy_work_.wait_until(lock, until, something);
  }
  copies_woken_ = false;
  return ledger_.has_work(lanes) || !ledger_.closed();
}

void Scheduler::wake_copies() {
  const std::lock_guard lock(mutex_);
  copies_woken_ = true;
  copy_work_.notify_one();
}

bool Scheduler::take_disk(std::uint32_t max_pages, std::size_t max_bytes, Chunk* chunk) {
  const std::lock_guard lock(mutex_);
  const bool taken = ledger_.take(kDiskLanes, max_pages, max_bytes, Clock::now(), chunk);
  announce();
  return taken;
}

bool Scheduler::wait_disk() {
  std::unique_lock lock(mutex_);
  disk_work_.wait(lock, [&] { return ledger_.has_work(kDiskLanes) || ledger_.closed(); });
  return ledger_.has_work(kDiskLanes);
}

Time Scheduler::before_reap(bool wants_work) {
  const std::lock_guard lock(mutex_);
  ledger_.expire(Clock::now());
  announce();
  if (wants_work && ledger_.has_work(kDiskLanes)) return Time::min();
  waker_armed_ = wants_work;
  return ledger_.next_deadline();
}

void Scheduler::set_waker(std::function<void()> waker) {
  const std::lock_guard lock(mutex_);
  waker_ = std::move(waker);
  waker_armed_ = false;
}

bool Scheduler::closed() const {
  const std::lock_guard lock(mutex_);
  return ledger_.closed();
}

void Scheduler::finish(const Chunk& chunk, const PageStatus* status) {
  std::unique_lock lock(mutex_);
  if (ledger_.abandoned()) return;
  const bool cut = chunk.transfer->slices.cut();
  ledger_.finish(chunk, status, Clock::now());
  const News news = this->news();
  lock.unlock();
  if (cut) slice_there_.notify_all();
  tell(news);
}

void Scheduler::finish(Transfer& transfer, int hop, std::span<const std::uint32_t> pages, const PageStatus* status,
                       bool release_bytes) {
  std::unique_lock lock(mutex_);
  if (ledger_.abandoned()) return;
  if (release_bytes) ledger_.release_bytes(transfer.hops[hop].lane, pages.size());
  ledger_.finish(transfer, hop, pages, status, Clock::now());
  const News news = this->news();
  lock.unlock();
  tell(news);
}

void Scheduler::landed(Lane lane, std::size_t pages) {
  const std::lock_guard lock(mutex_);
  ledger_.release_bytes(lane, pages);  // whoever takes more work is the one who tells of it
}

void Scheduler::stalled(Transfer& transfer, Lane lane, std::size_t pages) {
  const std::lock_guard lock(mutex_);
  if (ledger_.abandoned()) return;
  ledger_.release_bytes(lane, pages);
  ledger_.end(transfer, PageStatus::kOverdue, Clock::now());
  announce();
}

void Scheduler::take_disk_offline() {
  const std::lock_guard lock(mutex_);
  ledger_.take_disk_offline(Clock::now());
  announce();
}

void Scheduler::stall_disk() {
  const std::lock_guard lock(mutex_);
  ledger_.stall_disk(Clock::now());
  announce();
}

void Scheduler::abandon() {
  const std::lock_guard lock(mutex_);
  ledger_.abandon(Clock::now());
  announce();
}

}  // namespace kvtier
