// Whatever a device refuses, and whenever: what was made for it is given back, and nothing is left that runs.
#include "cuda/driver.hpp"
#include "cuda/measure.hpp"
#include "cuda/single_page.hpp"
#include "device_rig.hpp"

using namespace kvtier;
using namespace kvtier::test;

namespace {

// Two slots in three segments, an arena of two pages, and a device that refuses one of all calls.
struct Small {
  explicit Small(std::uint64_t refused, std::uint64_t refused_order = 0)
      : memory(3 * 512 * 2), runtime(std::make_shared<Emulated>(1, true, faults(refused, refused_order))) {
    std::vector<Segment> segments;
    for (std::size_t s = 0; s < 3; ++s) segments.push_back({memory.data() + s * 1024, 512, 512});
    device = std::make_unique<DevicePool>(segments, 2);
    host = std::make_unique<HostArena>(2, 1536);
    pinned = std::make_shared<PinnedArena>(runtime, *host);
    pinned->wait();
  }
  static EmulatedFaults faults(std::uint64_t refused, std::uint64_t refused_order) {
    EmulatedFaults faults;
    faults.refuse_call = refused;
    faults.refuse = refused_order;
    return faults;
  }
  // What was given to the device is the host's again: nothing may run that touches it.
  void nothing_left() {
    runtime->host_uses(memory.data(), memory.size(), true);
    for (Slot page = 0; page < 2; ++page) runtime->host_uses(host->page(page), host->page_bytes(), true);
    runtime->run_out();
    CHECK(runtime->races().empty());
    CHECK(runtime->allocated() == 0);
  }

  std::vector<std::byte> memory;
  std::shared_ptr<Emulated> runtime;
  std::unique_ptr<DevicePool> device;
  std::unique_ptr<HostArena> host;
  std::shared_ptr<PinnedArena> pinned;
};

// Whether `work` ended without an Error.
template <class F>
bool passes(F&& work) {
  try {
    work();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

TEST_CASE("a page that is copied by itself leaves nothing behind, whatever is refused") {
  for (const bool up : {false, true}) {
    bool passed = false;
    for (std::uint64_t refused = 2; !passed; ++refused) {  // the first is the pin
      REQUIRE(refused < 100);
      CAPTURE(up);
      CAPTURE(refused);
      Small small(refused);
      std::vector<std::byte> page(1536);
      passed = passes([&] { copy_page(*small.runtime, *small.device, 1, page.data(), up, 0); });
      small.runtime->host_uses(page.data(), page.size(), true);
      small.nothing_left();
    }
  }
}

TEST_CASE("a copier that cannot be made leaves nothing behind, whatever is refused") {
  for (const Path path : kAllPaths) {
    bool passed = false;
    for (std::uint64_t refused = 1; !passed; ++refused) {
      REQUIRE(refused < 100);
      CAPTURE(path_name(path));
      CAPTURE(refused);
      CopierOptions options = by(path);
      options.host_calls = true;
      Small small(refused);
      passed = passes([&] { Copier(small.runtime, *small.device, *small.host, small.pinned, options); });
      passed = passed && small.pinned->pinned() == 2;
      small.nothing_left();
    }
  }
}

TEST_CASE("a measurement that a refused copy ends leaves no copy under way, and needs nobody to be woken") {
  const std::vector<Slot> slots{0, 1};
  for (const Path path : kAllPaths) {
    bool passed = false;
    for (std::uint64_t refused = 2; !passed; ++refused) {  // the first is the segment table's
      REQUIRE(refused < 100);
      CAPTURE(path_name(path));
      CAPTURE(refused);
      CopierOptions options = by(path);
      options.host_calls = true;
      options.batch_bytes = 1536;  // a page
      Small small(0, refused);
      passed = passes([&] {
        Copier copier(small.runtime, *small.device, *small.host, small.pinned, options);
        measure(copier, Lane::kOnboard, slots, slots, 3, 1536);
      });
      small.nothing_left();
    }
  }
}

TEST_CASE("a copier goes only when the driver's thread has made its last call") {
  CopierOptions options;
  options.host_calls = true;
  DeviceRig rig(options);
  const Stream signals = rig.runtime->streams()[3];
  const auto slots = run_of(0, 4);
  rig.runtime->hold(signals);
  REQUIRE(rig.submit(1, {D, H}, slots, slots) == Submit::kAccepted);
  CHECK(hop(rig.next(1), 0) == all(PageStatus::kOk, 4));
  REQUIRE(rig.mover->close());
  const std::uint64_t calls = rig.runtime->calls();
  std::atomic<bool> gone{false};
  std::thread going([&] {
    rig.mover.reset();
    gone = true;
  });
  while (!gone && rig.runtime->calls() == calls) std::this_thread::yield();
  CHECK(!gone);
  rig.runtime->hold(signals, false);
  going.join();
}

// ---- the driver's own functions, played ----------------------------------------------------------------------------

TEST_CASE("a device that cannot be opened has nothing loaded and no context held, whatever the driver refuses") {
  bool passed = false;
  for (std::uint64_t refused = 0; !passed; ++refused) {
    REQUIRE(refused < 100);
    CAPTURE(refused);
    PlayedDriver driver(std::make_shared<Emulated>());
    driver.refuse("", cuda::api::kUnknown, refused, 1);
    passed = passes([&] {
      const auto device = driver.open();
      driver.relent();
    });
    CHECK(driver.contexts() == 0);
    CHECK(driver.modules() == 0);
    CHECK(PlayedDriver::pushed() == 0);
    CHECK(PlayedDriver::mode() == cuda::api::kModeGlobal);
  }
}

TEST_CASE("closing a device whose context is broken leaves the calling thread's own context where it is") {
  PlayedDriver driver(std::make_shared<Emulated>());
  auto device = driver.open();
  driver.refuse("cuCtxPushCurrent", cuda::api::kBroken[0]);
  device.reset();
  CHECK(PlayedDriver::pushed() == 0);
  CHECK(PlayedDriver::mode() == cuda::api::kModeGlobal);
  CHECK(driver.contexts() == 0);
}
