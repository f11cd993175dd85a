// What an engine captures into a graph comes out whole, whatever is copied, pinned, opened and closed meanwhile; and
// whatever the driver refuses, for a capture's sake or another, nothing is taken for ended that may still run.
#include <atomic>

#include "cuda/measure.hpp"
#include "cuda/single_page.hpp"
#include "device_rig.hpp"

namespace kvtier::test {
namespace {

const std::vector<Slot> kBlocks = run_of(0, 8), kPages = run_of(20, 8), kBack = run_of(30, 8);
constexpr std::uint32_t kOld = 1000, kNew = 2000;  // versions of a block's bytes

struct DriverRig : DeviceRig {
  explicit DriverRig(Path path = Path::kDirect, bool host_calls = false)
      : DeviceRig(with(path, host_calls), 512, 1, {}, {}, Through::kDriver), side(runtime->make_stream()) {}
  ~DriverRig() {
    driver->relent();
    for (const Stream stream : {engine, side, offload, onboard}) runtime->hold(stream, false);
    mover.reset();
    runtime->run_out();
    runtime->free_stream(side);
    CHECK(PlayedDriver::pushed() == 0);
    CHECK(PlayedDriver::mode() == api::kModeGlobal);
    CHECK(runtime->races().empty());
  }
  static CopierOptions with(Path path, bool host_calls) {
    CopierOptions options = by(path);
    options.host_calls = host_calls;
    return options;
  }
  void fill_blocks(std::uint32_t name) {
    for (const Slot slot : kBlocks) fill(slot, name + slot);
  }
  // Waits until `symbol`, which is called again and again, was called that much more often, or something is reported.
  void await_calls(const std::string& symbol, std::uint64_t count) {
    const Time limit = Clock::now() + kPatience;
    for (const std::uint64_t seen = driver->calls(symbol); driver->calls(symbol) < seen + count;) {
      if (!reports_nothing()) return;
      if (Clock::now() > limit) throw std::runtime_error(symbol + " was not called");
      std::this_thread::yield();
    }
  }

