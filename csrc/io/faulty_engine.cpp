#include "io/faulty_engine.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "io/file_trace.hpp"
#include "io/spoil.hpp"

namespace kvtier {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;
using Kind = FaultPlan::Kind;

constexpr std::chrono::milliseconds kLook{1};  // how often a waiting reap() looks at what it holds back

class FaultyEngine final : public FileEngine {
 public:
  FaultyEngine(std::unique_ptr<FileEngine> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), name_(std::string("faulty ") + inner_->name()) {}

  bool submit(const IoRequest& request) override {
    if (in_flight() >= kLimit) return false;
    if (request.write && plan_->has(Kind::kStale)) spoil::former().keep(request.fd, request.offset, request.length);
    const std::optional<FaultPlan::Fault> fault =
        plan_->next(request.write ? FaultPlan::On::kWrite : FaultPlan::On::kRead);
    return fault ? submit_spoiled(request, *fault) : start(request);
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
    std::uint64_t released;  // how often everything had been released when it was held back
    std::optional<steady_clock::time_point> due;
  };
  // What is to be done when the operation has ended.
  struct Spoiled {
    IoRequest request;
    FaultPlan::Fault fault;
  };

  bool submit_spoiled(const IoRequest& request, const FaultPlan::Fault& fault) {
    IoRequest other = request;
    switch (fault.kind) {
      case Kind::kError:
        return end(request, -static_cast<std::int64_t>(fault.value));
      case Kind::kShort:
        other.length -= std::min<std::size_t>(fault.value, request.length);
        return other.length > 0 ? start(other) : end(request, 0);
      case Kind::kFlip:
        if (request.write) spoil::flip(request.buffer, request.length, fault.value);
        spoiled_.push_back({request, fault});
        return start(request);
      case Kind::kDelay:
        held_.push_back({request, fault.released, due(fault.value)});
        return true;
      case Kind::kTorn:
        other.length = fault.value % request.length;
        if (other.length == 0) return end(request, static_cast<std::int64_t>(request.length));
        spoiled_.push_back({request, fault});
        return start(other);
      case Kind::kLost:
        return end(request, static_cast<std::int64_t>(request.length));
      case Kind::kMisdirected:
        other.offset = spoil::astray(request.fd, request.offset, request.length, fault.value);
        return start(other);
      case Kind::kStale:
        spoiled_.push_back({request, fault});
        return start(request);
      case Kind::kTornCrash:
        if (request.write) tear(request);
        [[fallthrough]];
      case Kind::kCrash:
        crash_now();
    }
    return start(request);
  }

  bool end(const IoRequest& request, std::int64_t result) {
    ended_.push_back({request.tag, result});
    return true;
  }

  // Half of it, in whole sectors, and what was submitted before: the process ends, the kernel goes on.
  static void tear(const IoRequest& request) {
    const std::size_t half = request.length / 2 / 512 * 512;
    [[maybe_unused]] const auto written =
        ::pwrite(request.fd, request.buffer, half, static_cast<off_t>(request.offset));
  }

  static std::optional<steady_clock::time_point> due(std::uint64_t delay) {
    if (delay == FaultPlan::kForever) return std::nullopt;
    return steady_clock::now() + nanoseconds(delay);
  }

  // Always true, so that an operation is counted once: what the real engine has no room for yet begins later.
  bool start(const IoRequest& request) {
    if (request.write) trace::writes(request.fd, request.offset, request.buffer, request.length);
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
        std::find_if(spoiled_.begin(), spoiled_.end(), [&](const Spoiled& s) { return s.request.tag == result.tag; });
    if (found == spoiled_.end()) return;
    const auto& [request, fault] = *found;
    if (fault.kind == Kind::kFlip) spoil::flip(request.buffer, request.length, fault.value);
    if (fault.kind == Kind::kStale) {
      spoil::former().restore(request.fd, request.offset, request.buffer, request.length, fault.value);
    }
    if (fault.kind == Kind::kTorn && result.result >= 0) result.result = static_cast<std::int64_t>(request.length);
    spoiled_.erase(found);
  }

  std::unique_ptr<FileEngine> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::string name_;
  std::atomic<bool> woken_{false};
  std::vector<IoResult> ended_;
  std::vector<Held> held_;
  std::vector<Spoiled> spoiled_;
};

}  // namespace

std::unique_ptr<FileEngine> make_faulty_engine(std::unique_ptr<FileEngine> inner, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyEngine>(std::move(inner), std::move(plan));
}

}  // namespace kvtier
