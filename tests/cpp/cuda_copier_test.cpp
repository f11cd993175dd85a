// The copier over an emulated device: every path, every order that the driver's rules allow, and what happens when one
// wait is left out. See csrc/cuda/emulated.hpp for what is watched, and cuda_order_test.cpp for each promise of order.
#include <cmath>

#include "cuda/driver.hpp"
#include "device_rig.hpp"

using namespace kvtier;
using namespace kvtier::test;

namespace kvtier::test {

const DeviceRig* left_behind[2];  // seen from everywhere: so nobody leaves the pointers out, or calls it a leak

}

namespace {

// Fill, store, overwrite, read, load back over what was read: every order that the copier has to keep, several times.
// Returns whether all bytes came out right.
bool play(DeviceRig& rig) {
  bool right = true;
  for (std::uint32_t turn = 0; turn < 3; ++turn) {
    const std::vector<Slot> sources = run_of(0, 12), pages = run_of(20, 12), others = run_of(30, 12);
    const Ticket ticket = 10 * turn + 1;
    rig.runtime->hold(rig.engine);
    rig.queue_write(sources, 100 * turn);  // the step that fills what is stored, not begun when the store is queued
    if (rig.submit(ticket, {D, H}, sources, pages) != Submit::kAccepted) return false;
    rig.runtime->hold(rig.engine, false);
    right &= hop(rig.next(ticket), 0) == all(PageStatus::kOk, 12) && rig.host_has(pages, 100 * turn, sources);
    rig.runtime->hold(rig.engine);
    rig.queue_read(others);         // the last reader of what is loaded over
    std::vector<std::size_t> cuts;  // once by layers, which end within the pool's segments
    if (turn == 1) cuts = {16, 3 * rig.part / 32 * 16, 3 * rig.part};
    if (rig.submit(ticket + 1, {H, D}, pages, others, cuts) != Submit::kAccepted) return false;
    rig.runtime->hold(rig.engine, false);
    right &= hop(rig.next(ticket + 1), 0) == all(PageStatus::kOk, 12);
    for (std::size_t i = 0; i < others.size(); ++i) right &= rig.has(others[i], 100 * turn + sources[i]);
    rig.queue_read(others);                      // the engine's next step sees what was loaded,
    rig.queue_write(sources, 7000 + 10 * turn);  // and may fill what was stored
  }
  rig.runtime->finish(rig.engine);
  return right;
}

}  // namespace

TEST_CASE("every path stores and loads the same bytes, in order with the engine's own queue") {
  for (const Path path : kAllPaths) {
    for (const std::size_t part : {std::size_t{4096}, std::size_t{1000}}) {  // 1000: pages off the lanes, with padding
      for (const bool host_calls : {false, true}) {
        CAPTURE(path_name(path));
        CAPTURE(part);
        CopierOptions options = by(path);
        options.host_calls = host_calls;
        DeviceRig rig(options, part);
        CHECK(play(rig));
        CHECK(rig.runtime->races().empty());
      }
    }
  }
}

TEST_CASE("no order in which the queues may run is a race") {
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    CAPTURE(seed);
    DeviceRig rig(by(kAllPaths[seed % 4]), seed % 3 == 0 ? 1000 : 512, seed);
    CHECK(play(rig));
    CHECK(rig.runtime->races().empty());
  }
}

TEST_CASE("control: leaving out any one wait shows") {
  for (const Path path : kAllPaths) {
    CAPTURE(path_name(path));
    std::uint64_t waits = 0;
    {
      DeviceRig rig(by(path), 512);
      REQUIRE(play(rig));
      waits = rig.runtime->waits();
    }
    CHECK(waits == 6);  // one for each transfer
    for (std::uint64_t left_out = 1; left_out <= waits; ++left_out) {
      CAPTURE(left_out);
      EmulatedFaults faults;
      faults.skip_wait = left_out;
      DeviceRig rig(by(path), 512, 1, faults);
      play(rig);
      CHECK(!rig.runtime->races().empty());
    }
  }
}

TEST_CASE("a place is used again only when its batch has ended") {
  CopierOptions options = by(Path::kStaged);
  options.places = 1;
  options.batch_bytes = 3 * 4096;  // a page
  DeviceRig rig(options);
  CHECK(play(rig));
  CHECK(rig.runtime->races().empty());
}

