// The hops that wait for one lane, best first: a binary heap that knows each hop's place, so that a cancelled one
// leaves at once.
#pragma once

#include <cstddef>
#include <vector>

#include "mover/transfer.hpp"

namespace kvtier {

class LaneQueue {
 public:
  explicit LaneQueue(std::size_t capacity) { heap_.reserve(capacity); }

  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  Hop* best() const { return heap_.front(); }
  bool contains(const Hop& hop) const { return hop.heap_index >= 0; }
  void push(Hop& hop);
  void remove(Hop& hop);

 private:
  void place(std::size_t index, Hop* hop);
  void rise(std::size_t index);
  void sink(std::size_t index);

  std::vector<Hop*> heap_;
};

}  // namespace kvtier
