// A load in slices: each is a range of every page's bytes, a few layers, and comes before the next one begins. So an
// engine may compute the first layers while the others are on their way.
//
//   page 0   |== 1 ==|== 4 ==|-- 7 --|     the order in which they are copied;
//   page 1   |== 2 ==|-- 5 --|-- 8 --|     of three slices the first is there
//   page 2   |== 3 ==|-- 6 --|-- 9 --|
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/types.hpp"
#include "copy/segments.hpp"

namespace kvtier {

// Of one hop. A transfer that is not cut is one slice of whole pages, and costs nothing here.
class Slices {
 public:
  // `cuts`: how many of a page's first bytes each slice and those before it make up; empty: one slice.
  void reset(std::span<const std::size_t> cuts, std::uint32_t pages);

  bool cut() const { return !cuts_.empty(); }
  std::uint32_t count() const { return cut() ? static_cast<std::uint32_t>(cuts_.size()) : 1; }
  ByteRange range(std::uint32_t slice) const { return {slice == 0 ? 0 : cuts_[slice - 1], cuts_[slice]}; }

  // A slice of a page ended with `status`. Returns what the page as a whole ended with, kPending while more of its
  // slices are to end. The first failure counts.
  PageStatus note(std::uint32_t slice, std::uint32_t page, PageStatus status);
  // Slices, from the first, that every page has.
  std::uint32_t there() const { return there_; }
  bool broken() const { return broken_; }  // some page will never be whole

 private:
  std::vector<std::size_t> cuts_;
  std::vector<std::uint32_t> missing_;  // of each slice, pages
  std::vector<std::uint32_t> left_;     // of each page, slices that have not ended
  std::vector<PageStatus> worst_;       // of each page
  std::uint32_t there_ = 0;
  bool broken_ = false;
};

}  // namespace kvtier
