// No more memory in the threads that move pages, and in those that ask them to: no ticket is lost, no page stays taken,
// and nothing ends the process.
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <utility>

#include "device_rig.hpp"
#include "limits.hpp"

namespace kvtier::test {
namespace {

constexpr std::uint32_t kPages = 8;

// ---- threads that move pages --------------------------------------------------------------------------------------

// Leaves the thread that serves it room for so many allocations from its first batch on, until it was refused one and
// has looked for an end a few times more.
class Starved final : public StreamCopier {
 public:
  Starved(std::unique_ptr<StreamCopier> copier, int room) : copier_(std::move(copier)), room_(room) {}
  std::shared_ptr<DeviceFence> fence(std::uintptr_t stream) override { return copier_->fence(stream); }
  unsigned places() const override { return copier_->places(); }
  std::size_t batch_bytes() const override { return copier_->batch_bytes(); }
  void start(Lane lane, unsigned place, std::span<PageCopy> pages, ByteRange range, const DeviceFence* fence) override {
    if (!std::exchange(began_, true)) {
      before_ = refusals;
      allocations_left = room_;
    }
    copier_->start(lane, place, pages, range, fence);
  }
  bool ended(Lane lane, unsigned place) override {
    const bool ended = copier_->ended(lane, place);
    if (refusals != before_ && ++looks_ == 4) allocations_left = kNoLimit;
    return ended;
  }
  bool wake_by(std::function<void()> wake) override { return copier_->wake_by(std::move(wake)); }
  std::string note() const override { return copier_->note(); }

 private:
  std::unique_ptr<StreamCopier> copier_;
  const int room_;
  bool began_ = false;
  int before_ = 0, looks_ = 0;
};

TEST_CASE("a stream's thread that gets no memory fails pages or waits for it, and gives all of them back") {
  const std::vector<Slot> blocks = run_of(0, kPages), pages = run_of(20, kPages), back = run_of(30, kPages);
  for (const Path path : kAllPaths) {
    for (int room = 0, before = -1; before != refusals; ++room) {
      REQUIRE(room < 1000);
      before = refusals;
      CAPTURE(path_name(path));
      CAPTURE(room);
      DeviceRig rig(by(path), 512);
      rig.mover.reset();
      CopierOptions options = by(path);
      options.batch_bytes = 4 * 3 * rig.part;
      rig.mover = std::make_unique<Mover>(
          rig.device.get(), rig.host.get(), nullptr, MoverOptions{},
          std::make_unique<Starved>(std::make_unique<Copier>(rig.runtime, *rig.device, *rig.host, rig.pinned, options),
                                    room));
      for (const Slot slot : blocks) rig.fill(slot, slot);
      REQUIRE(rig.submit(1, {D, H}, blocks, pages) == Submit::kAccepted);
      const auto status = hop(rig.next(1), 0);
      for (std::uint32_t i = 0; i < kPages; ++i) {
        if (status[i] == PageStatus::kOk) CHECK(rig.host_has({pages[i]}, 0, {blocks[i]}));
      }
      // Some of what follows may be refused too, until the thread has its memory back.
      for (Ticket ticket = 2, whole = 0; whole < 2; ++ticket) {
        REQUIRE(ticket < 20);
        const bool load = whole == 1;
        REQUIRE(rig.submit(ticket, load ? std::vector{H, D} : std::vector{D, H}, load ? pages : blocks,
                           load ? back : pages) == Submit::kAccepted);
        whole += hop(rig.next(ticket), 0) == all(PageStatus::kOk, kPages) ? 1 : 0;
      }
      for (std::uint32_t i = 0; i < kPages; ++i) CHECK(rig.has(back[i], blocks[i]));
      CHECK(rig.mover->pending() == 0);
    }
  }
}

// Copies nothing, at once, and leaves whoever serves it no memory at all.
class Idle final : public StreamCopier {
 public:
  std::shared_ptr<DeviceFence> fence(std::uintptr_t) override { return nullptr; }
  unsigned places() const override { return 2; }
  std::size_t batch_bytes() const override { return 2 * Rig::kPayload; }
  void start(Lane, unsigned, std::span<PageCopy> pages, ByteRange, const DeviceFence*) override {
    allocations_left = 0;
    for (PageCopy& page : pages) page.status = PageStatus::kOk;
  }
  bool ended(Lane, unsigned) override { return true; }
  bool wake_by(std::function<void()>) override { return false; }
  std::string note() const override { return {}; }
};
class IdleHands final : public DeviceCopier {
 public:
  void gather(std::span<PageCopy> pages, unsigned) override { done(pages); }
  void scatter(std::span<PageCopy> pages, ByteRange, unsigned) override { done(pages); }

