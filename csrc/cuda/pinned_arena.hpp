// The host arena, pinned for the GPU: the same pages that io_uring reads and writes, so that nothing is copied between
// disk and device but by the two of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "copy/host_arena.hpp"
#include "cuda/runtime.hpp"

namespace kvtier::cuda {

// Pins the arena from its first page on, in chunks, on a thread of its own: pinning takes about 0.1 s per GB, and the
// driver lets other threads' calls wait meanwhile, also those that an engine's step makes. So chunks are small (0.4
// ms), and between two of them others have their turn. What is pinned so far can be used at once; a chunk that is
// refused ends it, unless that is for a capture's sake, and what lies behind is copied by slower ways. Chunks end
// between pages, so that no copy reaches over two registrations.
class PinnedArena {
 public:
  static constexpr std::size_t kChunkBytes = 4u << 20;

  PinnedArena(std::shared_ptr<Runtime> runtime, const HostArena& arena, std::size_t chunk_bytes = kChunkBytes);
  ~PinnedArena();  // unpins; no copy may be under way
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;

  const HostArena& arena() const { return arena_; }
  // Pages below this slot are pinned.
  Slot pinned() const { return pinned_.load(std::memory_order_acquire); }
  Slot chunk_pages() const { return chunk_pages_; }
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Until it is finished; on any number of threads. Throws Error in a fork() of the process that pins.
  void wait();
  std::string note() const;  // why not all of it is; empty while that may still come

 private:
  void join();
  void run();
  bool pin(Slot first, Slot count);
  void give_up(Slot pinned, const char* why) noexcept;

  std::shared_ptr<Runtime> runtime_;
  const HostArena& arena_;
  const std::uint32_t process_;  // by fork_generation()
  Slot chunk_pages_;
  std::atomic<Slot> pinned_{0};
  std::atomic<bool> finished_{false}, stop_{false};
  mutable std::mutex mutex_;
  std::string note_;
  std::once_flag joined_;
  std::thread thread_;
};

}  // namespace kvtier::cuda
