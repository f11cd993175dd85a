// Words that every room of the engine shares. See docs/architecture.md for their meaning.
#pragma once

#include <cstdint>

namespace kvtier {

// Places. A Slot is the number of a page-sized place in one tier's pool, the same on every rank; a NodeId
// names a block in the catalog. They are never interchangeable.
using Slot = std::uint32_t;
using NodeId = std::uint32_t;
using Ticket = std::uint64_t;     // a transfer, for its whole life; 0 is never one
using RequestId = std::uint64_t;  // an engine's request; 0 is never one

inline constexpr Slot kNoSlot = 0xFFFFFFFFu;
inline constexpr NodeId kNoNode = 0xFFFFFFFFu;

enum class Tier : std::uint8_t { kDevice = 0, kHost = 1, kDisk = 2, kRemote = 3 };
inline constexpr int kTiers = 4;

constexpr const char* tier_name(Tier tier) {
  constexpr const char* names[kTiers] = {"device", "host", "disk", "remote"};
  return static_cast<int>(tier) < kTiers ? names[static_cast<int>(tier)] : "unknown";
}

// What became of one page on one hop. From kFirstLost on, the *source* page itself is bad and its entry must go;
// below it the source is as good as before.
enum class PageStatus : std::uint8_t {
  kPending = 0,     // not settled yet
  kOk = 1,          // the destination holds the page
  kSkipped = 2,     // an earlier hop of this page failed, so this one never ran
  kCancelled = 3,   // cancelled before this hop ran
  kOverdue = 4,     // the deadline passed before this hop ran
  kWriteError = 5,  // writing the destination failed
  kOffline = 6,     // the tier was out of service
  kReadError = 16,  // reading the source failed
  kShortRead = 17,
  kCorrupt = 18,  // the checksum did not match
  kStale = 19,    // the record says that the slot holds another page
};
inline constexpr PageStatus kFirstLost = PageStatus::kReadError;
inline constexpr int kPageStatuses = static_cast<int>(PageStatus::kStale) + 1;

}  // namespace kvtier
