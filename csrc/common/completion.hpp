// What the data plane says of a transfer; both planes read it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/lane.hpp"
#include "common/types.hpp"

namespace kvtier {

inline constexpr int kMaxHops = 2;

struct HopReport {
  Lane lane = Lane::kOffload;
  std::uint64_t bytes = 0;
  double queue_s = 0;    // from its first page being ready to that page being taken
  double busy_s = 0;     // with at least one page being moved
  double started_s = 0;  // its first page was taken, and its last one came back; on the monotonic clock, 0: never
  double ended_s = 0;
  std::uint64_t carried = 0;  // bytes moved in that time, also those that nobody wanted any more
};

// What is said of a transfer, at most twice: early, with some pages still kPending, and finally. A status once said
// never changes.
struct Completion {
  Ticket ticket = 0;
  bool final = true;
  std::uint32_t count = 0;
  int hop_count = 0;
  std::vector<PageStatus> status;  // [hop_count][count]
  HopReport hops[kMaxHops];
  double submitted_s = 0;  // both on the monotonic clock
  double finished_s = 0;   // of an early report: when it was read

  bool whole() const {  // every page is there, on every hop
    return std::all_of(status.begin(), status.end(), [](PageStatus page) { return page == PageStatus::kOk; });
  }
};

}  // namespace kvtier