TEST_CASE("a copy that is refused fails its batch alone, is said once, and leaves the rest running") {
  for (const Path path : kAllPaths) {
    for (std::uint64_t refused = 2; refused < 7; ++refused) {  // the first is the segment table's
      CAPTURE(path_name(path));
      CAPTURE(refused);
      EmulatedFaults faults;
      faults.refuse = refused;
      DeviceRig rig(by(path), 4096, 1, faults);
      const auto slots = run_of(0, 12);
      rig.queue_write(slots, 3);
      REQUIRE(rig.submit(1, {D, H}, slots, slots) == Submit::kAccepted);
      std::vector<Slot> good;
      const auto status = hop(rig.next(1), 0);
      for (Slot i = 0; i < 12; ++i) {
        if (status[i] == PageStatus::kOk) good.push_back(i);
      }
      CHECK(rig.host_has(good, 3, good));
      REQUIRE(rig.submit(2, {H, D}, good, good) == Submit::kAccepted);
      CHECK(rig.next(2).final);
      REQUIRE(rig.submit(3, {D, H}, slots, run_of(20, 12)) == Submit::kAccepted);
      CHECK(hop(rig.next(3), 0) == all(PageStatus::kOk, 12));
      if (good.size() < 12) CHECK(rig.mover->stats().device_note.find("refused on purpose") != std::string::npos);
    }
  }
}

TEST_CASE("pages that could not be pinned are copied piece by piece, and the reason is told") {
  EmulatedFaults faults;
  faults.refuse_pin = 3;
  DeviceRig rig(by(Path::kDirect), 4096, 1, faults);
  CHECK(rig.pinned->pinned() == 10);
  CHECK(rig.mover->stats().device_note.find("of the host tier are pinned (CUDA_ERROR_OUT_OF_MEMORY") !=
        std::string::npos);
  CHECK(play(rig));
  CHECK(rig.runtime->races().empty());
}

TEST_CASE("a page that does not match its checksum leaves the device block alone") {
  MoverOptions mover;
  mover.verify_host = true;
  DeviceRig rig({}, 4096, 1, {}, mover);
  const auto slots = run_of(0, 4), to = run_of(10, 4);
  rig.queue_write(slots, 5);
  REQUIRE(rig.submit(1, {D, H}, slots, slots) == Submit::kAccepted);
  rig.next(1);
  rig.host->page(2)[17] ^= std::byte{1};
  for (const Slot slot : to) rig.fill(slot, 900);
  REQUIRE(rig.submit(2, {H, D}, slots, to) == Submit::kAccepted);
  CHECK(hop(rig.next(2), 0) == std::vector{PageStatus::kOk, PageStatus::kOk, PageStatus::kCorrupt, PageStatus::kOk});
  CHECK(rig.has(to[2], 900));
  CHECK(rig.has(to[3], 5 + 3));
}

TEST_CASE("a transfer is refused while the engine's stream is captured, and accepted once it is not") {
  DeviceRig rig;
  const auto slots = run_of(0, 2);
  rig.runtime->capture(rig.engine, true);
  CHECK(rig.submit(1, {D, H}, slots, slots) == Submit::kFull);
  CHECK(rig.mover->stats().device_note.find("is being captured into a graph") != std::string::npos);
  rig.runtime->capture(rig.engine, false);
  rig.queue_write(slots, 1);
  REQUIRE(rig.submit(1, {D, H}, slots, slots) == Submit::kAccepted);
  CHECK(rig.mover->stats().device_note.empty());  // that was then
  CHECK(hop(rig.next(1), 0) == all(PageStatus::kOk, 2));
}