 private:
  static void done(std::span<PageCopy> pages) {
    allocations_left = 0;
    for (PageCopy& page : pages) page.status = PageStatus::kOk;
  }
};

// Orders that are all under way at once, each with pages of its own in every tier, on all paths, some with a deadline
// and some in slices. Returns how many were told to their end.
template <class Plane>
Ticket move_all(Plane& plane, Ticket tickets, std::size_t payload, bool with_disk) {
  const std::vector<std::vector<Tier>> paths = with_disk ? std::vector<std::vector<Tier>>{{D, H, S}, {H, D}, {S, H, D}}
                                                         : std::vector<std::vector<Tier>>{{D, H}, {H, D}};
  const std::vector<std::byte> ids = identities_of(run_of(0, kPages));
  const std::vector<std::size_t> cuts{16, payload};
  for (Ticket ticket = 1; ticket <= tickets; ++ticket) {
    Order order;
    order.ticket = ticket;
    order.path = paths[ticket % paths.size()];
    std::vector<Slot> slots;
    for (std::size_t i = 0; i < order.path.size(); ++i) {
      for (const Slot slot : run_of(static_cast<Slot>(ticket - 1) * kPages, kPages)) slots.push_back(slot);
    }
    order.slots = slots.data();
    order.count = kPages;
    order.identities = ids.data();
    order.identity_bytes = kIdBytes;
    if (ticket % 5 == 0) order.deadline = Clock::now() + std::chrono::milliseconds(ticket % 7);
    if (order.path[0] == H && order.path[1] == D && ticket % 2 == 0) order.cuts = cuts;
    REQUIRE(plane.submit(order) == Submit::kAccepted);
  }
  std::vector<Completion> told;
  const Time limit = Clock::now() + kPatience;
  while (plane.pending() != 0 && Clock::now() < limit) {
    if (plane.poll(&told) == 0) std::this_thread::yield();
  }
  const auto final = [](const Completion& each) { return each.final; };
  return static_cast<Ticket>(std::count_if(told.begin(), told.end(), final));
}

TEST_CASE("threads that copy need no memory to take what they copy and to give it back") {
  constexpr Ticket kTickets = 600;
  constexpr std::size_t kPayload = 64;
  for (const bool streams : {false, true}) {
    CAPTURE(streams);
    LedgerOptions options;
    options.device_page_bytes = kPayload;
    options.bytes_in_flight = 100 * kPayload;
    Scheduler scheduler(options);
    HostArena host(kTickets * kPages, kPayload);
    const int before = refusals;
    std::unique_ptr<CopyExecutor> hands;
    std::unique_ptr<StreamExecutor> queues;
    if (streams) {
      queues =
          std::make_unique<StreamExecutor>(scheduler, host, std::make_unique<Idle>(), true, std::chrono::seconds(1));
    } else {
      hands = std::make_unique<CopyExecutor>(scheduler, host, std::make_unique<IdleHands>(), 3, true);
    }
    CHECK(move_all(scheduler, kTickets, kPayload, false) == kTickets);
    CHECK(refusals == before);
    scheduler.close();
  }
}

TEST_CASE("nor where a page goes on to the disk, or comes from there") {
  constexpr Ticket kTickets = Rig::kSlots / kPages;
  Rig rig;
  rig.mover.reset();
  MoverOptions options;
  options.make_engine = [](std::string*) { return make_thread_engine(2, 128); };
  rig.mover =
      std::make_unique<Mover>(rig.device.get(), rig.host.get(), rig.disk.get(), options, std::make_unique<Idle>());
  const int before = refusals;
  for (int round = 0; round < 20; ++round) CHECK(move_all(*rig.mover, kTickets, Rig::kPayload, true) == kTickets);
  CHECK(refusals == before);
}

TEST_CASE("a context that is broken gives its pages back also where there is no memory to say so") {
  DeviceRig rig({}, 512, 1, {}, {}, DeviceRig::Through::kDriver);
  rig.mover.reset();
  static const auto query = PlayedDriver::raw().event_query;
  static std::atomic<bool> broken;
  broken = false;
  api::Functions call = PlayedDriver::raw();
  call.event_query = [](Event event) {
    if (!broken) return query(event);
    allocations_left = 0;  // for what is made of the answer
    return 719;            // CUDA_ERROR_LAUNCH_FAILED
  };
  call.pop = [](api::Context* context) {
    allocations_left = kNoLimit;
    return PlayedDriver::raw().pop(context);
  };
  const std::vector<std::byte> image(1);
  const auto link = open_device(call, 13000, 0, image);
  CopierOptions options;
  options.batch_bytes = 4 * 3 * rig.part;
  rig.mover = std::make_unique<Mover>(rig.device.get(), rig.host.get(), nullptr, MoverOptions{},
                                      std::make_unique<Copier>(link, *rig.device, *rig.host, rig.pinned, options));
  const std::vector<Slot> blocks = run_of(0, kPages);
  broken = true;
  REQUIRE(rig.submit(1, {D, H}, blocks, blocks) == Submit::kAccepted);
  CHECK(hop(rig.next(1), 0) == all(PageStatus::kWriteError, kPages));
  broken = false;
  rig.mover.reset();
}

TEST_CASE("what an emulated device has no memory to watch it says") {
  Emulated device;
  std::vector<std::byte> bytes(100);
  {
    const MemoryLimit limit(0);
    for (std::byte& each : bytes) device.host_uses(&each, 1, true);
  }
  REQUIRE(device.races().size() == 1);
  CHECK(device.races()[0] == "100 uses by the host went unwatched for want of memory");
}

// ---- threads that ask ---------------------------------------------------------------------------------------------

// A scheduler that nobody serves.
struct Counter {
  explicit Counter(std::uint32_t queue_pages = 1u << 15)
      : scheduler(with(queue_pages)), ids(identities_of(run_of(0, kPages))) {}
  static LedgerOptions with(std::uint32_t queue_pages) {
    LedgerOptions options;
    options.device_page_bytes = options.disk_page_bytes = 1;
    options.queue_pages = queue_pages;
    return options;
  }
  Submit submit(Ticket ticket, std::span<const Tier> path, Priority priority, std::shared_ptr<DeviceFence> fence = {}) {
    Order order;
    order.ticket = ticket;
    order.path = path;
    order.slots = slots;
    order.count = kPages;
    order.identities = ids.data();
    order.identity_bytes = kIdBytes;
    order.priority = priority;
    order.fence = std::move(fence);
    return scheduler.submit(order);
  }

