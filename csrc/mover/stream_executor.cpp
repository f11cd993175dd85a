#include "mover/stream_executor.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <functional>
#include <new>
#include <stdexcept>
#include <utility>

namespace kvtier {
namespace {

// How long an end may go unnoticed when nobody tells of it: a fraction of what a batch takes on the link.
constexpr auto kLook = std::chrono::microseconds(20);
// The same when the driver tells: only so that a call which is lost holds nothing up for ever.
constexpr auto kLookAnyway = std::chrono::milliseconds(50);

}  // namespace

StreamExecutor::StreamExecutor(Scheduler& scheduler, HostArena& host, std::unique_ptr<StreamCopier> copier,
                               bool verify_host, std::chrono::nanoseconds close_limit)
    : scheduler_(scheduler),
      host_(host),
      copier_(std::move(copier)),
      verify_host_(verify_host),
      close_limit_(close_limit),
      woken_(copier_->wake_by([this] { scheduler_.wake_copies(); })) {
  for (int i = 0; i < 2; ++i) {
    lanes_[i].lane = kCopyLanes[i];
    lanes_[i].batches.resize(copier_->places());
    lanes_[i].under_way.reserve(copier_->places());
    for (unsigned place = copier_->places(); place-- > 0;) lanes_[i].free.push_back(place);
  }
  thread_ = std::thread([this] { run(); });
}

StreamExecutor::~StreamExecutor() {
  join();
  // What never ended may still use the copier's events and staging memory, and the device waits for it.
  if (stuck()) static_cast<void>(copier_.release());
}

void StreamExecutor::join() {
  if (thread_.joinable()) thread_.join();
}

bool StreamExecutor::put_behind(std::uintptr_t stream, std::shared_ptr<DeviceFence>* fence) {
  try {
    *fence = copier_->fence(stream);
    if (refused_.load(std::memory_order_relaxed)) accept();
    return true;
  } catch (const std::exception& error) {  // in the engine's own step, which it must not end
    refuse(error.what());
    return false;
  }
}

void StreamExecutor::refuse(const char* why) noexcept {
  const std::lock_guard lock(note_mutex_);
  refused_.store(true, std::memory_order_relaxed);
  try {
    note_ = std::string("transfers are refused: ") + why;
  } catch (const std::bad_alloc&) {
    note_ = "out of memory";  // short enough to need none
  }
}

void StreamExecutor::accept() noexcept {
  const std::lock_guard lock(note_mutex_);
  refused_.store(false, std::memory_order_relaxed);
  note_.clear();
}

std::string StreamExecutor::note() const {
  const std::lock_guard lock(note_mutex_);
  return note_.empty() ? copier_->note() : note_;
}

void StreamExecutor::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // the default, 50 us, is longer than what is waited for
  Time closed_since = kNever;
  for (;;) {
    bool moved = reap(lanes_[0]);
    moved = reap(lanes_[1]) || moved;
    moved = fill() || moved;
    if (moved) continue;
    if (!under_way()) {
      if (!scheduler_.wait_copy(kCopyLanes, kNever)) return;
      continue;
    }
    if (scheduler_.closed()) {
      if (closed_since == kNever) closed_since = Clock::now();
      if (Clock::now() - closed_since > close_limit_) {
        return abandon();
      }
    }
    Lane open[2];
    std::size_t count = 0;
    for (const Lanes& lanes : lanes_) {
      if (!lanes.free.empty()) open[count++] = lanes.lane;
    }
    scheduler_.wait_copy({open, count}, look_again());
  }
}

// The end of the mover, with batches that do not end. Their transfers are told; their memory stays (stuck()).
void StreamExecutor::abandon() {
  stuck_.store(true);
  for (Lanes& lanes : lanes_) {
    for (const unsigned place : lanes.under_way) {
      PageBatch& batch = lanes.batches[place];
      std::fill_n(batch.status, batch.chunk.count, PageStatus::kCancelled);
      scheduler_.finish(batch.chunk, batch.status);
    }
  }
}

bool StreamExecutor::under_way() const { return !lanes_[0].under_way.empty() || !lanes_[1].under_way.empty(); }

Time StreamExecutor::look_again() const {
  return Clock::now() + (woken_ ? std::chrono::duration_cast<Clock::duration>(kLookAnyway)
                                : std::chrono::duration_cast<Clock::duration>(kLook));
}

bool StreamExecutor::reap(Lanes& lanes) {
  bool any = false;
  while (!lanes.under_way.empty()) {
    const unsigned place = lanes.under_way.front();
    if (!copier_->ended(lanes.lane, place)) break;
    PageBatch& batch = lanes.batches[place];
    batch.conclude(host_);
    scheduler_.finish(batch.chunk, batch.status);
    lanes.under_way.erase(lanes.under_way.begin());
    lanes.free.push_back(place);
    any = true;
  }
  return any;
}

// Loads first, one batch of each direction a turn: they do not share the link's bandwidth.
bool StreamExecutor::fill() {
  bool any = false;
  for (Lanes& lanes : {std::ref(lanes_[1]), std::ref(lanes_[0])}) {
    if (lanes.free.empty()) continue;
    const unsigned place = lanes.free.back();
    PageBatch& batch = lanes.batches[place];
    if (!scheduler_.take_copy_now(lanes.lane, copier_->batch_bytes(), &batch.chunk)) continue;
    lanes.free.pop_back();
    batch.prepare(host_, verify_host_);
    copier_->start(lanes.lane, place, batch.copies(), batch.range(), batch.chunk.transfer->fence.get());
    lanes.under_way.push_back(place);
    any = true;
  }
  return any;
}

}  // namespace kvtier
