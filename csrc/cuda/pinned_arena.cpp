#include "cuda/pinned_arena.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "common/forks.hpp"

namespace kvtier::cuda {
namespace {

// Long enough for a thread that waits for the driver to be woken and to go first.
constexpr auto kTurn = std::chrono::microseconds(50);
// How long to leave the driver alone that refuses something for a capture's sake.
constexpr auto kCapture = std::chrono::milliseconds(10);

}  // namespace

PinnedArena::PinnedArena(std::shared_ptr<Runtime> runtime, const HostArena& arena, std::size_t chunk_bytes)
    : runtime_(std::move(runtime)),
      arena_(arena),
      process_(fork_generation()),
      chunk_pages_(static_cast<Slot>(std::clamp<std::size_t>(chunk_bytes / arena.page_bytes(), 1, arena.slots()))),
      thread_([this] { run(); }) {}

PinnedArena::~PinnedArena() {
  stop_.store(true);
  join();
  for (Slot slot = 0; slot < pinned(); slot += chunk_pages_) runtime_->unpin(arena_.page(slot));
}

void PinnedArena::wait() {
  if (process_ != fork_generation()) throw Error("an arena is pinned by the process that began to, not after fork()");
  join();
}

// By the first who comes; whoever else comes meanwhile waits for that.
void PinnedArena::join() {
  std::call_once(joined_, [this] { thread_.join(); });
}

std::string PinnedArena::note() const {
  const std::lock_guard lock(mutex_);
  return note_;
}

void PinnedArena::run() {
  for (Slot slot = 0; slot < arena_.slots() && !stop_.load();) {
    const Slot count = std::min<Slot>(chunk_pages_, arena_.slots() - slot);
    try {
      if (pin(slot, count)) pinned_.store(slot += count, std::memory_order_release);
    } catch (const std::exception& error) {
      give_up(slot, error.what());
      break;
    }
    std::this_thread::sleep_for(kTurn);
  }
  finished_.store(true, std::memory_order_release);
}

// False: not now.
bool PinnedArena::pin(Slot first, Slot count) {
  try {
    runtime_->pin(arena_.page(first), count * arena_.page_bytes());
    return true;
  } catch (const Capturing&) {
    std::this_thread::sleep_for(kCapture);
    return false;
  }
}

void PinnedArena::give_up(Slot pinned, const char* why) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    note_ = "only " + std::to_string((pinned * arena_.page_bytes()) >> 20) + " of " +
            std::to_string(arena_.bytes() >> 20) + " MiB of the host tier are pinned (" + why +
            "); pages behind them are copied more slowly";
  } catch (const std::bad_alloc&) {
    note_ = "not all pinned";  // short enough to need no memory
  }
}

}  // namespace kvtier::cuda
