#include "io/throttled_engine.hpp"

#include <time.h>

#include <algorithm>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvtier {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;
using Time = steady_clock::time_point;

constexpr std::chrono::milliseconds kLook{1};  // how often a waiting reap() looks whether it was woken

class ThrottledEngine final : public FileEngine {
 public:
  ThrottledEngine(std::unique_ptr<FileEngine> inner, std::shared_ptr<Throttle> drive)
      : inner_(std::move(inner)), drive_(std::move(drive)), name_(std::string("throttled ") + inner_->name()) {}

  bool submit(const IoRequest& request) override {
    if (!inner_->submit(request)) return false;
    const double rate = drive_->bytes_per_s();
    const double seconds = drive_->latency_s() + (rate > 0 ? static_cast<double>(request.length) / rate : 0.0);
    free_at_ = std::max(free_at_, steady_clock::now()) + nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
    due_[request.tag] = free_at_;
    return true;
  }

  void flush() override { inner_->flush(); }

  std::size_t reap(IoResult* results, std::size_t max, nanoseconds timeout) override {
    const Time limit = steady_clock::now() + timeout;
    for (;;) {
      collect();
      const Time now = steady_clock::now();
      const std::size_t count = give(results, max, now);
      if (count > 0 || now >= limit || woken_.exchange(false) || in_flight() == 0) return count;
      const Time next = held_.empty() ? limit : std::min(limit, held_.front().due);
      const nanoseconds left = std::max(nanoseconds(0), std::min<nanoseconds>(next - now, kLook));
      if (inner_->in_flight() > 0) {
        await(left);
      } else {
        const timespec pause{0, static_cast<long>(left.count())};
        ::nanosleep(&pause, nullptr);
      }
    }
  }

  std::size_t in_flight() const override { return inner_->in_flight() + held_.size(); }

  void wake() override {
    woken_ = true;
    inner_->wake();
  }

  const char* name() const override { return name_.c_str(); }

 private:
  struct Held {
    IoResult result;
    Time due;
  };

  void collect() { await(nanoseconds(0)); }

  void await(nanoseconds timeout) {
    IoResult ended[16];
    const std::size_t count = inner_->reap(ended, 16, timeout);
    for (std::size_t i = 0; i < count; ++i) {
      const auto found = due_.find(ended[i].tag);
      held_.push_back({ended[i], found->second});
      due_.erase(found);
    }
    if (count > 0) {
      std::stable_sort(held_.begin(), held_.end(), [](const Held& a, const Held& b) { return a.due < b.due; });
    }
  }

  std::size_t give(IoResult* results, std::size_t max, Time now) {
    std::size_t count = 0;
    while (count < max && !held_.empty() && held_.front().due <= now) {
      results[count++] = held_.front().result;
      held_.pop_front();
    }
    return count;
  }

  std::unique_ptr<FileEngine> inner_;
  std::shared_ptr<Throttle> drive_;
  std::string name_;
  std::atomic<bool> woken_{false};
  Time free_at_{};  // when the emulated drive has served all that was submitted
  std::unordered_map<std::uint64_t, Time> due_;
  std::deque<Held> held_;  // ended, and not yet due
};

}  // namespace

std::unique_ptr<FileEngine> make_throttled_engine(std::unique_ptr<FileEngine> inner, std::shared_ptr<Throttle> drive) {
  return std::make_unique<ThrottledEngine>(std::move(inner), std::move(drive));
}

}  // namespace kvtier
