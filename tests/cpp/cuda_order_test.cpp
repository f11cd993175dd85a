// The copier's promises of order, one at a time: the queue that could break one is held back, and blocks have versions.
// Each has its control, a device that misses the one wait behind it: that shows in the bytes, and in what is watched.
#include "device_rig.hpp"

namespace kvtier::test {
namespace {

constexpr std::uint32_t kOld = 1000, kNew = 2000;  // versions of a block's bytes
const std::vector<Slot> kBlocks = run_of(0, 4), kPages = run_of(20, 4);

// The faults that the controls plant. An end is seen too early at the copier's first look, which comes while the queue
// is held: nothing here is up to chance.
EmulatedFaults none() { return {}; }
EmulatedFaults no_wait() {
  EmulatedFaults faults;
  faults.skip_wait = 1;
  return faults;
}
EmulatedFaults early_end() {
  EmulatedFaults faults;
  faults.early_done = 1;
  return faults;
}

struct OrderRig : DeviceRig {
  OrderRig(Path path, const EmulatedFaults& faults, unsigned places = 2)
      : DeviceRig(with_places(path, places), 512, 1, faults), kept(!faults.skip_wait && !faults.early_done) {}
  static CopierOptions with_places(Path path, unsigned places) {
    CopierOptions options = by(path);
    options.places = places;
    return options;
  }
  void fill_slots(std::uint32_t name, const std::vector<Slot>& slots = kBlocks) {
    for (const Slot slot : slots) fill(slot, name + slot);
  }
  // The CPU's own write of host pages, as the next read from disk would be.
  void fill_pages(std::uint32_t name, const std::vector<Slot>& pages = kPages,
                  const std::vector<Slot>& slots = kBlocks) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      std::byte* const page = host->page(pages[i]);
      for (std::size_t at = 0; at < 3 * part; ++at) page[at] = byte(name + slots[i], at);
      runtime->host_uses(page, host->page_bytes(), true);
    }
  }
  bool slots_have(std::uint32_t name, const std::vector<Slot>& slots = kBlocks) const {
    return std::all_of(slots.begin(), slots.end(), [&](Slot slot) { return has(slot, name + slot); });
  }
  void store() { REQUIRE(submit(1, {D, H}, kBlocks, kPages) == Submit::kAccepted); }
  void load() { REQUIRE(submit(1, {H, D}, kPages, kBlocks) == Submit::kAccepted); }
  // With `held` standing still: a device that keeps its promises reports only when it is let go; a faulty one at once.
  void await_report(Stream held) {
    if (kept) {
      await_look();
      CHECK(reports_nothing());
      runtime->hold(held, false);
    }
    CHECK(hop(next(1), 0) == all(PageStatus::kOk, kBlocks.size()));
  }
  // Lets all queues run out. What is watched has seen a fault if there was one, and nothing else.
  void run_out() {
    for (const Stream stream : {engine, offload, onboard}) {
      runtime->hold(stream, false);
      runtime->finish(stream);
    }
    CHECK(runtime->races().empty() == kept);
  }

  const bool kept;
};

template <class Story>
void tell(Story story, const EmulatedFaults& fault) {
  for (const Path path : kAllPaths) {
    for (const bool faulty : {false, true}) {
      CAPTURE(path_name(path));
      CAPTURE(faulty);
      OrderRig rig(path, faulty ? fault : none());
      story(rig);
    }
  }
}

TEST_CASE("a store takes what the step queued before it writes; without its wait, what was there") {
  tell(
      [](OrderRig& rig) {
        rig.fill_slots(kOld);
        rig.runtime->hold(rig.engine);
        rig.queue_write(kBlocks, kNew);
        rig.store();
        rig.await_report(rig.engine);
        rig.run_out();
        CHECK(rig.host_has(kPages, rig.kept ? kNew : kOld, kBlocks));
      },
      no_wait());
}

TEST_CASE("a slot may be written again once its store was reported; not if that was too early") {
  tell(
      [](OrderRig& rig) {
        rig.fill_slots(kOld);
        rig.runtime->hold(rig.offload);
        rig.store();
        rig.await_report(rig.offload);
        rig.queue_write(kBlocks, kNew);
        rig.runtime->finish(rig.engine);
        rig.run_out();
        CHECK(rig.host_has(kPages, kOld, kBlocks) == rig.kept);
      },
      early_end());
}

