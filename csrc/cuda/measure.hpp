// How fast a path is on this machine, for this geometry.
#pragma once

#include <chrono>
#include <span>

#include "cuda/copier.hpp"

namespace kvtier::cuda {

// Copies slots[i] of the device to or from pages[i] of the host, `rounds` times over, with as many batches under way as
// in service. Returns the seconds from the first batch queued to the last one ended. Throws Error when a batch fails,
// or does not end within `limit`. No mover may use this copier.
double measure(Copier& copier, Lane lane, std::span<const Slot> slots, std::span<const Slot> pages, unsigned rounds,
               std::size_t page_bytes, std::chrono::nanoseconds limit = std::chrono::seconds(30));

}  // namespace kvtier::cuda
