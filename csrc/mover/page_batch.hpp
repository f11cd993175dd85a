// A chunk of a device lane as the pages that a copier takes, and their results as the statuses that a lane gives.
#pragma once

#include <span>

#include "copy/host_arena.hpp"
#include "mover/device_copier.hpp"
#include "mover/transfer.hpp"

namespace kvtier {

struct PageBatch {
  Chunk chunk;
  std::uint32_t count = 0;  // of the pages that are copied
  std::size_t payload = 0;  // of one
  PageCopy pages[Chunk::kMaxPages];
  std::uint32_t index[Chunk::kMaxPages];  // of each within the chunk
  PageStatus status[Chunk::kMaxPages];    // of the whole chunk

  // Makes `pages` of `chunk`. An onboarded page is verified when `verify_host` says so and it starts in the host; one
  // that nothing vouches for is corrupt and left out.
  void prepare(HostArena& host, bool verify_host);
  std::span<PageCopy> copies() { return {pages, count}; }
  // What of each is copied.
  ByteRange range() const;
  // After the copy: statuses of all, checksums into the arena.
  void conclude(HostArena& host);
};

}  // namespace kvtier
