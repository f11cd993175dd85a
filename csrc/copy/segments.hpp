// What a page is made of on the device.
#pragma once

#include <cstddef>
#include <vector>

#include "common/types.hpp"

namespace kvtier {

// A contiguous piece of every page: slot s has it at base + s * stride. What is inside is opaque.
struct Segment {
  std::byte* base;
  std::size_t stride;
  std::size_t length;

  std::byte* at(Slot slot) const { return base + static_cast<std::size_t>(slot) * stride; }
};

// Some bytes of every page, counted in page order.
struct ByteRange {
  std::size_t begin, end;

  std::size_t size() const { return end - begin; }
};

// The device tier's pages, as segments of memory that someone else owns and keeps alive. A page's bytes are its
// segments' in order. Immutable, so any thread may use it.
class DevicePool {
 public:
  // Throws std::invalid_argument when no page could be made of these segments, or when two of them share a byte.
  DevicePool(std::vector<Segment> segments, Slot slots);

  Slot slots() const { return slots_; }
  std::size_t payload_bytes() const { return payload_bytes_; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  std::vector<Segment> segments_;
  Slot slots_;
  std::size_t payload_bytes_ = 0;
};

}  // namespace kvtier
