#include "cuda/pinned_arena.hpp"

#include <algorithm>
#include <utility>

namespace kvtier::cuda {

PinnedArena::PinnedArena(std::shared_ptr<Runtime> runtime, const HostArena& arena, std::size_t chunk_bytes)
    : runtime_(std::move(runtime)),
      arena_(arena),
      chunk_pages_(static_cast<Slot>(std::clamp<std::size_t>(chunk_bytes / arena.page_bytes(), 1, arena.slots()))),
      thread_([this] { run(); }) {}

PinnedArena::~PinnedArena() {
  stop_.store(true);
  wait();
  for (Slot slot = 0; slot < pinned(); slot += chunk_pages_) runtime_->unpin(arena_.page(slot));
}

void PinnedArena::wait() {
  if (thread_.joinable()) thread_.join();
}

std::string PinnedArena::note() const {
  const std::lock_guard lock(mutex_);
  return note_;
}

void PinnedArena::run() {
  for (Slot slot = 0; slot < arena_.slots() && !stop_.load();) {
    const Slot count = std::min<Slot>(chunk_pages_, arena_.slots() - slot);
    try {
      runtime_->pin(arena_.page(slot), count * arena_.page_bytes());
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      note_ = "only " + std::to_string((slot * arena_.page_bytes()) >> 20) + " of " +
              std::to_string(arena_.bytes() >> 20) + " MiB of the host tier are pinned (" + error.what() +
              "); pages behind them are copied more slowly";
      break;
    }
    slot += count;
    pinned_.store(slot, std::memory_order_release);
  }
  finished_.store(true, std::memory_order_release);
}

}  // namespace kvtier::cuda
