#include "copy/page_copy.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
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

// Stores that bypass the cache are ordered by nothing else: without this, another thread that learns of the page might
// still read its old bytes.
void publish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Where a gather reads after segment `i` of `slot`: the next segment, or the next slot's first one, if there is any.
const std::byte* after(const DevicePool& pool, std::size_t i, Slot slot, Slot next) {
  const std::vector<Segment>& segments = pool.segments();
  if (i + 1 < segments.size()) return segments[i + 1].at(slot);
  return next < pool.slots() ? segments[0].at(next) : nullptr;
}

std::uint64_t copy_and_sum(const std::byte* page, const DevicePool& pool, Slot slot, lanes::Keys keys,
                           const std::byte* next) {
  const lanes::Kernels& kernels = lanes::best();
  lanes::Sum sum;
  std::size_t done = 0;
  for (const Segment& s : pool.segments()) {
    const std::byte* then = done + s.length < pool.payload_bytes() ? page + done + s.length : next;
    kernels.copy_sum(page + done, s.at(slot), s.length, done / lanes::kLane, keys, sum, then);
    done += s.length;
  }
  publish();
  return lanes::finish(sum, pool.payload_bytes(), keys);
}

}  // namespace

std::uint64_t gather(const DevicePool& pool, Slot slot, std::byte* page, std::size_t page_bytes, ChecksumKey key,
                     Slot next) {
  const std::vector<Segment>& segments = pool.segments();
  const std::size_t payload = pool.payload_bytes();
  std::memset(page + payload, 0, page_bytes - payload);
  std::byte* to = page;
  if (!on_lanes(pool)) {
    for (const Segment& s : segments) {
      std::memcpy(to, s.at(slot), s.length);
      to += s.length;
    }
    return checksum(page, payload, key);
  }
  const lanes::Kernels& kernels = lanes::best();
  const lanes::Keys keys = lanes::derive(key);
  lanes::Sum sum;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::uint64_t first = static_cast<std::size_t>(to - page) / lanes::kLane;
    kernels.copy_sum(segments[i].at(slot), to, segments[i].length, first, keys, sum, after(pool, i, slot, next));
    to += segments[i].length;
  }
  publish();
  return lanes::finish(sum, payload, keys);
}

void scatter(const std::byte* page, const DevicePool& pool, Slot slot, const std::byte* next) {
  scatter(page, pool, slot, {0, pool.payload_bytes()}, next);
}

void scatter(const std::byte* page, const DevicePool& pool, Slot slot, ByteRange range, const std::byte* next) {
  const lanes::Kernels& kernels = lanes::best();
  std::size_t at = 0;  // of the segment, in the page
  for (const Segment& s : pool.segments()) {
    const std::size_t begin = std::max(at, range.begin), end = std::min(at + s.length, range.end);
    if (begin < end) {
      std::byte* const to = s.at(slot) + (begin - at);
      const std::size_t whole = (end - begin) / lanes::kLane * lanes::kLane;
      const std::byte* const after = next != nullptr ? next + range.begin : nullptr;
      kernels.copy(page + begin, to, whole, end < range.end ? page + end : after);
      std::memcpy(to + whole, page + begin + whole, end - begin - whole);
    }
    at += s.length;
  }
  publish();
}

bool scatter_verified(const std::byte* page, const DevicePool& pool, Slot slot, ChecksumKey key, std::uint64_t expected,
                      const std::byte* next) {
  if (on_lanes(pool)) return copy_and_sum(page, pool, slot, lanes::derive(key), next) == expected;
  if (checksum(page, pool.payload_bytes(), key) != expected) return false;
  scatter(page, pool, slot, next);
  return true;
}

}  // namespace kvtier
