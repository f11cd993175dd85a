// The disk store's files: records, the journal of generations, and a store's life from creation to the next opening.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "common/fault_plan.hpp"
#include "io/disk_format.hpp"
#include "io/disk_store.hpp"
#include "io/files.hpp"
#include "io/generations.hpp"
#include "temp_dir.hpp"

namespace kvtier::test {
namespace {

constexpr std::size_t kLabel = 20;  // not a multiple of 8: the identity is padded
constexpr std::size_t kIdentity = identity_bytes(kLabel);
constexpr disk::StoreId kStore{1, 2};
using Space = std::array<std::uint8_t, 32>;

struct Named {
  explicit Named(std::uint8_t name, std::uint64_t generation = 0, std::uint8_t space = 1) {
    bytes.fill(0);
    std::memset(head()->digest, name, 32);
    std::memset(head()->space, space, 32);
    head()->generation = generation;
    bytes[kIdentityHead] = name;
  }
  PageIdentity* head() { return reinterpret_cast<PageIdentity*>(bytes.data()); }
  const PageIdentity* get() const { return reinterpret_cast<const PageIdentity*>(bytes.data()); }
  alignas(8) std::array<std::uint8_t, kIdentity> bytes;
};

Space space_of(std::uint8_t name) {
  Space space;
  space.fill(name);
  return space;
}

DiskOptions options_in(const TempDir& dir, Slot slots = 6) {
  DiskOptions options;
  options.dir = dir.path();
  options.slots = slots;
  options.payload_bytes = 5000;
  options.label_bytes = kLabel;
  options.journal_entries = 8;
  return options;
}

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "was taken";
}

void spoil(const std::string& path, std::uint64_t at, std::uint8_t mask) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ mask);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

