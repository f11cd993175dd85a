#include "copy/segments.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvtier {
namespace {

std::uintptr_t first_byte(const Segment& s) { return reinterpret_cast<std::uintptr_t>(s.base); }
std::uintptr_t end_byte(const Segment& s, Slot slots) { return first_byte(s) + (slots - 1) * s.stride + s.length; }

// Whether two segments share a byte in any pair of slots. Pieces of interleaved pages have equal strides, where it is
// a question of their offset within one stride; other pairs must lie apart altogether.
bool overlap(const Segment& x, const Segment& y, Slot slots) {
  if (first_byte(x) > first_byte(y)) return overlap(y, x, slots);
  if (end_byte(x, slots) <= first_byte(y)) return false;
  if (slots == 1 || x.stride != y.stride) return true;
  const std::size_t offset = (first_byte(y) - first_byte(x)) % x.stride;
  return offset < x.length || offset + y.length > x.stride;
}

[[noreturn]] void refuse(std::size_t index, const std::string& why) {
  throw std::invalid_argument("segments[" + std::to_string(index) + "] " + why);
}

}  // namespace

DevicePool::DevicePool(std::vector<Segment> segments, Slot slots) : segments_(std::move(segments)), slots_(slots) {
  if (slots_ == 0 || slots_ == kNoSlot) {
    throw std::invalid_argument("slots is " + std::to_string(slots_) + "; accepted are 1 to 4294967294");
  }
  if (segments_.empty()) throw std::invalid_argument("segments is empty; a page needs at least one");
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& s = segments_[i];
    if (s.base == nullptr) refuse(i, "has a null base");
    if (s.length == 0) refuse(i, "has length 0");
    if (slots_ > 1 && s.stride < s.length) {
      refuse(i, "has stride " + std::to_string(s.stride) + ", less than its length " + std::to_string(s.length) +
                    ": its slots would overlap");
    }
    if (s.length > UINTPTR_MAX - first_byte(s) || s.stride > (UINTPTR_MAX - first_byte(s) - s.length) / slots_)
      refuse(i, "reaches past the address space");
    for (std::size_t j = 0; j < i; ++j) {
      if (overlap(segments_[j], s, slots_)) refuse(i, "shares memory with segments[" + std::to_string(j) + "]");
    }
    payload_bytes_ += s.length;
  }
}

}  // namespace kvtier
