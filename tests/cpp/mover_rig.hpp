// A device pool, an arena, a store and a mover between them, for tests.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gated_engine.hpp"
#include "mover/mover.hpp"
#include "temp_dir.hpp"

namespace kvtier::test {

inline constexpr Tier D = Tier::kDevice, H = Tier::kHost, S = Tier::kDisk;
inline constexpr std::size_t kLabelBytes = 16;
inline constexpr std::size_t kIdBytes = identity_bytes(kLabelBytes);

struct Batch {
  Ticket ticket;
  std::vector<Tier> path;
  std::vector<std::vector<Slot>> slots;  // one row for each tier of the path
  std::vector<std::uint32_t> names;      // of the blocks: what their identities are made of
  Priority priority = Priority::kDemand;
  Time deadline = kNever;
};

inline std::vector<Slot> run_of(Slot first, Slot count) {
  std::vector<Slot> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

inline std::vector<std::byte> identities_of(const std::vector<std::uint32_t>& names) {
  std::vector<std::byte> out(kIdBytes * names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    PageIdentity id{};
    for (int k = 0; k < 8; ++k) {
      const std::uint32_t word = names[i] * 2654435761u + static_cast<std::uint32_t>(k);
      std::memcpy(id.digest + 4 * k, &word, 4);
    }
    id.position = names[i];
    std::memcpy(out.data() + i * kIdBytes, &id, sizeof id);
    std::memcpy(out.data() + i * kIdBytes + kIdentityHead, &names[i], sizeof names[i]);
  }
  return out;
}

// Waits for the next report of this ticket; those of others are kept in `reported`.
inline Completion next_report(Mover& mover, std::vector<Completion>* reported, Ticket ticket) {
  const Time limit = Clock::now() + kPatience;
  for (;;) {
    const std::uint64_t seen = mover.reports();
    mover.poll(reported);
    for (auto it = reported->begin(); it != reported->end(); ++it) {
      if (it->ticket != ticket) continue;
      Completion out = std::move(*it);
      reported->erase(it);
      return out;
    }
    if (Clock::now() > limit) throw std::runtime_error("nothing was reported");
    mover.wait(std::chrono::seconds(1), seen);
  }
}

struct Rig {
  static constexpr Slot kSlots = 64;
  static constexpr std::size_t kPart = 3000, kPayload = 2 * kPart;  // two segments, no multiple of anything

  explicit Rig(MoverOptions options = {}, bool gate_open = true, std::size_t depth = 128)
      : gate(std::make_shared<Gate>(gate_open)), memory(2 * kPart * kSlots) {
    device = std::make_unique<DevicePool>(
        std::vector<Segment>{{memory.data(), kPart, kPart}, {memory.data() + kPart * kSlots, kPart, kPart}}, kSlots);
    host = std::make_unique<HostArena>(kSlots, kPayload);
    DiskOptions disk_options;
    disk_options.dir = dir.path();
    disk_options.slots = kSlots;
    disk_options.payload_bytes = kPayload;
    disk_options.label_bytes = kLabelBytes;
    disk = DiskStore::open(disk_options);
    if (!options.make_engine) {
      options.make_engine = [gate = gate, depth](std::string*) { return std::make_unique<GatedEngine>(gate, depth); };
    }
    mover = std::make_unique<Mover>(device.get(), host.get(), disk.get(), options);
  }

  Submit submit(const Batch& batch) {
    std::vector<Slot> slots;
    for (const auto& row : batch.slots) slots.insert(slots.end(), row.begin(), row.end());
    const std::vector<std::byte> ids = identities_of(batch.names);
    Order order;
    order.ticket = batch.ticket;
    order.path = batch.path;
    order.slots = slots.data();
    order.count = static_cast<std::uint32_t>(batch.names.size());
    order.identities = ids.data();
    order.identity_bytes = kIdBytes;
    order.priority = batch.priority;
    order.deadline = batch.deadline;
    return mover->submit(order);
  }

  Completion next(Ticket ticket) { return next_report(*mover, &reported, ticket); }

  // Fills device slots with bytes that tell slots and positions apart.
  void write_device(Slot slot, std::uint32_t name) {
    for (std::size_t i = 0; i < kPart; ++i) {
      memory[slot * kPart + i] = static_cast<std::byte>(name * 31 + i * 7);
      memory[kPart * kSlots + slot * kPart + i] = static_cast<std::byte>(name * 17 + i * 5 + 1);
    }
  }
  bool device_has(Slot slot, std::uint32_t name) const {
    for (std::size_t i = 0; i < kPart; ++i) {
      if (memory[slot * kPart + i] != static_cast<std::byte>(name * 31 + i * 7)) return false;
      if (memory[kPart * kSlots + slot * kPart + i] != static_cast<std::byte>(name * 17 + i * 5 + 1)) return false;
    }
    return true;
  }
  void wipe_device() { std::fill(memory.begin(), memory.end(), std::byte{0xEE}); }

  // Puts blocks `names` on the disk, slots first.., through device and host slots of the same numbers.
  void store(const std::vector<std::uint32_t>& names, Slot first) {
    const auto slots = run_of(first, static_cast<Slot>(names.size()));
    for (std::size_t i = 0; i < names.size(); ++i) write_device(slots[i], names[i]);
    REQUIRE(submit({kStoreTicket, {D, H, S}, {slots, slots, slots}, names}) == Submit::kAccepted);
    const Completion done = next(kStoreTicket);
    for (const PageStatus status : done.status) REQUIRE(status == PageStatus::kOk);
    wipe_device();
    for (const Slot slot : slots) std::memset(host->page(slot), 0xDD, host->page_bytes());
  }
  static constexpr Ticket kStoreTicket = 1'000'000'000;

  std::shared_ptr<Gate> gate;
  TempDir dir;
  std::vector<std::byte> memory;
  std::unique_ptr<DevicePool> device;
  std::unique_ptr<HostArena> host;
  std::unique_ptr<DiskStore> disk;
  std::unique_ptr<Mover> mover;
  std::vector<Completion> reported;
};

inline std::vector<PageStatus> hop(const Completion& done, int index) {
  const auto first = done.status.begin() + static_cast<std::ptrdiff_t>(index * done.count);
  return {first, first + done.count};
}
inline std::vector<PageStatus> all(PageStatus status, std::size_t count) { return std::vector(count, status); }

}  // namespace kvtier::test

namespace doctest {
template <>
struct StringMaker<std::vector<kvtier::PageStatus>> {
  static String convert(const std::vector<kvtier::PageStatus>& statuses) {
    std::string text;
    for (const auto status : statuses) text += std::to_string(static_cast<int>(status)) + " ";
    return text.c_str();
  }
};
}  // namespace doctest
