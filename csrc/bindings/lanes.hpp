// Lanes by their names and priorities by their numbers, as Python says them.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "common/lane.hpp"

namespace kvtier {

inline std::optional<Lane> lane_named(const std::string& name) {
  for (int i = 0; i < kLanes; ++i)
    if (name == lane_name(static_cast<Lane>(i))) return static_cast<Lane>(i);
  return std::nullopt;
}

// What is none stays none, to be refused by name.
inline Priority priority_of(int priority) { return static_cast<Priority>(std::clamp(priority, 0, 255)); }

}  // namespace kvtier
