#include "cuda/measure.hpp"

#include <algorithm>
#include <vector>

namespace kvtier::cuda {

double measure(Copier& copier, Lane lane, std::span<const Slot> slots, std::span<const Slot> pages, unsigned rounds,
               std::size_t page_bytes, std::chrono::nanoseconds limit) {
  const std::size_t each = std::clamp<std::size_t>(copier.batch_bytes() / page_bytes, 1, kLaunchPages);
  const unsigned places = copier.places();
  std::vector<std::vector<PageCopy>> batches(places);
  const auto end = [&](unsigned place) {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (!copier.ended(lane, place)) {
      if (std::chrono::steady_clock::now() < until) continue;
      throw Error("a copy that was measured did not end in time: " + copier.note());
    }
    for (const PageCopy& page : batches[place]) {
      if (page.status != PageStatus::kOk) throw Error("a copy that was measured failed: " + copier.note());
    }
    batches[place].clear();
  };
  const auto began = std::chrono::steady_clock::now();
  unsigned place = 0;
  for (unsigned round = 0; round < rounds; ++round) {
    for (std::size_t first = 0; first < slots.size(); first += each, place = (place + 1) % places) {
      if (!batches[place].empty()) end(place);
      for (std::size_t i = first; i < std::min(first + each, slots.size()); ++i) {
        batches[place].push_back({slots[i], pages[i], {pages[i], 0}, 0, PageStatus::kPending});
      }
      copier.start(lane, place, batches[place], {0, copier.payload_bytes()}, nullptr);
    }
  }
  for (unsigned i = 0; i < places; ++i) {
    const unsigned oldest = (place + i) % places;
    if (!batches[oldest].empty()) end(oldest);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace kvtier::cuda
