// One page between the CPU and a slot of a pool on a device, for tests, tools and tables: copied and waited for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/segments.hpp"
#include "cuda/runtime.hpp"

namespace kvtier::cuda {

// Copies after what the engine has queued on its stream `engine` by now, to the slot (`up`) or from it. `page` holds
// payload_bytes; nothing touches it any more when this has returned or thrown. Throws Error.
void copy_page(Runtime& runtime, const DevicePool& pool, Slot slot, std::byte* page, bool up, std::uintptr_t engine);

}  // namespace kvtier::cuda
