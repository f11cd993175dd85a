#include "io/faulty_engine.hpp"

#include <time.h>

#include <algorithm>
#include <string>

namespace kvtier {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook{1};  // how often a waiting reap() looks at what it holds back

class FaultyEngine final : public FileEngine {
 public:
  FaultyEngine(std::unique_ptr<FileEngine> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), name_(std::string("faulty ") + inner_->name()) {}

  bool submit(const IoRequest& request) override {
    if (in_flight() >= kLimit) return false;
    const std::optional<FaultPlan::Fault> fault = plan_->next(request.write);
    if (!fault) return start(request);
    switch (fault->kind) {
      case FaultPlan::Kind::kError:
        ended_.push_back({request.tag, -static_cast<std::int64_t>(fault->value)});
        return true;
      case FaultPlan::Kind::kShort: {
        IoRequest shorter = request;
        shorter.length -= std::min<std::size_t>(fault->value, request.length);
        if (shorter.length > 0) return start(shorter);
        ended_.push_back({request.tag, 0});
        return true;
      }
      case FaultPlan::Kind::kFlip:
        flips_.push_back({request, fault->value});
        if (request.write) flip(flips_.back());
        return start(request);
      case FaultPlan::Kind::kDelay:
        held_.push_back({request, plan_->released(), due(fault->value)});
        return true;
    }
    return start(request);
  }

  void flush() override {
    start_due();
    inner_->flush();
  }

  std::size_t reap(IoResult* results, std::size_t max, nanoseconds timeout) override {
    const auto limit = steady_clock::now() + timeout;
    for (;;) {
      start_due();
      const nanoseconds left = limit - steady_clock::now();
      const bool wait = ended_.empty() && left > nanoseconds(0);
      const bool here = wait && inner_->in_flight() > 0;
      nanoseconds inner_timeout = here ? left : nanoseconds(0);
      if (!held_.empty()) inner_timeout = std::min<nanoseconds>(inner_timeout, kLook);
      std::size_t count = inner_->reap(results, max, inner_timeout);
      for (std::size_t i = 0; i < count; ++i) finish(results[i]);
      while (count < max && !ended_.empty()) {
        results[count++] = ended_.back();
        ended_.pop_back();
      }
      if (count > 0 || !wait || woken_.exchange(false) || in_flight() == 0) return count;
      if (!here) pause();
    }
  }

  std::size_t in_flight() const override { return inner_->in_flight() + held_.size() + ended_.size(); }

  void wake() override {
    woken_ = true;
    inner_->wake();
  }

  const char* name() const override { return name_.c_str(); }

 private:
  static constexpr std::size_t kLimit = 4096;

  struct Held {
    IoRequest request;
    std::uint64_t released;  // FaultPlan::released() when it was held back
    std::optional<steady_clock::time_point> due;
  };
  struct Flip {
    IoRequest request;
    std::uint64_t bit;
  };

  static std::optional<steady_clock::time_point> due(std::uint64_t delay) {
    if (delay == FaultPlan::kForever) return std::nullopt;
    return steady_clock::now() + nanoseconds(delay);
  }

  // Always true, so that an operation is counted once: what the real engine has no room for yet begins later.
  bool start(const IoRequest& request) {
    if (!inner_->submit(request)) held_.push_back({request, plan_->released(), steady_clock::now()});
    return true;
  }

  void start_due() {
    const auto now = steady_clock::now();
    std::erase_if(held_, [&](const Held& held) {
      const bool begin = (held.due && *held.due <= now) || plan_->released() > held.released;
      return begin && inner_->submit(held.request);
    });
  }

  static void pause() {
    const timespec look{0, std::chrono::nanoseconds(kLook).count()};
    ::nanosleep(&look, nullptr);
  }

  void finish(IoResult& result) {
    const auto found =
        std::find_if(flips_.begin(), flips_.end(), [&](const Flip& f) { return f.request.tag == result.tag; });
    if (found == flips_.end()) return;
    flip(*found);
    flips_.erase(found);
  }

  static void flip(const Flip& flip) {
    const std::uint64_t bit = flip.bit % (flip.request.length * 8);
    flip.request.buffer[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }

  std::unique_ptr<FileEngine> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::string name_;
  std::atomic<bool> woken_{false};
  std::vector<IoResult> ended_;
  std::vector<Held> held_;
  std::vector<Flip> flips_;
};

}  // namespace

void FaultPlan::add(const Fault& fault) {
  std::lock_guard lock(mutex_);
  faults_.push_back(fault);
}

void FaultPlan::clear() {
  std::lock_guard lock(mutex_);
  faults_.clear();
}

void FaultPlan::release() { ++released_; }

std::optional<FaultPlan::Fault> FaultPlan::next(bool write) {
  std::lock_guard lock(mutex_);
  ++operations_;
  ++counts_[static_cast<int>(On::kAny)];
  ++counts_[static_cast<int>(write ? On::kWrite : On::kRead)];
  for (const Fault& fault : faults_) {
    if (fault.on == (write ? On::kRead : On::kWrite)) continue;
    const std::uint64_t n = counts_[static_cast<int>(fault.on)];
    if (n < fault.first || n - fault.first >= fault.count) continue;
    ++fired_;
    return fault;
  }
  return std::nullopt;
}

std::unique_ptr<FileEngine> make_faulty_engine(std::unique_ptr<FileEngine> inner, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyEngine>(std::move(inner), std::move(plan));
}

}  // namespace kvtier
