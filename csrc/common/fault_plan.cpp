#include "common/fault_plan.hpp"

#include <unistd.h>

#include <algorithm>
#include <thread>

namespace kvtier {
namespace {

using Kind = FaultPlan::Kind;
using On = FaultPlan::On;

std::atomic<bool> in_use{false};
std::mutex use_mutex;
std::shared_ptr<FaultPlan> plan_in_use;

bool can_have(On operation, Kind kind) {
  switch (kind) {
    case Kind::kError:
    case Kind::kDelay:
    case Kind::kCrash:
    case Kind::kTornCrash:
      return true;
    case Kind::kShort:
    case Kind::kFlip:
    case Kind::kMisdirected:
      return operation == On::kRead || operation == On::kWrite;
    case Kind::kTorn:
    case Kind::kLost:
      return operation == On::kWrite;
    case Kind::kStale:
      return operation == On::kRead;
  }
  return false;
}

}  // namespace

void FaultPlan::add(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  faults_.push_back(fault);
}

void FaultPlan::clear() {
  const std::lock_guard lock(mutex_);
  faults_.clear();
}

void FaultPlan::release() {
  const std::lock_guard lock(mutex_);
  ++released_;
}

std::optional<FaultPlan::Fault> FaultPlan::next(On operation) {
  const std::lock_guard lock(mutex_);
  ++operations_;
  ++counts_[static_cast<int>(On::kAny)];
  ++counts_[static_cast<int>(operation)];
  for (Fault fault : faults_) {
    if (fault.on != On::kAny && fault.on != operation) continue;
    const std::uint64_t n = counts_[static_cast<int>(fault.on)];
    if (n < fault.first || n - fault.first >= fault.count || !can_have(operation, fault.kind)) continue;
    fault.released = released_;
    ++fired_;
    return fault;
  }
  return std::nullopt;
}

std::uint64_t FaultPlan::count(On operation) const {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<int>(operation)];
}

bool FaultPlan::has(Kind kind) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(faults_.begin(), faults_.end(), [kind](const Fault& fault) { return fault.kind == kind; });
}

void FaultPlan::sleep(const Fault& delay) const {
  if (delay.value != kForever) return std::this_thread::sleep_for(std::chrono::nanoseconds(delay.value));
  while (released() == delay.released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void use_faults(std::shared_ptr<FaultPlan> plan) {
  const std::lock_guard lock(use_mutex);
  in_use = plan != nullptr;
  plan_in_use = std::move(plan);
}

std::shared_ptr<FaultPlan> faults_in_use() {
  if (!in_use.load(std::memory_order_relaxed)) return nullptr;
  const std::lock_guard lock(use_mutex);
  return plan_in_use;
}

int fault_of(On operation) {
  const std::shared_ptr<FaultPlan> plan = faults_in_use();
  if (!plan) return 0;
  const std::optional<FaultPlan::Fault> fault = plan->next(operation);
  if (!fault) return 0;
  if (fault->kind == Kind::kError) return -static_cast<int>(fault->value);
  if (fault->kind == Kind::kDelay) {
    plan->sleep(*fault);
    return 0;
  }
  crash_now();
}

void crash_now() { ::_exit(kCrashStatus); }

}  // namespace kvtier