TEST_CASE("a record is taken only as it was written, in its slot, in its store") {
  const std::size_t size = disk::record_bytes(kLabel);
  CHECK(size == 256);
  CHECK(disk::record_bytes(4096) == 8192);
  alignas(8) std::array<std::byte, 256> record;
  record.fill(std::byte{0xEE});
  const Named named(7, 3);
  disk::encode_record(record.data(), size, 5, kStore, {0, 11, 12, 13}, named.get(), kLabel);
  const disk::RecordHead* head = disk::decode_record(record.data(), size, 5, kStore);
  REQUIRE(head != nullptr);
  CHECK(head->sequence == 11);
  CHECK(head->journal == 12);
  CHECK(head->page_checksum == 13);
  CHECK(same_identity(disk::record_identity(head), named.get(), kLabel));
  for (std::size_t i = sizeof(*head) + kIdentity; i < size; ++i) CHECK(record[i] == std::byte{0});
  CHECK(disk::decode_record(record.data(), size, 4, kStore) == nullptr);
  CHECK(disk::decode_record(record.data(), size, 5, {1, 3}) == nullptr);
  CHECK(disk::decode_record(record.data(), size, 5, {2, 2}) == nullptr);
  for (std::size_t bit = 0; bit < size * 8; ++bit) {
    record[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    CHECK(disk::decode_record(record.data(), size, 5, kStore) == nullptr);
    record[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
  }
}

TEST_CASE("generations only rise, one namespace at a time or all together, and are there after a restart") {
  TempDir dir;
  const Space one = space_of(1), two = space_of(2);
  {
    disk::Generations journal(dir.path(), kStore, 8);
    journal.create();
    CHECK(journal.of(one.data()) == 0);
    CHECK(journal.advance(one.data()) == 1);
    CHECK(journal.of(two.data()) == 0);
    CHECK(journal.advance(nullptr) == 2);
    CHECK(journal.of(one.data()) == 2);
    CHECK(journal.advance(two.data()) == 3);
  }
  disk::Generations journal(dir.path(), kStore, 8);
  CHECK(journal.load().empty());
  CHECK(journal.of(one.data()) == 2);
  CHECK(journal.of(two.data()) == 3);
  CHECK(journal.highest() == 3);
  for (std::uint8_t i = 0; i < 40; ++i) {  // many times the journal's length: it is rewritten, and forgets nothing
    const Space space = space_of(static_cast<std::uint8_t>(10 + i % 20));
    const std::uint64_t before = journal.of(space.data()), of_one = journal.of(one.data());
    CHECK(journal.advance(space.data()) > before);
    CHECK(journal.of(one.data()) >= of_one);
  }
  disk::Generations again(dir.path(), kStore, 8);
  CHECK(again.load().empty());
  for (int name = 0; name < 40; ++name) {
    const Space space = space_of(static_cast<std::uint8_t>(name));
    CHECK(again.of(space.data()) == journal.of(space.data()));
  }
}

TEST_CASE("a journal that was damaged, cut, or is another store's says so, and nothing it said before comes back") {
  const auto made = [](const TempDir& dir) {
    disk::Generations journal(dir.path(), kStore, 8);
    journal.create();
    const Space space = space_of(1);
    for (int i = 0; i < 3; ++i) journal.advance(space.data());
  };
  const auto damaged = [&](const std::function<void(const std::string&)>& damage, disk::StoreId id = kStore) {
    TempDir dir;
    made(dir);
    damage(dir.path() + "/generations");
    disk::Generations journal(dir.path(), id, 8);
    const std::string wrong = journal.load();
    journal.restart(5, 9);
    const Space space = space_of(1);
    CHECK(journal.of(space.data()) == 6);
    CHECK(journal.sequence() > 9);
    disk::Generations again(dir.path(), id, 8);
    CHECK(again.load().empty());
    CHECK(again.of(space.data()) == 6);
    return wrong;
  };
  for (std::uint64_t at = 0; at < 4 * 64; ++at) {
    CAPTURE(at);
    const auto in_both = [&](const auto& path) {
      spoil(path, at, 0x10);
      spoil(path, disk::kBlock + at, 0x10);
    };
    CHECK(damaged(in_both).find("entry ") == 0);  // damaged, or by its number missing
  }
  CHECK(damaged([](const auto& path) { std::filesystem::remove(path); }) == "it is missing");
  CHECK(damaged([](const auto& path) { std::filesystem::resize_file(path, 100); }) == "it has 100 bytes, not 8192");
  CHECK(damaged([](const auto&) {}, {7, 7}).find("is damaged") != std::string::npos);
}

TEST_CASE("damage to one of a journal's two copies loses nothing, and is mended by the next invalidation") {
  const Space one = space_of(1);
  for (std::uint64_t copy = 0; copy < 2; ++copy) {
    for (std::uint64_t at = 0; at < 4 * 64; ++at) {
      CAPTURE(copy);
      CAPTURE(at);
      TempDir dir;
      {
        disk::Generations journal(dir.path(), kStore, 8);
        journal.create();
        for (int i = 0; i < 3; ++i) journal.advance(one.data());
      }
      spoil(dir.path() + "/generations", copy * disk::kBlock + at, 0x10);
      disk::Generations journal(dir.path(), kStore, 8);
      CHECK(journal.load().empty());
      CHECK(journal.mended());
      CHECK(journal.of(one.data()) == 3);
      CHECK(journal.advance(one.data()) == 4);
      disk::Generations again(dir.path(), kStore, 8);
      CHECK(again.load().empty());
      CHECK(!again.mended());
      CHECK(again.of(one.data()) == 4);
    }
  }
}

TEST_CASE("a journal whose numbers are used up says so, and keeps what it had") {
  const auto used_up = [](const std::function<void()>& act) {
    try {
      act();
    } catch (const std::system_error& error) {
      return error.code().value() == EOVERFLOW;
    }
    return false;
  };
  const Space one = space_of(1);
  TempDir dir;
  disk::Generations journal(dir.path(), kStore, 8);
  journal.restart(disk::kMaxGeneration - 1, 0);
  for (const auto* space : {one.data(), static_cast<const std::uint8_t*>(nullptr)})
    CHECK(used_up([&] { journal.advance(space); }));
  CHECK(journal.of(one.data()) > disk::kMaxGeneration);  // in force here, as after any failure
  disk::Generations again(dir.path(), kStore, 8);
  CHECK(again.load().empty());
  CHECK(again.of(one.data()) == disk::kMaxGeneration);
  CHECK(used_up([&] { again.restart(0, disk::kMaxSequence); }));
  CHECK(again.load().empty());
  disk::Generations last(dir.path(), kStore, 8);
  last.restart(0, disk::kMaxSequence - 2);
  CHECK(last.advance(one.data()) > 0);
  CHECK(used_up([&] { last.advance(one.data()); }));
  CHECK(disk::Generations(dir.path(), kStore, 8).load().empty());
}

TEST_CASE("a page's record is served only to its identity, until it is cleared or invalidated") {
  TempDir dir;
  const auto store = DiskStore::open(options_in(dir));
  const Named seven(7), eight(8), other_space(7, 0, 2), newer(7, 1);
  CHECK(store->checksum_for(2, seven.get()) == 0);
  CHECK(store->write_record(2, seven.get(), 77) == 0);
  CHECK(store->checksum_for(2, seven.get()) == 77);
  CHECK(store->checksum_for(2, eight.get()) == 0);
  CHECK(store->checksum_for(2, newer.get()) == 0);
  CHECK(store->checksum_for(3, seven.get()) == 0);
  CHECK(store->checksum_for(6, seven.get()) == 0);
  CHECK(store->write_record(6, seven.get(), 77) == -EINVAL);
  CHECK(store->write_record(2, seven.get(), 0) == -EINVAL);
  CHECK(store->clear_record(6) == -EINVAL);
  CHECK(store->write_record(3, other_space.get(), 78) == 0);
  const Space space = space_of(1);
  CHECK(store->invalidate(space.data()) == 1);
  CHECK(store->checksum_for(2, seven.get()) == 0);
  CHECK(store->checksum_for(3, other_space.get()) == 78);
  CHECK(store->write_record(2, seven.get(), 77) == -ESTALE);
  CHECK(store->write_record(2, newer.get(), 79) == 0);
  CHECK(store->checksum_for(2, newer.get()) == 79);
  CHECK(store->clear_record(2) == 0);
  CHECK(store->checksum_for(2, newer.get()) == 0);
  CHECK(store->scan().slots == std::vector<Slot>{3});
}

TEST_CASE("a store opened again has its records, oldest first, and not those that were cleared or invalidated") {
  TempDir dir;
  {
    const auto store = DiskStore::open(options_in(dir));
    CHECK(store->adopted() == 0);
    for (const Slot slot : {4u, 1u, 3u, 0u})
      REQUIRE(store->write_record(slot, Named(static_cast<std::uint8_t>(slot), 0, slot == 0 ? 2 : 1).get(), slot + 1) ==
              0);
    REQUIRE(store->clear_record(1) == 0);
    const Space space = space_of(2);
    store->invalidate(space.data());
  }
  for (int times = 0; times < 2; ++times) {
    const auto store = DiskStore::open(options_in(dir));
    CHECK(store->notes().empty());
    CHECK(store->adopted() == 2);
    const auto inventory = store->scan();
    CHECK(inventory.slots == std::vector<Slot>{4, 3});
    CHECK(std::memcmp(inventory.identities.data(), Named(4).bytes.data(), kIdentity) == 0);
    CHECK(store->checksum_for(3, Named(3).get()) == 4);
    CHECK(store->checksum_for(0, Named(0, 0, 2).get()) == 0);
    CHECK(store->allocated_bytes() <= store->footprint().bytes(store->slots()));
  }
}

TEST_CASE("one directory has one holder, and files that only their owner can read") {
  TempDir dir;
  const auto store = DiskStore::open(options_in(dir));
  CHECK(refusal([&] { DiskStore::open(options_in(dir)); }).find("in use by") != std::string::npos);
  for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
    struct stat info{};
    REQUIRE(::stat(entry.path().c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
  }
  store->close();
  CHECK(store->write_record(0, Named(1).get(), 1) == -EBADF);
  CHECK(DiskStore::open(options_in(dir)) != nullptr);
}

TEST_CASE("a store made for anything else is refused, names the field, and stays as it was") {
  TempDir dir;
  {
    const auto store = DiskStore::open(options_in(dir));
    REQUIRE(store->write_record(0, Named(1).get(), 1) == 0);
  }
  const auto refused = [&](const char* field, const std::function<void(DiskOptions&)>& change) {
    DiskOptions options = options_in(dir);
    change(options);
    CAPTURE(field);
    CHECK(refusal([&] { DiskStore::open(options); }).find(field) != std::string::npos);
  };
  refused("with payload_bytes 5000, ", [](auto& o) { o.payload_bytes = 5001; });
  refused("with label_bytes 20, ", [](auto& o) { o.label_bytes = 24; });
  refused("disk.size: 7 pages", [](auto& o) { o.slots = 7; });
  refused("with world 1, ", [](auto& o) { o.world = 2; });
  refused("with journal_entries 8, ", [](auto& o) { o.journal_entries = 16; });
  refused("another geometry", [](auto& o) { o.geometry_tag[31] = 1; });
  refused("disk rank 1", [](auto& o) { o.rank = 1; });
  refused("disk slots 0", [](auto& o) { o.slots = 0; });
  refused("disk label_bytes 6", [](auto& o) { o.label_bytes = 6; });
  refused("disk journal_entries 3", [](auto& o) { o.journal_entries = 3; });
  refused("disk payload_bytes 0", [](auto& o) { o.payload_bytes = 0; });
  for (std::uint64_t at = 0; at < 160; ++at) {
    spoil(dir.path() + "/table", at, 0x80);
    CHECK(refusal([&] { DiskStore::open(options_in(dir)); }).find("disk.path: ") == 0);
    spoil(dir.path() + "/table", at, 0x80);
  }
  CHECK(DiskStore::open(options_in(dir))->adopted() == 1);
}

TEST_CASE("what was cut off is gone, and is not taken for pages by a later opening") {
  TempDir dir;
  std::uint64_t page = 0;
  {
    const auto store = DiskStore::open(options_in(dir));
    page = store->page_bytes();
    for (Slot slot = 0; slot < 6; ++slot) REQUIRE(store->write_record(slot, Named(1 + slot % 200).get(), 9) == 0);
  }
  std::filesystem::resize_file(dir.path() + "/slab", 4 * page + 100);
  {
    const auto store = DiskStore::open(options_in(dir));
    CHECK(store->adopted() == 4);
    CHECK(store->notes().find("slab was cut") != std::string::npos);
  }
  std::filesystem::resize_file(dir.path() + "/table", disk::kBlock + 2 * 256 + 17);
  const auto store = DiskStore::open(options_in(dir));
  CHECK(store->scan().slots == std::vector<Slot>{0, 1});
}

TEST_CASE("a record that was cut off does not come back, whole and valid, when its file grows again") {
  TempDir dir;
  {
    const auto store = DiskStore::open(options_in(dir));
    store->invalidate(nullptr);
    REQUIRE(store->write_record(1, Named(1, 1).get(), 9) == 0);
    store->invalidate(nullptr);
  }
  std::filesystem::resize_file(dir.path() + "/table", disk::kBlock + 256 + 200);  // in the zeros behind its identity
  std::filesystem::remove(dir.path() + "/generations");
  for (int times = 0; times < 2; ++times) {
    const auto store = DiskStore::open(options_in(dir));
    CHECK(store->adopted() == 0);
    CHECK(store->scan().slots.empty());
    CHECK((store->notes().empty()) == (times == 1));
  }
}

TEST_CASE("without a journal that can be trusted every page is dropped, for good") {
  for (const bool older : {false, true}) {
    TempDir dir;
    const std::string journal = dir.path() + "/generations", copy = dir.path() + "/copy";
    {
      const auto store = DiskStore::open(options_in(dir));
      std::filesystem::copy(journal, copy);
      const Space space = space_of(9);
      store->invalidate(space.data());
      REQUIRE(store->write_record(0, Named(1).get(), 1) == 0);  // knows that the journal had two entries
    }
    older ? std::filesystem::rename(copy, journal) : std::filesystem::resize_file(journal, 64);
    for (int times = 0; times < 2; ++times) {
      const auto store = DiskStore::open(options_in(dir));
      CHECK(store->adopted() == 0);
      CHECK((store->notes().find("so all 1 pages were dropped") != std::string::npos) == (times == 0));
      CHECK(store->generation(space_of(1).data()) > 0);
    }
  }
}

TEST_CASE("whichever operation of an opening fails, the next one succeeds with what was there") {
  for (const bool exists : {false, true}) {
    TempDir dir;
    if (exists) {
      const auto store = DiskStore::open(options_in(dir));
      REQUIRE(store->write_record(2, Named(3).get(), 4) == 0);
    }
    bool clean = false;
    for (std::int64_t nth = 1; !clean; ++nth) {
      REQUIRE(nth < 100);
      const auto plan = std::make_shared<FaultPlan>();
      plan->add({FaultPlan::Kind::kError, FaultPlan::On::kAny, static_cast<std::uint64_t>(nth), 1, ENOSPC});
      use_faults(plan);
      std::string notes;
      try {
        notes = DiskStore::open(options_in(dir))->notes();
        use_faults(nullptr);
        clean = plan->fired() == 0;
      } catch (const std::system_error& error) {
        use_faults(nullptr);
        CHECK(error.code().value() == ENOSPC);
        CHECK((exists || std::filesystem::is_empty(dir.path())));
      }
      CAPTURE(nth);
      const auto next = DiskStore::open(options_in(dir));
      if (!exists || notes.find("were dropped") != std::string::npos) {  // a journal that cannot be read says nothing
        CHECK(next->adopted() == 0);
        REQUIRE(next->write_record(2, Named(3, next->generation(space_of(1).data())).get(), 4) == 0);
      } else {
        CHECK(next->adopted() == 1);
      }
      if (!exists) {
        next->close();
        for (const char* name : {"table", "generations", "slab", "lock"})
          std::filesystem::remove(dir.path() + "/" + name);
      }
    }
  }
}

TEST_CASE("one thread writes records while others ask and invalidate") {
  TempDir dir;
  const auto store = DiskStore::open(options_in(dir));
  std::atomic<bool> done{false};
  const Space space = space_of(1);
  std::thread reader([&] {
    while (!done) {
      for (Slot slot = 0; slot < 6; ++slot) {
        const std::uint64_t sum = store->checksum_for(slot, Named(static_cast<std::uint8_t>(slot)).get());
        CHECK((sum == 0 || sum == slot + 1));
      }
      store->generation(space.data());
    }
  });
  std::thread invalidator([&] {
    for (int i = 0; i < 10; ++i) store->invalidate(i % 3 == 0 ? nullptr : space.data());
  });
  for (std::uint32_t i = 0; i < 200; ++i) {
    const Slot slot = i % 6;
    CHECK(store->clear_record(slot) == 0);
    const int rc = store->write_record(slot, Named(static_cast<std::uint8_t>(slot)).get(), slot + 1);
    CHECK((rc == 0 || rc == -ESTALE));
  }
  invalidator.join();
  done = true;
  reader.join();
  for (Slot slot = 0; slot < 6; ++slot)
    CHECK(store->checksum_for(slot, Named(static_cast<std::uint8_t>(slot)).get()) == 0);
}

}  // namespace
}  // namespace kvtier::test
