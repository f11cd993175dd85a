// Lanes by their names, priorities by their numbers and deadlines by their seconds, as Python says them.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.hpp"
#include "common/lane.hpp"
#include "mover/transfer.hpp"

namespace kvtier {

inline std::optional<Lane> lane_named(const std::string& name) {
  for (int i = 0; i < kLanes; ++i)
    if (name == lane_name(static_cast<Lane>(i))) return static_cast<Lane>(i);
  return std::nullopt;
}

inline Priority priority_of(int priority) {
  if (priority >= 0 && priority < kPriorities) return static_cast<Priority>(priority);
  throw std::invalid_argument("priority: " + std::to_string(priority) + "; accepted: " + kPrioritiesText);
}

// On the monotonic clock; 0: there is none.
inline Time deadline_of(double deadline_s) { return deadline_s > 0 ? Time(seconds(deadline_s)) : kNever; }

}  // namespace kvtier
