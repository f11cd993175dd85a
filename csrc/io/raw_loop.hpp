// The limit that the disk tier is measured against: pages between memory and a file through a bare ring, with no
// records, checksums, queues or engine in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

// Moves the page at index order[i] of the file to or from the page-sized place i % places of the buffer, at most
// `in_flight` at a time, and returns the seconds it took. Throws std::system_error when io_uring or an operation fails.
double raw_loop(int fd, bool write, std::byte* buffer, std::size_t buffer_bytes, std::size_t page_bytes,
                std::span<const std::uint32_t> order, unsigned in_flight);

}  // namespace kvtier
