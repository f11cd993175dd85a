// A FileEngine that does real I/O, but only when the test lets it, in the order in which it was asked.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/file_engine.hpp"

namespace kvtier::test {

inline constexpr std::chrono::seconds kPatience{60};  // a bound, never a measure

class Gate {
 public:
  using Spoil = std::function<std::optional<std::int64_t>(const IoRequest&)>;

  explicit Gate(bool open = true) : open_(open) {}

  // -- for the test
  void spoil(Spoil spoil) {  // a result in place of the operation
    const std::lock_guard lock(mutex_);
    spoil_ = std::move(spoil);
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    while (!waiting_.empty()) run_first();
    changed_.notify_all();
  }
  void shut() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void let_through(std::size_t count) {  // waits for that many to be asked for
    for (std::size_t i = 0; i < count; ++i) {
      std::unique_lock lock(mutex_);
      if (!changed_.wait_for(lock, kPatience, [&] { return !waiting_.empty(); }))
        throw std::runtime_error("no I/O came");
      run_first();
      changed_.notify_all();
    }
  }
  bool await_waiting(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return waiting_.size() >= count; });
  }
  std::vector<IoRequest> seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

 private:
  friend class GatedEngine;

  void run_first() {
    const IoRequest r = waiting_.front();
    waiting_.pop_front();
    if (spoil_) {
      if (const auto result = spoil_(r)) return done_.push_back({r.tag, *result});
    }
    const auto at = static_cast<off_t>(r.offset);
    const ssize_t n = r.write ? ::pwrite(r.fd, r.buffer, r.length, at) : ::pread(r.fd, r.buffer, r.length, at);
    done_.push_back({r.tag, n >= 0 ? n : -errno});
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_;
  bool woken_ = false;
  Spoil spoil_;
  std::deque<IoRequest> waiting_;
  std::vector<IoRequest> seen_;
  std::deque<IoResult> done_;
};

class GatedEngine final : public FileEngine {
 public:
  GatedEngine(std::shared_ptr<Gate> gate, std::size_t depth) : gate_(std::move(gate)), depth_(depth) {}

  bool submit(const IoRequest& request) override {
    if (in_flight_ == depth_) return false;
    ++in_flight_;
    const std::lock_guard lock(gate_->mutex_);
    gate_->seen_.push_back(request);
    gate_->waiting_.push_back(request);
    if (gate_->open_) gate_->run_first();
    gate_->changed_.notify_all();
    return true;
  }
  void flush() override {}
  std::size_t reap(IoResult* results, std::size_t max, std::chrono::nanoseconds timeout) override {
    std::unique_lock lock(gate_->mutex_);
    gate_->changed_.wait_for(lock, timeout, [&] { return gate_->woken_ || !gate_->done_.empty(); });
    gate_->woken_ = false;
    std::size_t count = 0;
    for (; count < max && !gate_->done_.empty(); ++count) {
      results[count] = gate_->done_.front();
      gate_->done_.pop_front();
    }
    in_flight_ -= count;
    return count;
  }
  std::size_t in_flight() const override { return in_flight_; }
  void wake() override {
    const std::lock_guard lock(gate_->mutex_);
    gate_->woken_ = true;
    gate_->changed_.notify_all();
  }
  const char* name() const override { return "gated"; }

 private:
  std::shared_ptr<Gate> gate_;
  std::size_t depth_;
  std::size_t in_flight_ = 0;
};

}  // namespace kvtier::test