  Scheduler scheduler;
  const std::vector<std::byte> ids;
  const Slot slots[2 * kPages] = {};
};
constexpr Tier kDown[] = {D, H}, kRead[] = {S, H};

TEST_CASE("a poll that gets no memory tells later what it cannot tell now") {
  for (int room = 0, before = -1; before != refusals; ++room) {
    REQUIRE(room < 1000);
    CAPTURE(room);
    Counter counter;
    counter.scheduler.arm(true);
    for (Ticket ticket = 1; ticket <= 20; ++ticket) {
      REQUIRE(counter.submit(ticket, ticket == 10 ? kRead : kDown, Priority::kDemand) == Submit::kAccepted);
    }
    Chunk hanging;
    REQUIRE(counter.scheduler.take_disk(kPages, 1u << 20, &hanging));
    for (Ticket ticket = 1; ticket <= 20; ++ticket) REQUIRE(counter.scheduler.cancel(ticket));
    before = refusals;
    std::vector<Completion> told;
    try {
      const MemoryLimit limit(room);
      counter.scheduler.poll(&told);
    } catch (const std::bad_alloc&) {
      CHECK(told.empty());
    }
    pollfd entry{counter.scheduler.fd(), POLLIN, 0};
    CHECK(::poll(&entry, 1, 0) == (told.size() == 20 ? 0 : 1));
    CHECK(counter.scheduler.has_reports(Clock::now()) == (told.size() != 20));
    counter.scheduler.poll(&told);
    REQUIRE(told.size() == 20);
    for (Ticket ticket = 1; ticket <= 20; ++ticket) {
      const Completion& each = told[ticket - 1];
      CHECK(each.ticket == ticket);
      CHECK(each.final == (ticket != 10));
      CHECK(each.status == all(ticket == 10 ? PageStatus::kPending : PageStatus::kCancelled, kPages));
    }
    CHECK(counter.scheduler.pending() == 1);
  }
}

TEST_CASE("an order for which there is no memory is not taken, holds nothing, and drops nothing for itself") {
  for (int room = 0, before = -1; before != refusals; ++room) {
    REQUIRE(room < 1000);
    CAPTURE(room);
    Counter counter(kPages);
    REQUIRE(counter.submit(1, kDown, Priority::kBackground) == Submit::kAccepted);
    const auto fence = std::make_shared<DeviceFence>();
    before = refusals;
    bool taken = false;
    try {
      const MemoryLimit limit(room);
      taken = counter.submit(2, kDown, Priority::kDemand, fence) == Submit::kAccepted;
    } catch (const std::bad_alloc&) {
    }
    CHECK(taken == (before == refusals));
    CHECK(counter.scheduler.knows(2) == taken);
    CHECK(fence.use_count() == (taken ? 2 : 1));
    CHECK(counter.scheduler.reports() == (taken ? 1 : 0));
    if (!taken) CHECK(counter.submit(2, kDown, Priority::kDemand, fence) == Submit::kAccepted);
    std::vector<Completion> told;
    CHECK(counter.scheduler.poll(&told) == 1);
    CHECK((told[0].ticket == 1 && told[0].final));
  }
}

}  // namespace
}  // namespace kvtier::test
