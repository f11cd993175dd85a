#include "copy/page_copy.hpp"

#include <cstring>

#include "copy/checksum.hpp"
#include "copy/lanes.hpp"

namespace kvtier {
namespace {

// Lanes are cut from the page, not from segments. They agree where every segment starts and ends on a lane, as KV
// always does in practice; then one pass copies and sums.
bool on_lanes(const DevicePool& pool) {
  for (const Segment& s : pool.segments()) {
    if (s.length % lanes::kLane != 0) return false;
  }
  return true;
}

}  // namespace

std::uint64_t gather(const DevicePool& pool, Slot slot, std::byte* page, std::size_t page_bytes, ChecksumKey key) {
  const std::size_t payload = pool.payload_bytes();
  std::memset(page + payload, 0, page_bytes - payload);
  std::byte* to = page;
  if (!on_lanes(pool)) {
    for (const Segment& s : pool.segments()) {
      std::memcpy(to, s.at(slot), s.length);
      to += s.length;
    }
    return checksum(page, payload, key);
  }
  const lanes::Kernels& kernels = lanes::best();
  const lanes::Keys keys = lanes::derive(key);
  lanes::Sum sum;
  for (const Segment& s : pool.segments()) {
    kernels.copy_sum(s.at(slot), to, s.length, static_cast<std::size_t>(to - page) / lanes::kLane, keys, sum);
    to += s.length;
  }
  return lanes::finish(sum, payload, keys);
}

void scatter(const std::byte* page, const DevicePool& pool, Slot slot) {
  const lanes::Kernels& kernels = lanes::best();
  for (const Segment& s : pool.segments()) {
    const std::size_t whole = s.length / lanes::kLane * lanes::kLane;
    kernels.copy(page, s.at(slot), whole);
    std::memcpy(s.at(slot) + whole, page + whole, s.length - whole);
    page += s.length;
  }
}

bool scatter_verified(const std::byte* page, const DevicePool& pool, Slot slot, ChecksumKey key,
                      std::uint64_t expected) {
  if (!on_lanes(pool)) {
    if (checksum(page, pool.payload_bytes(), key) != expected) return false;
    scatter(page, pool, slot);
    return true;
  }
  const lanes::Kernels& kernels = lanes::best();
  const lanes::Keys keys = lanes::derive(key);
  lanes::Sum sum;
  std::size_t done = 0;
  for (const Segment& s : pool.segments()) {
    kernels.copy_sum(page + done, s.at(slot), s.length, done / lanes::kLane, keys, sum);
    done += s.length;
  }
  return lanes::finish(sum, pool.payload_bytes(), keys) == expected;
}

}  // namespace kvtier
