// Between a device block's segments and a page.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/identity.hpp"
#include "copy/segments.hpp"

namespace kvtier {

// All of these: `slot` < pool.slots(), `page` holds at least the payload and is 16-byte aligned (a page of a HostArena
// is aligned to 4096). They neither allocate nor lock, and their stores are visible to other threads on return. The
// caller keeps the source from changing and the destination from being read meanwhile.

// Segments → page. Zeroes the page from the payload to `page_bytes`; returns the checksum of what was copied. `next` is
// the slot that will be gathered after this one, if known: its first bytes are fetched ahead.
std::uint64_t gather(const DevicePool& pool, Slot slot, std::byte* page, std::size_t page_bytes, ChecksumKey key,
                     Slot next = kNoSlot);

// Page → segments. `next` is the page that will be scattered after this one, or null.
void scatter(const std::byte* page, const DevicePool& pool, Slot slot, const std::byte* next = nullptr);

// The same of no more than `range` of the page. `next` is a page too, of which the same range will be scattered.
void scatter(const std::byte* page, const DevicePool& pool, Slot slot, ByteRange range,
             const std::byte* next = nullptr);

// Page → segments with the page's checksum taken on the way. On false the segments hold bytes that must not be used.
bool scatter_verified(const std::byte* page, const DevicePool& pool, Slot slot, ChecksumKey key, std::uint64_t expected,
                      const std::byte* next = nullptr);

}  // namespace kvtier