TEST_CASE("a device that never answers is left alone at the close, and what waited is told") {
  MoverOptions mover;
  mover.close_limit = std::chrono::milliseconds(50);
  auto rig = std::make_unique<DeviceRig>(CopierOptions{}, 512, 1, EmulatedFaults{}, mover);
  const auto slots = run_of(0, 8);
  rig->runtime->hold(rig->engine);
  rig->queue_write(slots, 1);
  REQUIRE(rig->submit(1, {D, H}, slots, slots) == Submit::kAccepted);
  while (rig->runtime->orders() < 2) std::this_thread::yield();  // the table's copy, then the first batch
  CHECK(!rig->mover->close());
  CHECK(hop(rig->next(1), 0) == all(PageStatus::kCancelled, 8));
  rig->runtime->hold(rig->engine, false);
  left_behind[0] = rig.release();  // what the device may still touch stays
}

TEST_CASE("a device that answers after all finds whom it calls, also when the mover is gone") {
  MoverOptions mover;
  mover.close_limit = std::chrono::milliseconds(50);
  CopierOptions options;
  options.host_calls = true;
  auto rig = std::make_unique<DeviceRig>(options, 512, 1, EmulatedFaults{}, mover);
  rig->runtime->hold(rig->engine);
  rig->queue_write(run_of(0, 8), 1);
  REQUIRE(rig->submit(1, {D, H}, run_of(0, 8), run_of(0, 8)) == Submit::kAccepted);
  while (rig->runtime->orders() < 2) std::this_thread::yield();
  CHECK(!rig->mover->close());
  rig->mover.reset();
  rig->runtime->hold(rig->engine, false);
  rig->runtime->run_out();  // and with it the calls
  left_behind[1] = rig.release();
}

TEST_CASE("options and memory that make no sense are named") {
  std::vector<std::byte> memory(4096);
  const DevicePool device({{memory.data(), 4096, 4096}}, 1);
  HostArena host(1, 4096);
  const auto runtime = std::make_shared<Emulated>();
  const auto pinned = std::make_shared<PinnedArena>(runtime, host);
  CopierOptions options;
  for (const double share : {0.0, -1.0, 1.5, 1e30, -1e30, std::nan("")}) {
    options.processor_share = share;
    CHECK_THROWS_WITH_AS(Copier(runtime, device, host, pinned, options), doctest::Contains("processor_share"),
                         std::invalid_argument);
  }
  options.processor_share = 0.08;
  options.places = 0;
  CHECK_THROWS_WITH_AS(Copier(runtime, device, host, pinned, options), doctest::Contains("places"),
                       std::invalid_argument);
  options.places = 1;
  CHECK(Copier(runtime, device, host, pinned, options).blocks() == 10);  // 8 % of 132
  HostArena other(1, 4096), small(1, 512);
  CHECK_THROWS_WITH_AS(Copier(runtime, device, other, pinned, options), doctest::Contains("pinned: another arena's"),
                       std::invalid_argument);
  const auto pinned_small = std::make_shared<PinnedArena>(runtime, small);
  CHECK_THROWS_WITH_AS(Copier(runtime, device, small, pinned_small, options),
                       doctest::Contains("device pages have 4096 bytes, host pages 512"), std::invalid_argument);
}

TEST_CASE("an arena is pinned in chunks for which no engine's step waits long, and of a page at least") {
  const auto runtime = std::make_shared<Emulated>();
  for (const std::size_t page : {std::size_t{4096}, std::size_t{3} << 20, std::size_t{8} << 20}) {
    CAPTURE(page);
    const HostArena host(3, page);
    PinnedArena pinned(runtime, host);
    pinned.wait();
    CHECK(pinned.pinned() == 3);
    CHECK(pinned.chunk_pages() * page <= std::max<std::size_t>(page, 4 << 20));
  }
}

TEST_CASE("any number of threads may wait until an arena is pinned") {
  const auto runtime = std::make_shared<Emulated>();
  const HostArena host(4, 4096);
  runtime->stall();
  PinnedArena pinned(runtime, host, 4096);
  while (runtime->stalled() == 0) std::this_thread::yield();
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&] {
      pinned.wait();
      CHECK(pinned.pinned() == 4);
    });
  }
  runtime->stall(false);
  for (std::thread& each : waiting) each.join();
  pinned.wait();
}

TEST_CASE("without a driver there is a reason and no device") {
  const DriverStatus status = driver_status();
  if (status.devices > 0) return;
  CHECK(!status.note.empty());
  CHECK_THROWS_AS(open_device(0, built_image()), Error);
}
