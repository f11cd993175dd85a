#include "mover/lane_queue.hpp"

namespace kvtier {

void LaneQueue::push(Hop& hop) {
  heap_.push_back(nullptr);
  place(heap_.size() - 1, &hop);
  rise(heap_.size() - 1);
}

void LaneQueue::remove(Hop& hop) {
  const auto hole = static_cast<std::size_t>(hop.heap_index);
  Hop* last = heap_.back();
  heap_.pop_back();
  hop.heap_index = -1;
  if (last == &hop) return;
  place(hole, last);
  rise(hole);
  sink(static_cast<std::size_t>(last->heap_index));
}

void LaneQueue::place(std::size_t index, Hop* hop) {
  heap_[index] = hop;
  hop->heap_index = static_cast<int>(index);
}

void LaneQueue::rise(std::size_t index) {
  Hop* hop = heap_[index];
  while (index > 0) {
    const std::size_t parent = (index - 1) / 2;
    if (!serves_before(*hop, *heap_[parent])) break;
    place(index, heap_[parent]);
    index = parent;
  }
  place(index, hop);
}

void LaneQueue::sink(std::size_t index) {
  Hop* hop = heap_[index];
  for (;;) {
    std::size_t child = 2 * index + 1;
    if (child >= heap_.size()) break;
    if (child + 1 < heap_.size() && serves_before(*heap_[child + 1], *heap_[child])) ++child;
    if (!serves_before(*heap_[child], *hop)) break;
    place(index, heap_[child]);
    index = child;
  }
  place(index, hop);
}

}  // namespace kvtier
