#include "mover/slices.hpp"

namespace kvtier {

void Slices::reset(std::span<const std::size_t> cuts, std::uint32_t pages) {
  cuts_.assign(cuts.begin(), cuts.end());
  there_ = 0;
  broken_ = false;
  if (!cut()) return;
  missing_.assign(cuts.size(), pages);
  left_.assign(pages, count());
  worst_.assign(pages, PageStatus::kOk);
  if (pages == 0) there_ = count();
}

PageStatus Slices::note(std::uint32_t slice, std::uint32_t page, PageStatus status) {
  if (!cut()) return status;
  if (status == PageStatus::kOk) {
    --missing_[slice];
    while (there_ < count() && missing_[there_] == 0) ++there_;
  } else {
    broken_ = true;
    if (worst_[page] == PageStatus::kOk) worst_[page] = status;
  }
  return --left_[page] == 0 ? worst_[page] : PageStatus::kPending;
}

}  // namespace kvtier
