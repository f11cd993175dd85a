// A lane is one direction between two tiers. Each has its own bounded queue; which thread serves it is the
// executors' matter.
#pragma once

#include <cstdint>
#include <optional>

#include "common/types.hpp"

namespace kvtier {

enum class Lane : std::uint8_t {
  kOffload = 0,  // device → host
  kOnboard = 1,  // host → device
  kSpill = 2,    // host → disk
  kStage = 3,    // disk → host
};
inline constexpr int kLanes = 4;
inline constexpr Lane kCopyLanes[] = {Lane::kOffload, Lane::kOnboard};
inline constexpr Lane kDiskLanes[] = {Lane::kSpill, Lane::kStage};

// Who waits for a transfer. Smaller is served first.
enum class Priority : std::uint8_t { kDemand = 0, kPrefetch = 1, kBackground = 2 };
inline constexpr int kPriorities = 3;
inline constexpr const char* kPrioritiesText = "0 demand, 1 prefetch, 2 background";
constexpr bool is_priority(Priority priority) { return static_cast<int>(priority) < kPriorities; }

constexpr bool is_store(Lane lane) { return lane == Lane::kOffload || lane == Lane::kSpill; }
constexpr bool is_disk(Lane lane) { return lane == Lane::kSpill || lane == Lane::kStage; }
constexpr int index_of(Lane lane) { return static_cast<int>(lane); }

constexpr const char* lane_name(Lane lane) {
  constexpr const char* names[kLanes] = {"offload", "onboard", "spill", "stage"};
  return names[index_of(lane)];
}

constexpr std::optional<Lane> lane_between(Tier from, Tier to) {
  if (from == Tier::kDevice && to == Tier::kHost) return Lane::kOffload;
  if (from == Tier::kHost && to == Tier::kDevice) return Lane::kOnboard;
  if (from == Tier::kHost && to == Tier::kDisk) return Lane::kSpill;
  if (from == Tier::kDisk && to == Tier::kHost) return Lane::kStage;
  return std::nullopt;
}

}  // namespace kvtier
