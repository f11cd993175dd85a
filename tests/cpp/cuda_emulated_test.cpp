// The emulated device's own controls: what a real one would refuse, or what nothing orders, is told, and nothing else.
#include <cstdlib>
#include <thread>

#include "device_rig.hpp"

namespace kvtier::test {
namespace {

constexpr std::size_t kBytes = 4096;

// Two registrations of two pages each side by side, and a page that is not pinned.
struct Pinned {
  explicit Pinned(Emulated& device) : device(device), pages(5 * kBytes) {
    for (const std::size_t page : {0, 2}) device.pin(at(page), 2 * kBytes);
  }
  ~Pinned() {
    for (const std::size_t page : {0, 2}) device.unpin(at(page));
  }
  std::byte* at(std::size_t page) { return pages.data() + page * kBytes; }

  Emulated& device;
  std::vector<std::byte> pages;
};

TEST_CASE("a kernel that touches a page of the host which is not pinned is told") {
  for (const std::size_t page : {0, 1, 3, 4}) {
    for (const Kernel kernel : {Kernel::kGather, Kernel::kScatter}) {
      CAPTURE(page);
      CAPTURE(kernel_name(kernel));
      Emulated device;
      Pinned host(device);
      std::vector<std::byte> slots(kBytes);
      const SegmentEntry table[] = {{reinterpret_cast<std::uintptr_t>(slots.data()), kBytes, 0}, {0, 0, kBytes}};
      PageLaunch launch{};
      launch.segments = table;
      launch.end = launch.payload = kBytes;
      launch.segment_count = launch.pages = 1;
      launch.page[0].page = reinterpret_cast<std::uintptr_t>(host.at(page));
      device.launch(kernel, launch, 1, nullptr);
      device.finish(nullptr);
      CHECK(device.races().size() == (page == 4 ? 1 : 0));
    }
  }
}

TEST_CASE("a copy that reaches over a registration's end is told, also as one of a list") {
  struct Case {
    std::size_t first, bytes;
    bool fits;
  };
  for (const Case& each :
       {Case{0, 2 * kBytes, true}, Case{kBytes, kBytes + 1, false}, Case{2 * kBytes, 2 * kBytes, true},
        Case{3 * kBytes, kBytes + 1, false}, Case{4 * kBytes, kBytes, true}}) {
    for (const bool as_list : {false, true}) {
      CAPTURE(each.first);
      CAPTURE(as_list);
      Emulated device;
      Pinned host(device);
      std::vector<std::byte> slots(2 * kBytes);
      CopyList list;
      list.add(slots.data(), host.at(0) + each.first, each.bytes);
      as_list ? device.copy_list(list, nullptr)
              : device.copy(slots.data(), host.at(0) + each.first, each.bytes, nullptr);
      device.finish(nullptr);
      CHECK(device.races().empty() == each.fits);
    }
  }
}

TEST_CASE("memory that is unpinned before queued work has used it is told") {
  for (const bool held : {false, true}) {
    Emulated device;
    std::vector<std::byte> page(kBytes), slots(kBytes);
    device.pin(page.data(), kBytes);
    device.hold(nullptr, held);
    device.copy(slots.data(), page.data(), kBytes, nullptr);
    if (!held) device.finish(nullptr);
    device.unpin(page.data());
    CHECK(device.races().size() == (held ? 1 : 0));
    device.hold(nullptr, false);
    device.finish(nullptr);
  }
}

TEST_CASE("an event whose recording is refused is what it was") {
  Emulated device;
  const Event event = device.make_event();
  const Stream gone = device.make_stream();
  device.free_stream(gone);
  CHECK_THROWS_AS(device.record(event, gone), Error);
  CHECK(device.done(event));  // as one that was never recorded
  device.free_event(event);
}

TEST_CASE("who waits for a stream that is freed meanwhile waits for what is queued there") {
  Emulated device;
  const Stream held = device.make_stream(), stream = device.make_stream();
  const Event event = device.make_event();
  std::vector<std::byte> from(kBytes, std::byte{1}), to(kBytes);
  device.hold(held);
  device.record(event, held);
  device.wait(stream, event);
  device.copy(to.data(), from.data(), kBytes, stream);
  const std::uint64_t before = device.calls();
  std::thread waiter([&] { device.finish(stream); });
  while (device.calls() == before) std::this_thread::yield();
  device.free_stream(stream);
  device.hold(held, false);
  waiter.join();
  CHECK(to == from);
  device.free_event(event);
  device.free_stream(held);
}

}  // namespace
}  // namespace kvtier::test
