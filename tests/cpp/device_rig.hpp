// A mover between an arena and an emulated device, for tests: its engine, copies and completions.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "copy/checksum.hpp"
#include "cuda/copier.hpp"
#include "cuda/emulated.hpp"
#include "mover_rig.hpp"
#include "played_driver.hpp"

namespace kvtier::test {

using namespace kvtier::cuda;

inline constexpr Path kAllPaths[] = {Path::kPieces, Path::kBatch, Path::kDirect, Path::kStaged};

// A device of `kSlots` slots in three segments, an arena, and a mover between them over an emulated device.
struct DeviceRig {
  static constexpr Slot kSlots = 48;

  // How the copier reaches the device: as its own runtime, or through the driver's functions.
  enum class Through { kNothing, kDriver };

  explicit DeviceRig(CopierOptions options = {}, std::size_t part = 4096, std::uint64_t seed = 1,
                     const EmulatedFaults& faults = {}, MoverOptions mover_options = {},
                     Through through = Through::kNothing)
      : part(part), memory(3 * part * kSlots), runtime(std::make_shared<Emulated>(seed, true, faults)), link(runtime) {
    if (through == Through::kDriver) {
      driver = std::make_unique<PlayedDriver>(runtime);
      link = driver->open();
    }
    std::vector<Segment> segments;
    for (std::size_t s = 0; s < 3; ++s) segments.push_back({memory.data() + s * part * kSlots, part, part});
    device = std::make_unique<DevicePool>(segments, kSlots);
    host = std::make_unique<HostArena>(kSlots, 3 * part);
    pinned = std::make_shared<PinnedArena>(link, *host, 5 * host->page_bytes());
    pinned->wait();
    options.batch_bytes = std::min(options.batch_bytes, 4 * 3 * part);  // several batches for a transfer
    engine = runtime->make_stream();
    mover = std::make_unique<Mover>(device.get(), host.get(), nullptr, mover_options,
                                    std::make_unique<Copier>(link, *device, *host, pinned, options));
    offload = runtime->streams()[1], onboard = runtime->streams()[2];
  }
  ~DeviceRig() {
    mover.reset();
    pinned.reset();
    link.reset();
    runtime->run_out();
    runtime->free_stream(engine);
    CHECK(runtime->allocated() == 0);
    CHECK(runtime->pinned_bytes() == 0);
  }

  // The engine's step that fills slots with a block's bytes, or reads them and says whether they were those.
  void queue_write(const std::vector<Slot>& slots, std::uint32_t name) {
    runtime->compute(engine, uses(slots, true), [this, slots, name] {
      for (const Slot slot : slots) fill(slot, name + slot);
    });
  }
  void queue_read(const std::vector<Slot>& slots) {
    runtime->compute(engine, uses(slots, false), [] {});
  }
  void queue_read(const std::vector<Slot>& slots, std::uint32_t name, bool* right) {
    runtime->compute(engine, uses(slots, false), [this, slots, name, right] {
      *right = std::all_of(slots.begin(), slots.end(), [&](Slot slot) { return has(slot, name + slot); });
    });
  }
  void fill(Slot slot, std::uint32_t name) {
    for (std::size_t s = 0; s < 3; ++s) {
      for (std::size_t i = 0; i < part; ++i) memory[(s * kSlots + slot) * part + i] = byte(name, s * part + i);
    }
  }
  bool has(Slot slot, std::uint32_t name) const {
    for (std::size_t s = 0; s < 3; ++s) {
      for (std::size_t i = 0; i < part; ++i) {
        if (memory[(s * kSlots + slot) * part + i] != byte(name, s * part + i)) return false;
      }
    }
    return true;
  }
  static std::byte byte(std::uint32_t name, std::size_t at) {
    return static_cast<std::byte>(name * 37 + at * 11 + at / 251);
  }

  Submit submit(Ticket ticket, std::vector<Tier> path, const std::vector<Slot>& from, const std::vector<Slot>& to,
                std::vector<std::size_t> cuts = {}) {
    std::vector<Slot> slots(from);
    slots.insert(slots.end(), to.begin(), to.end());
    std::vector<std::uint32_t> names(from.begin(), from.end());
    const std::vector<std::byte> ids = identities_of(names);
    Order order;
    order.ticket = ticket;
    order.path = path;
    order.slots = slots.data();
    order.count = static_cast<std::uint32_t>(from.size());
    order.identities = ids.data();
    order.identity_bytes = kIdBytes;
    order.cuts = cuts;
    return mover->submit(order, reinterpret_cast<std::uintptr_t>(engine));
  }
  Completion next(Ticket ticket) { return next_report(*mover, &reported, ticket); }
  // Waits until the copier has looked that often at a batch's end before it had come.
  void await_look(std::uint64_t count = 1) const {
    const Time limit = Clock::now() + kPatience;
    while (runtime->looks() < count) {
      if (Clock::now() > limit) throw std::runtime_error("nobody looked");
      std::this_thread::yield();
    }
  }
  bool reports_nothing() {
    mover->poll(&reported);
    return reported.empty();
  }
  // Whether the host has the pages, with checksums that are those of their bytes.
  bool host_has(const std::vector<Slot>& slots, std::uint32_t name, const std::vector<Slot>& from) const {
    const std::vector<std::byte> ids = identities_of(std::vector<std::uint32_t>(from.begin(), from.end()));
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const std::byte* page = host->page(slots[i]);
      for (std::size_t at = 0; at < host->page_bytes(); ++at) {
        if (page[at] != (at < 3 * part ? byte(name + from[i], at) : std::byte{0})) return false;
      }
      const auto* identity = reinterpret_cast<const PageIdentity*>(ids.data() + i * kIdBytes);
      if (host->checksum(slots[i]) != checksum(page, 3 * part, checksum_key(*identity))) return false;
    }
    return true;
  }

  std::size_t part;
  std::vector<std::byte> memory;
  std::shared_ptr<Emulated> runtime;
  std::unique_ptr<PlayedDriver> driver;
  std::shared_ptr<Runtime> link;
  std::unique_ptr<DevicePool> device;
  std::unique_ptr<HostArena> host;
  std::shared_ptr<PinnedArena> pinned;
  Stream engine = nullptr, offload = nullptr, onboard = nullptr;
  std::unique_ptr<Mover> mover;
  std::vector<Completion> reported;

 private:
  std::vector<MemoryUse> uses(const std::vector<Slot>& slots, bool writes) const {
    std::vector<MemoryUse> found;
    for (const Slot slot : slots) {
      for (std::size_t s = 0; s < 3; ++s) found.push_back({memory.data() + (s * kSlots + slot) * part, part, writes});
    }
    return found;
  }
};

inline CopierOptions by(Path path) {
  CopierOptions options;
  options.offload = options.onboard = path;
  return options;
}

}  // namespace kvtier::test