  const Stream side;  // on which the engine captures
};

}  // namespace

TEST_CASE("control: the played driver refuses what the real one does, and the capture is spoilt") {
  const auto emulated = std::make_shared<Emulated>();
  PlayedDriver driver(emulated);
  const auto device = driver.open();
  const Stream captured = emulated->make_stream(), other = emulated->make_stream();
  const Event event = device->make_event();
  const auto in_mode = [&](int mode, auto work) {
    std::swap(PlayedDriver::mode(), mode);
    work();
    std::swap(PlayedDriver::mode(), mode);
  };
  struct Case {
    int capture, thread;
    bool same_thread, allowed;
  };
  using namespace cuda::api;
  for (const Case& each :
       {Case{kModeGlobal, kModeGlobal, false, false}, Case{kModeGlobal, kModeThreadLocal, false, true},
        Case{kModeGlobal, kModeRelaxed, false, true}, Case{kModeThreadLocal, kModeGlobal, false, true},
        Case{kModeThreadLocal, kModeGlobal, true, false}, Case{kModeGlobal, kModeThreadLocal, true, false},
        Case{kModeGlobal, kModeRelaxed, true, true}, Case{kModeRelaxed, kModeGlobal, true, true}}) {
    CAPTURE(each.capture);
    CAPTURE(each.thread);
    CAPTURE(each.same_thread);
    driver.begin_capture(captured, each.capture);
    Result result = kUnknown;
    const auto look = [&] { in_mode(each.thread, [&] { result = driver.raw().event_query(event); }); };
    if (each.same_thread) {
      look();
    } else {
      std::thread(look).join();
    }
    CHECK(result == (each.allowed ? kSuccess : kCaptureUnsupported));
    CHECK(driver.end_capture(captured) == (each.allowed ? kSuccess : kCaptureInvalidated));
  }
  const Functions raw = driver.raw();
  driver.begin_capture(captured);
  CHECK(raw.event_record(event, captured) == kSuccess);
  in_mode(kModeRelaxed, [&] { CHECK(raw.event_query(event) == kCapturedEvent); });
  CHECK(driver.end_capture(captured) == kCaptureInvalidated);
  driver.begin_capture(captured);
  CHECK(raw.event_record(event, captured) == kSuccess);
  CHECK(raw.stream_wait(other, event, 0) == kSuccess);
  CHECK(driver.end_capture(captured) == kCaptureUnjoined);
  driver.begin_capture(captured);
  driver.begin_capture(other);
  CHECK(raw.event_record(event, captured) == kSuccess);
  CHECK(raw.stream_wait(other, event, 0) == kCaptureMerge);
  for (const Stream stream : {captured, other}) CHECK(driver.end_capture(stream) == kCaptureInvalidated);
  CHECK(raw.event_record(event, other) == kSuccess);  // and of no capture
  for (const bool waits : {true, false}) {
    for (const bool blocking : {true, false}) {
      driver.begin_capture(captured, kModeRelaxed, blocking);
      CHECK((waits ? raw.stream_wait(nullptr, event, 0) : raw.stream_finish(nullptr)) ==
            (blocking ? kCaptureImplicit : kSuccess));
      CHECK(driver.end_capture(captured) == (blocking ? kCaptureInvalidated : kSuccess));
    }
  }
  device->free_event(event);
  for (const Stream stream : {captured, other}) emulated->free_stream(stream);
}

TEST_CASE("transfers go on while a graph is captured, and the graph is whole") {
  for (const Path path : kAllPaths) {
    for (const bool host_calls : {false, true}) {
      for (const int mode : {api::kModeGlobal, api::kModeThreadLocal, api::kModeRelaxed}) {
        CAPTURE(path_name(path));
        CAPTURE(host_calls);
        CAPTURE(mode);
        DriverRig rig(path, host_calls);
        rig.fill_blocks(kOld);
        rig.runtime->hold(rig.offload);
        REQUIRE(rig.submit(1, {D, H}, kBlocks, kPages) == Submit::kAccepted);
        rig.driver->begin_capture(rig.side, mode);
        rig.await_calls("cuEventQuery", 2);
        CHECK(rig.reports_nothing());
        rig.runtime->hold(rig.offload, false);
        CHECK(hop(rig.next(1), 0) == all(PageStatus::kOk, kBlocks.size()));
        CHECK(rig.host_has(kPages, kOld, kBlocks));
        rig.queue_write(kBlocks, kNew);
        REQUIRE(rig.submit(2, {H, D}, kPages, kBack) == Submit::kAccepted);  // by the thread that captures
        CHECK(hop(rig.next(2), 0) == all(PageStatus::kOk, kBack.size()));
        for (std::size_t i = 0; i < kBack.size(); ++i) CHECK(rig.has(kBack[i], kOld + kBlocks[i]));
        CHECK(rig.driver->end_capture(rig.side) == api::kSuccess);
      }
    }
  }
}

TEST_CASE("an arena is pinned, a copier made and a device opened and closed while a graph is captured") {
  for (const bool same_thread : {false, true}) {
    CAPTURE(same_thread);
    DriverRig rig;
    rig.fill_blocks(kOld);
    const auto work = [&] {
      HostArena host(8, 3 * rig.part);
      const auto pinned = std::make_shared<PinnedArena>(rig.link, host, 2 * host.page_bytes());
      pinned->wait();
      CHECK(pinned->pinned() == 8);
      CHECK(pinned->note().empty());
      for (const Path path : kAllPaths) {
        const Copier made(rig.link, *rig.device, host, pinned, DriverRig::with(path, true));
      }
      std::vector<std::byte> page(3 * rig.part);
      copy_page(*rig.link, *rig.device, 3, page.data(), false, reinterpret_cast<std::uintptr_t>(rig.engine));
      CHECK(page[5] == rig.byte(kOld + 3, 5));
      CHECK(rig.driver->open()->facts().processors == 132);
    };
    rig.driver->begin_capture(rig.side);
    if (same_thread) {
      work();
    } else {
      std::thread(work).join();
    }
    CHECK(rig.driver->end_capture(rig.side) == api::kSuccess);
    CHECK(rig.driver->contexts() == 1);
    CHECK(rig.driver->modules() == 1);
  }
}

TEST_CASE(
    "behind a captured stream nothing is queued, also where the capture begins meanwhile, and the graph is whole") {
  for (const bool meanwhile : {false, true}) {
    CAPTURE(meanwhile);
    DriverRig rig;
    const auto begin = [&] { rig.driver->begin_capture(rig.engine); };
    const auto engine = reinterpret_cast<std::uintptr_t>(rig.engine);
    meanwhile ? rig.driver->before("cuEventRecord", begin) : begin();
    CHECK(rig.submit(1, {D, H}, kBlocks, kPages) == Submit::kFull);
    CHECK(rig.mover->stats().device_note.find("is being captured into a graph") != std::string::npos);
    CHECK(rig.driver->end_capture(rig.engine) == api::kSuccess);
    std::vector<std::byte> page(3 * rig.part);
    meanwhile ? rig.driver->before("cuEventRecord", begin) : begin();
    CHECK_THROWS_WITH_AS(copy_page(*rig.link, *rig.device, 3, page.data(), false, engine),
                         doctest::Contains("is being captured into a graph"), Error);
    CHECK(rig.driver->end_capture(rig.engine) == api::kSuccess);
    REQUIRE(rig.submit(1, {D, H}, kBlocks, kPages) == Submit::kAccepted);
    CHECK(hop(rig.next(1), 0) == all(PageStatus::kOk, kBlocks.size()));
  }
}

TEST_CASE("behind the default stream nothing is queued while a stream that it waits for is captured") {
  DriverRig rig;
  rig.driver->begin_capture(rig.side, api::kModeGlobal, true);
  std::vector<std::byte> page(3 * rig.part);
  CHECK_THROWS_WITH_AS(copy_page(*rig.link, *rig.device, 3, page.data(), false, 0),
                       doctest::Contains("is being captured into a graph"), Error);
  CHECK(rig.driver->end_capture(rig.side) == api::kSuccess);
}

// ---- refusals ------------------------------------------------------------------------------------------------------

TEST_CASE("a batch has ended when its event says so or the context is broken, whatever else is answered") {
  std::vector<api::Result> answers{1, api::kOutOfMemory, 201, 400, 600, 800, 909, api::kUnknown, PlayedDriver::kThrows};
  for (api::Result each = api::kCaptureUnsupported; each <= api::kCaptureWrongThread; ++each) answers.push_back(each);
  for (const std::string symbol : {"cuEventQuery", "cuEventRecord"}) {
    for (const api::Result answer : answers) {
      CAPTURE(symbol);
      CAPTURE(answer);
      DriverRig rig;
      rig.fill_blocks(kOld);
      rig.runtime->hold(rig.offload);
      rig.driver->refuse(symbol, answer, symbol == "cuEventRecord" ? 1 : 0);  // the first is the fence's
      REQUIRE(rig.submit(1, {D, H}, kBlocks, kPages) == Submit::kAccepted);
      rig.await_calls(symbol, 5);
      CHECK(rig.reports_nothing());
      rig.driver->relent();
      rig.await_calls("cuEventQuery", 2);
      CHECK(rig.reports_nothing());
      rig.runtime->hold(rig.offload, false);
      CHECK(hop(rig.next(1), 0) == all(PageStatus::kOk, kBlocks.size()));
      rig.queue_write(kBlocks, kNew);
      CHECK(rig.host_has(kPages, kOld, kBlocks));
    }
  }
}

TEST_CASE("a broken context ends its batches as failed, and says so") {
  // CUDA_ERROR_DEINITIALIZED, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED, what a kernel may do, and what may
  // end a context from outside.
  for (const api::Result answer : {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}) {
    for (const std::string symbol : {"cuEventQuery", "cuCtxPushCurrent"}) {
      CAPTURE(answer);
      CAPTURE(symbol);
      DriverRig rig;
      rig.runtime->hold(rig.engine);
      REQUIRE(rig.submit(1, {D, H}, kBlocks, kPages) == Submit::kAccepted);
      rig.await_look();
      rig.driver->refuse(symbol, answer);
      CHECK(hop(rig.next(1), 0) == all(PageStatus::kWriteError, kBlocks.size()));
      CHECK(rig.mover->stats().device_note.find("error " + std::to_string(answer)) != std::string::npos);
    }
  }
}

TEST_CASE("whatever is refused, and whenever, no page is given back that the device may still touch") {
  const char* const symbols[] = {"cuEventRecord",  "cuStreamWaitEvent",  "cuEventQuery",     "cuMemcpyAsync",
                                 "cuLaunchKernel", "cuMemcpyBatchAsync", "cuLaunchHostFunc", "cuCtxPushCurrent",
                                 "cuEventCreate",  "cuStreamIsCapturing"};
  for (const Path path : kAllPaths) {
    for (const char* const symbol : symbols) {
      const bool host_calls = symbol == std::string("cuLaunchHostFunc");
      if (host_calls && path != Path::kDirect) continue;  // one that is lost holds up a batch for 50 ms
      for (const api::Result answer : {api::kCaptureUnsupported, api::kUnknown, PlayedDriver::kThrows}) {
        for (std::uint64_t after = 0; after < 3; ++after) {
          CAPTURE(path_name(path));
          CAPTURE(symbol);
          CAPTURE(answer);
          CAPTURE(after);
          DriverRig rig(path, host_calls);
          rig.queue_write(kBlocks, kOld);
          rig.driver->refuse(symbol, answer, after, 3);
          bool stored = false;
          for (Ticket ticket = 1; ticket < 5;
               ++ticket) {  // a store or a load that is refused whole leaves all as it was
            const bool load = stored && ticket % 2 == 0;
            const auto& from = load ? kPages : kBlocks;
            const auto& to = load ? kBack : kPages;
            if (rig.submit(ticket, load ? std::vector{H, D} : std::vector{D, H}, from, to) != Submit::kAccepted)
              continue;
            const auto status = hop(rig.next(ticket), 0);
            for (const auto& slots : {kBlocks, kBack}) rig.queue_write(slots, kNew);  // the engine's again
            for (const Slot page : kPages) {
              rig.runtime->host_uses(rig.host->page(page), rig.host->page_bytes(), true);
            }
            stored = status == all(PageStatus::kOk, kBlocks.size());
          }
          rig.driver->relent();
          REQUIRE(rig.submit(9, {D, H}, kBlocks, kPages) == Submit::kAccepted);
          CHECK(hop(rig.next(9), 0) == all(PageStatus::kOk, kBlocks.size()));
        }
      }
    }
  }
}

TEST_CASE("who waits for a stream to end waits for it, also where the driver refuses that for a while") {
  for (const api::Result answer : {api::kCaptureUnsupported, api::kUnknown, PlayedDriver::kThrows}) {
    CAPTURE(answer);
    DriverRig rig;
    rig.queue_write(kBlocks, kOld);
    rig.runtime->hold(rig.engine);
    rig.queue_write(kBlocks, kNew);
    rig.driver->refuse("cuStreamSynchronize", answer, 0, 3);
    std::vector<std::byte> page(3 * rig.part);
    const std::uint64_t made = rig.driver->calls("cuStreamSynchronize");
    std::atomic<bool> over{false};
    std::thread copying([&] {
      CHECK_THROWS(
          copy_page(*rig.link, *rig.device, 3, page.data(), false, reinterpret_cast<std::uintptr_t>(rig.engine)));
      rig.runtime->host_uses(page.data(), page.size(), true);  // whoever made the page may use it for something else
      over = true;
    });
    while (!over && rig.driver->calls("cuStreamSynchronize") < made + 4) std::this_thread::yield();
    CHECK(!over);
    rig.runtime->hold(rig.engine, false);
    copying.join();
  }
}

TEST_CASE("a measurement whose copies cannot be followed ends, and leaves none under way") {
  DriverRig rig;
  rig.driver->refuse("cuEventQuery", api::kUnknown);
  {
    Copier copier(rig.link, *rig.device, *rig.host, rig.pinned, by(Path::kDirect));
    CHECK_THROWS_WITH_AS(
        measure(copier, Lane::kOffload, kBlocks, kPages, 1, 3 * rig.part, std::chrono::milliseconds(20)),
        doctest::Contains("did not end in time: a copy on P could not be followed at once (cuEventQuery"), Error);
  }
  for (const Slot page : kPages) rig.runtime->host_uses(rig.host->page(page), rig.host->page_bytes(), true);
}

TEST_CASE("pinning is put off by a capture that the driver minds, and given up for what else it refuses") {
  for (const api::Result answer : {api::kCaptureUnsupported, api::kCaptureImplicit}) {
    DriverRig rig;
    HostArena host(8, 3 * rig.part);
    rig.driver->refuse("cuMemHostRegister", answer, 1, 2);
    PinnedArena pinned(rig.link, host, 2 * host.page_bytes());
    pinned.wait();
    CHECK(pinned.pinned() == 8);
    CHECK(pinned.note().empty());
  }
  for (const api::Result answer : {api::kOutOfMemory, PlayedDriver::kThrows}) {
    DriverRig rig;
    HostArena host(8, 3 * rig.part);
    rig.driver->refuse("cuMemHostRegister", answer, 1, 1);
    PinnedArena pinned(rig.link, host, 2 * host.page_bytes());
    pinned.wait();
    CHECK(pinned.pinned() == 2);
    CHECK(pinned.note().find("of the host tier are pinned") != std::string::npos);
  }
}

TEST_CASE("an arena that goes while a capture puts its pinning off does not wait for that to end") {
  DriverRig rig;
  HostArena host(8, 3 * rig.part);
  rig.driver->refuse("cuMemHostRegister", api::kCaptureUnsupported);
  {
    const PinnedArena pinned(rig.link, host);
    rig.await_calls("cuMemHostRegister", 2);
  }
  CHECK(rig.driver->calls("cuMemHostUnregister") == 0);
}

}  // namespace kvtier::test
