// Lanes by their names, as Python says them.
#pragma once

#include <optional>
#include <string>

#include "common/lane.hpp"

namespace kvtier {

inline std::optional<Lane> lane_named(const std::string& name) {
  for (int i = 0; i < kLanes; ++i)
    if (name == lane_name(static_cast<Lane>(i))) return static_cast<Lane>(i);
  return std::nullopt;
}

}  // namespace kvtier