TEST_CASE("a load leaves a block alone that a step queued before it reads; without its wait it does not") {
  tell(
      [](OrderRig& rig) {
        bool right = false;
        rig.fill_slots(kOld);
        rig.fill_pages(kNew);
        rig.runtime->hold(rig.engine);
        rig.queue_read(kBlocks, kOld, &right);
        rig.load();
        rig.await_report(rig.engine);
        rig.run_out();
        CHECK(right == rig.kept);
        CHECK(rig.slots_have(kNew));
      },
      no_wait());
}

TEST_CASE("a step queued once a load was reported reads what it brought; not if that was too early") {
  tell(
      [](OrderRig& rig) {
        bool right = false;
        rig.fill_slots(kOld);
        rig.fill_pages(kNew);
        rig.runtime->hold(rig.onboard);
        rig.load();
        rig.await_report(rig.onboard);
        rig.queue_read(kBlocks, kNew, &right);
        rig.runtime->finish(rig.engine);
        rig.run_out();
        CHECK(right == rig.kept);
      },
      early_end());
}

TEST_CASE("a host page may be filled again once its load was reported; not if that was too early") {
  tell(
      [](OrderRig& rig) {
        rig.fill_pages(kOld);
        rig.runtime->hold(rig.onboard);
        rig.load();
        rig.await_report(rig.onboard);
        rig.fill_pages(kNew);
        rig.run_out();
        CHECK(rig.slots_have(kOld) == rig.kept);
      },
      early_end());
}

// Two batches and one place: its list of copies, its sums and its staging memory are the second batch's when the first
// has ended. A store has all of them; of a load's, only the list is read when the copies run.
TEST_CASE("what a batch is copied by is used again when it has ended; if that was too early, it shows") {
  const std::vector<Slot> slots = run_of(0, 8), pages = run_of(20, 8);
  for (const bool load : {false, true}) {
    for (const Path path : kAllPaths) {
      if (load && path != Path::kBatch) continue;
      for (const bool faulty : {false, true}) {
        CAPTURE(load);
        CAPTURE(path_name(path));
        CAPTURE(faulty);
        OrderRig rig(path, faulty ? early_end() : none(), 1);
        rig.fill_slots(kOld, slots);
        rig.fill_pages(kNew, pages, slots);
        rig.runtime->hold(load ? rig.onboard : rig.offload);
        REQUIRE(rig.submit(1, load ? std::vector{H, D} : std::vector{D, H}, load ? pages : slots,
                           load ? slots : pages) == Submit::kAccepted);
        rig.await_look(2);  // a faulty device's second look is at the second batch
        rig.run_out();
        CHECK(hop(rig.next(1), 0) == all(PageStatus::kOk, slots.size()));
        CHECK((load ? rig.slots_have(kNew, slots) : rig.host_has(pages, kOld, slots)) == rig.kept);
      }
    }
  }
}

TEST_CASE("staging memory that is filled again before it was emptied shows, and behind an event it does not") {
  for (const bool waits : {true, false}) {
    CAPTURE(waits);
    Emulated device;
    const std::vector<std::byte> first(64, std::byte{1}), second(64, std::byte{2});
    std::vector<std::byte> out(64);
    const Stream filler = device.make_stream(), emptier = device.make_stream();
    const Event filled = device.make_event(), emptied = device.make_event();
    void* const staging = device.device_memory(64);
    device.hold(emptier);
    device.copy(staging, first.data(), 64, filler);
    device.record(filled, filler);
    device.wait(emptier, filled);
    device.copy(out.data(), staging, 64, emptier);
    device.record(emptied, emptier);
    if (waits) device.wait(filler, emptied);
    device.copy(staging, second.data(), 64, filler);
    if (!waits) device.finish(filler);
    device.hold(emptier, false);
    device.finish(filler);
    device.finish(emptier);
    CHECK((out == first) == waits);
    CHECK(device.races().empty() == waits);
    for (const Event event : {filled, emptied}) device.free_event(event);
    for (const Stream stream : {filler, emptier}) device.free_stream(stream);
    device.free_device(staging);
  }
}

}  // namespace
}  // namespace kvtier::test
