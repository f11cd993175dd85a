// No more threads, no more memory: what asks for them says so, or does with less; nothing hangs, and nothing ends the
// process.
#include "limits.hpp"

#include <doctest/doctest.h>

#include <system_error>

#include "io/file_engine.hpp"
#include "mover_rig.hpp"

namespace kvtier::test {
namespace {

// Does `work` with room for none, for one, for two and so on until there is enough; how much that is.
template <class Work>
int with_ever_more(Work work) {
  for (int room = 0;; ++room) {
    REQUIRE(room < 1000);
    const int before = refusals;
    work(room);
    if (refusals == before) return room;
  }
}

// Whether `make` does its work within the limit; if not it was refused, and said so.
template <class Limit, class Make>
bool makes(int room, Make make) {
  const Limit limit(room);
  try {
    make();
    return true;
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  return false;
}

// Pools for movers with a disk on real threads.
struct Pools : Rig {
  Pools() {
    mover.reset();
    options.copy_threads = 3;
    options.make_engine = [](std::string* note) { return make_engine(IoPath::kThreads, 128, 2, nullptr, 0, note); };
  }
  void make(bool with_disk = true) {
    mover = std::make_unique<Mover>(device.get(), host.get(), with_disk ? disk.get() : nullptr, options);
  }
  // Every page that goes down ends, and so does what comes up.
  void use(bool with_disk = true) {
    const std::vector<Slot> slots = run_of(0, 4);
    Batch batch{1, {D, H, S}, {slots, slots, slots}, {1, 2, 3, 4}};
    if (!with_disk) batch.path.pop_back(), batch.slots.pop_back();
    for (const Slot slot : slots) write_device(slot, slot + 1);
    REQUIRE(submit(batch) == Submit::kAccepted);
    const Completion down = next(1);
    REQUIRE(hop(down, 0) == all(PageStatus::kOk, 4));
    const bool offline = mover->stats().offline;
    if (with_disk) CHECK(hop(down, 1) == all(offline ? PageStatus::kOffline : PageStatus::kOk, 4));
    wipe_device();
    REQUIRE(submit({2, {H, D}, {slots, slots}, {1, 2, 3, 4}}) == Submit::kAccepted);
    CHECK(hop(next(2), 0) == all(PageStatus::kOk, 4));
    for (const Slot slot : slots) CHECK(device_has(slot, slot + 1));
  }

  MoverOptions options;
};

TEST_CASE("a mover that gets no thread says so, or does with fewer copy threads") {
  for (const bool with_disk : {false, true}) {
    CAPTURE(with_disk);
    Pools pools;
    std::vector<bool> made;
    const int enough = with_ever_more([&](int room) {
      made.push_back(makes<ThreadLimit>(room, [&] { pools.make(with_disk); }));
      if (!made.back()) return;
      pools.use(with_disk);
      const std::string note = pools.mover->stats().device_note;
      CHECK(note == (room < 3 ? "only " + std::to_string(room) + " of 3 copy threads could be had" : ""));
      pools.mover.reset();
    });
    CHECK_FALSE(made[0]);
    CHECK(made.back());
    if (!with_disk) CHECK(std::count(made.begin(), made.end(), true) == enough);
  }
}

TEST_CASE("a disk whose engine gets no thread is out of service, and what needs no disk is served") {
  Pools pools;
  pools.options.copy_threads = 1;
  const ThreadLimit limit(2);
  pools.make();
  pools.use();
  const MoverStats stats = pools.mover->stats();
  CHECK(stats.offline);
  CHECK(stats.io.engine == "none");
  CHECK(stats.io.warning.find("no way to do I/O: ") != std::string::npos);
}

TEST_CASE("a mover that gets no memory says so") {
  Pools pools;
  with_ever_more([&](int room) {
    if (!makes<MemoryLimit>(room, [&] { pools.make(); })) return;
    pools.use();
    pools.mover.reset();
  });
}

TEST_CASE("an I/O thread that gets no memory takes the disk out of service or needs none") {
  for (const IoPath path : {IoPath::kThreads, IoPath::kAuto}) {
    Pools pools;
    std::vector<bool> offline;
    with_ever_more([&](int room) {
      pools.options.make_engine = [path, room](std::string* note) {
        allocations_left = room;  // of this thread, to its end
        return make_engine(path, 128, 2, nullptr, 0, note);
      };
      pools.make();
      pools.use();
      const MoverStats stats = pools.mover->stats();
      offline.push_back(stats.offline);
      CHECK(stats.offline == !stats.io.warning.empty());
      pools.mover.reset();
    });
    CHECK(offline.front());
    CHECK_FALSE(offline.back());
  }
}

// Of which every operation fails, and which leaves its thread no memory.
class Broken final : public FileEngine {
 public:
  Broken() { allocations_left = 0; }
  bool submit(const IoRequest& request) override {
    if (waits_) return false;
    tag_ = request.tag;
    return waits_ = true;
  }
  void flush() override {}
  std::size_t reap(IoResult* results, std::size_t, std::chrono::nanoseconds) override {
    if (!std::exchange(waits_, false)) return 0;
    results[0] = {tag_, -EIO};
    return 1;
  }
  std::size_t in_flight() const override { return waits_ ? 1 : 0; }
  void wake() override {}
  const char* name() const override { return "broken"; }

 private:
  bool waits_ = false;
  std::uint64_t tag_ = 0;
};

TEST_CASE("a disk that fails goes out of service also where there is no memory to say why") {
  Pools pools;
  pools.options.make_engine = [](std::string*) { return std::make_unique<Broken>(); };
  pools.make();
  for (Ticket ticket = 1; !pools.mover->stats().offline; ++ticket) {
    REQUIRE(ticket < 100);
    REQUIRE(pools.submit({ticket, {H, S}, {{0}, {0}}, {1}}) == Submit::kAccepted);
    pools.next(ticket);
  }
  CHECK(pools.mover->stats().io.warning == "disk tier out of service: there was no memory to say why");
}

TEST_CASE("threads that copy or do I/O are as many as can be had") {
  with_ever_more([](int room) { makes<MemoryLimit>(room, [] { make_thread_engine(4, 8); }); });
  with_ever_more([](int room) { CHECK(makes<ThreadLimit>(room, [] { make_thread_engine(4, 8); }) == (room > 0)); });
  with_ever_more([](int room) { makes<MemoryLimit>(room, [] { HostArena(4, 4u << 20); }); });
  with_ever_more([](int room) { CHECK(makes<ThreadLimit>(room, [] { HostArena(4, 4u << 20); })); });
}

TEST_CASE("an invalidation that gets no thread is in force here, says that it is not durable, and may be repeated") {
  Pools pools;
  const std::vector<std::uint8_t> space(32, 7);
  for (const std::uint8_t* what : {space.data(), static_cast<const std::uint8_t*>(nullptr)}) {
    std::uint64_t before = pools.disk->generation(space.data());
    with_ever_more([&](int room) {
      const bool durable = makes<ThreadLimit>(room, [&] { pools.disk->invalidate(what); });
      CHECK(durable == (room > 0));
      CHECK(pools.disk->generation(space.data()) > before);
      before = pools.disk->generation(space.data());
    });
    with_ever_more([&](int room) {
      const bool durable = makes<MemoryLimit>(room, [&] { pools.disk->invalidate(what); });
      CHECK((durable || pools.disk->generation(space.data()) > before));
      before = pools.disk->generation(space.data());
    });
    CHECK(pools.disk->invalidate(what) > before);
  }
}

}  // namespace
}  // namespace kvtier::test
