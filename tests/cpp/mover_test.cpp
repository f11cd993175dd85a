// The mover with its threads, on real files, with an engine that waits for the test.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "mover_rig.hpp"

namespace kvtier::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr PageStatus kOk = PageStatus::kOk;

// Says of the first operation of each harvest twice that it has ended.
class StutteringEngine final : public FileEngine {
 public:
  explicit StutteringEngine(std::unique_ptr<FileEngine> engine) : engine_(std::move(engine)) {}
  bool submit(const IoRequest& request) override { return engine_->submit(request); }
  void flush() override { engine_->flush(); }
  std::size_t reap(IoResult* results, std::size_t max, std::chrono::nanoseconds timeout) override {
    const std::size_t count = engine_->reap(results, max, timeout);
    if (count == 0 || count == max) return count;
    results[count] = results[0];
    return count + 1;
  }
  std::size_t in_flight() const override { return engine_->in_flight(); }
  void wake() override { engine_->wake(); }
  const char* name() const override { return "stuttering"; }

 private:
  std::unique_ptr<FileEngine> engine_;
};

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

TEST_CASE("every path brings every byte") {
  for (const bool verify_host : {false, true}) {
    MoverOptions options;
    options.verify_host = verify_host;
    options.copy_threads = 2;
    options.bytes_in_flight = 40'000;  // several chunks per transfer
    Rig rig(options);
    const std::vector<std::uint32_t> names{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    const auto at = [](Slot first) { return run_of(first, 10); };
    for (Slot i = 0; i < 10; ++i) rig.write_device(20 + i, names[i]);
    REQUIRE(rig.submit({1, {D, H}, {at(20), at(0)}, names}) == Submit::kAccepted);
    CHECK(rig.next(1).status == all(kOk, 10));
    REQUIRE(rig.submit({2, {H, S}, {at(0), at(30)}, names}) == Submit::kAccepted);
    CHECK(rig.next(2).status == all(kOk, 10));
    REQUIRE(rig.submit({3, {S, H}, {at(30), at(40)}, names}) == Submit::kAccepted);
    CHECK(rig.next(3).status == all(kOk, 10));
    rig.wipe_device();
    REQUIRE(rig.submit({4, {H, D}, {at(40), at(5)}, names}) == Submit::kAccepted);
    const Completion up = rig.next(4);
    CHECK(up.status == all(kOk, 10));
    CHECK(up.hops[0].lane == Lane::kOnboard);
    CHECK(up.hops[0].bytes == 10 * Rig::kPayload);
    for (Slot i = 0; i < 10; ++i) CHECK(rig.device_has(5 + i, names[i]));
    REQUIRE(rig.submit({5, {D, H, S}, {at(5), at(12), at(50)}, names}) == Submit::kAccepted);
    CHECK(rig.next(5).status == all(kOk, 20));
    rig.wipe_device();
    auto scattered = at(50);
    std::reverse(scattered.begin(), scattered.end());
    std::vector<std::uint32_t> backwards(names.rbegin(), names.rend());
    REQUIRE(rig.submit({6, {S, H, D}, {scattered, at(33), at(44)}, backwards}) == Submit::kAccepted);
    const Completion done = rig.next(6);
    CHECK(done.status == all(kOk, 20));
    CHECK(done.hops[1].bytes == 10 * Rig::kPayload);
    for (Slot i = 0; i < 10; ++i) CHECK(rig.device_has(44 + i, backwards[i]));
    for (Slot i = 0; i < 10; ++i) CHECK(rig.host->checksum(33 + i) != 0);
    CHECK(rig.mover->pending() == 0);
  }
}

TEST_CASE("neighbours on both sides share one operation, others do not") {
  Rig rig;
  rig.store({1, 2, 3, 4, 5, 6}, 0);
  const std::size_t before = rig.gate->seen().size();
  rig.submit({1, {S, H}, {{0, 1, 2, 4, 5, 3}, {10, 11, 12, 20, 21, 22}}, {1, 2, 3, 5, 6, 4}});
  CHECK(rig.next(1).status == all(kOk, 6));
  std::vector<std::size_t> lengths;
  for (const IoRequest& r : rig.gate->seen()) lengths.push_back(r.length / rig.host->page_bytes());
  lengths.erase(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(before));
  CHECK(lengths == std::vector<std::size_t>{3, 2, 1});
}

TEST_CASE("the disk gets the next page before the last one is verified") {
  MoverOptions options;
  options.bytes_in_flight = 1;  // one page at a time
  Rig rig(options);
  rig.store({1, 2}, 0);
  std::vector<std::uint64_t> sums;  // of the first page, as each read begins: it has one when it is verified
  rig.gate->spoil([&](const IoRequest&) -> std::optional<std::int64_t> {
    sums.push_back(rig.host->checksum(10));
    return std::nullopt;
  });
  rig.submit({1, {S, H}, {{0, 1}, {10, 20}}, {1, 2}});
  CHECK(rig.next(1).status == all(kOk, 2));
  CHECK(sums == std::vector<std::uint64_t>{0, 0});
  CHECK(rig.host->checksum(10) != 0);
  CHECK(rig.mover->stats().lanes[index_of(Lane::kStage)].bytes_in_flight == 0);
}

TEST_CASE("an operation that is said to have ended twice ends once") {
  MoverOptions options;
  auto gate = std::make_shared<Gate>();
  options.make_engine = [gate](std::string*) {
    return std::make_unique<StutteringEngine>(std::make_unique<GatedEngine>(gate, 128));
  };
  Rig rig(options);
  rig.store({1, 2, 3, 4}, 0);
  for (Ticket ticket = 1; ticket <= 3; ++ticket) {
    rig.submit({ticket, {S, H}, {{0, 2, 1, 3}, {10, 20, 30, 40}}, {1, 3, 2, 4}});
    CHECK(rig.next(ticket).status == all(kOk, 4));
  }
  CHECK(rig.mover->stats().lanes[index_of(Lane::kStage)].pages == 12);
  CHECK(rig.mover->stats().lanes[index_of(Lane::kStage)].bytes_in_flight == 0);
  CHECK(rig.mover->pending() == 0);
}

TEST_CASE("one bad page in a shared operation does not take the others with it") {
  Rig rig;
  rig.store({1, 2, 3, 4}, 0);
  rig.gate->spoil([&](const IoRequest& r) -> std::optional<std::int64_t> {
    const bool covers_slot_2 = r.offset <= rig.disk->offset(2) && rig.disk->offset(2) < r.offset + r.length;
    return covers_slot_2 ? std::optional<std::int64_t>(-EIO) : std::nullopt;
  });
  rig.submit({1, {S, H, D}, {{0, 1, 2, 3}, {10, 11, 12, 13}, {0, 1, 2, 3}}, {1, 2, 3, 4}});
  const Completion done = rig.next(1);
  CHECK(hop(done, 0) == std::vector{kOk, kOk, PageStatus::kReadError, kOk});
  CHECK(hop(done, 1) == std::vector{kOk, kOk, PageStatus::kSkipped, kOk});
  CHECK_FALSE(rig.device_has(2, 3));
  CHECK(rig.device_has(3, 4));
  CHECK(rig.host->checksum(12) == 0);
  CHECK(rig.mover->stats().lanes[index_of(Lane::kStage)].bytes_in_flight == 0);
}

TEST_CASE("a flipped bit, a short read and another's page never count as read") {
  Rig rig;
  rig.store({1, 2, 3}, 0);
  const auto place = static_cast<off_t>(rig.disk->offset(0) + Rig::kPayload - 1);
  const auto first = static_cast<off_t>(rig.disk->offset(0));
  alignas(4096) static std::byte aligned[8192];
  REQUIRE(pread(rig.disk->fd(), aligned, sizeof aligned, first) == sizeof aligned);
  aligned[place - first] ^= std::byte{0x10};
  REQUIRE(pwrite(rig.disk->fd(), aligned, sizeof aligned, first) == sizeof aligned);
  rig.gate->spoil([&](const IoRequest& r) -> std::optional<std::int64_t> {
    return r.offset == rig.disk->offset(1) ? std::optional<std::int64_t>(4096) : std::nullopt;
  });
  // Slots apart, so that nothing is merged; block 9 was never stored in slot 2.
  rig.submit({1, {S, H, D}, {{0, 1, 2, 5}, {10, 20, 30, 40}, {0, 1, 2, 3}}, {1, 2, 9, 7}});
  const Completion done = rig.next(1);
  CHECK(hop(done, 0) ==
        std::vector{PageStatus::kCorrupt, PageStatus::kShortRead, PageStatus::kStale, PageStatus::kStale});
  CHECK(hop(done, 1) == all(PageStatus::kSkipped, 4));
  for (const Slot slot : {10u, 20u, 30u, 40u}) CHECK(rig.host->checksum(slot) == 0);
  for (Slot slot = 0; slot < 4; ++slot) CHECK(rig.memory[slot * Rig::kPart] == std::byte{0xEE});
}

TEST_CASE("two pages exchanged on disk are noticed, and only with verification off are they served") {
  for (const bool verify : {true, false}) {
    MoverOptions options;
    options.verify = verify;
    Rig rig(options);
    rig.store({1, 2}, 0);
    alignas(4096) static std::byte a[8192], b[8192];
    REQUIRE(pread(rig.disk->fd(), a, sizeof a, static_cast<off_t>(rig.disk->offset(0))) == sizeof a);
    REQUIRE(pread(rig.disk->fd(), b, sizeof b, static_cast<off_t>(rig.disk->offset(1))) == sizeof b);
    REQUIRE(pwrite(rig.disk->fd(), b, sizeof b, static_cast<off_t>(rig.disk->offset(0))) == sizeof b);
    REQUIRE(pwrite(rig.disk->fd(), a, sizeof a, static_cast<off_t>(rig.disk->offset(1))) == sizeof a);
    rig.submit({1, {S, H, D}, {{0, 1}, {10, 11}, {0, 1}}, {1, 2}});
    const Completion done = rig.next(1);
    CHECK(hop(done, 0) == all(verify ? PageStatus::kCorrupt : kOk, 2));
    CHECK(rig.device_has(0, 2) == !verify);
  }
}

TEST_CASE("a host page that changed is caught with verify_host, also one that nothing vouches for") {
  MoverOptions options;
  options.verify_host = true;
  Rig rig(options);
  rig.write_device(0, 1), rig.write_device(1, 2), rig.write_device(2, 3);
  rig.submit({1, {D, H}, {{0, 1, 2}, {0, 1, 2}}, {1, 2, 3}});
  rig.next(1);
  rig.host->page(0)[17] ^= std::byte{1};
  rig.host->checksum(1) = 0;
  rig.submit({2, {H, D}, {{0, 1, 2}, {10, 11, 12}}, {1, 2, 3}});
  CHECK(rig.next(2).status == std::vector{PageStatus::kCorrupt, PageStatus::kCorrupt, kOk});
  CHECK_FALSE(rig.device_has(10, 1));
}

TEST_CASE("a slot's record is gone before its first byte is written, and comes back only after the last") {
  Rig rig;
  rig.store({1}, 0);
  const auto one = identities_of({1}), two = identities_of({2});
  const auto* id1 = reinterpret_cast<const PageIdentity*>(one.data());
  const auto* id2 = reinterpret_cast<const PageIdentity*>(two.data());
  REQUIRE(rig.disk->checksum_for(0, id1) != 0);
  rig.write_device(0, 2);
  rig.gate->shut();
  rig.submit({1, {D, H, S}, {{0}, {5}, {0}}, {2}});
  REQUIRE(rig.gate->await_waiting(1));
  CHECK(rig.disk->checksum_for(0, id1) == 0);
  CHECK(rig.disk->checksum_for(0, id2) == 0);
  rig.gate->open();
  CHECK(rig.next(1).status == all(kOk, 2));
  CHECK(rig.disk->checksum_for(0, id2) == rig.host->checksum(5));
}

TEST_CASE("a failed or short page write is a write error and leaves the record cleared") {
  for (const std::int64_t result : {std::int64_t{-ENOSPC}, std::int64_t{4096}}) {
    Rig rig;
    rig.store({1}, 0);
    rig.gate->spoil([&](const IoRequest&) { return std::optional(result); });
    rig.write_device(0, 2);
    rig.submit({1, {D, H, S}, {{0}, {5}, {0}}, {2}});
    const Completion done = rig.next(1);
    CHECK(hop(done, 0) == all(kOk, 1));
    CHECK(hop(done, 1) == all(PageStatus::kWriteError, 1));
    const auto one = identities_of({1}), two = identities_of({2});
    CHECK(rig.disk->checksum_for(0, reinterpret_cast<const PageIdentity*>(one.data())) == 0);
    CHECK(rig.disk->checksum_for(0, reinterpret_cast<const PageIdentity*>(two.data())) == 0);
  }
}

TEST_CASE("a page invalidated while it is read is stale, one invalidated before is not read") {
  Rig rig;
  rig.store({1, 2}, 0);
  rig.gate->shut();
  rig.submit({1, {S, H}, {{0}, {10}}, {1}});
  REQUIRE(rig.gate->await_waiting(1));
  rig.disk->invalidate(nullptr);
  rig.gate->open();
  CHECK(rig.next(1).status == all(PageStatus::kStale, 1));
  CHECK(rig.host->checksum(10) == 0);
  const std::size_t before = rig.gate->seen().size();
  rig.submit({2, {S, H}, {{1}, {11}}, {2}});
  CHECK(rig.next(2).status == all(PageStatus::kStale, 1));
  CHECK(rig.gate->seen().size() == before);
}

TEST_CASE("demand reads overtake queued background reads and writes") {
  MoverOptions options;
  options.bytes_in_flight = 8192;  // one page at a time per lane
  Rig rig(options);
  rig.store({1, 2, 3, 4, 5, 6}, 0);
  const std::size_t before = rig.gate->seen().size();
  rig.gate->shut();
  rig.submit({1, {S, H}, {{0, 2, 4}, {10, 20, 30}}, {1, 3, 5}, Priority::kBackground});
  REQUIRE(rig.gate->await_waiting(1));
  rig.submit({2, {S, H}, {{1}, {40}}, {2}, Priority::kPrefetch, Clock::now() + seconds(1000)});
  rig.submit({3, {S, H}, {{3}, {45}}, {4}, Priority::kDemand});
  rig.gate->open();
  for (const Ticket t : {1, 2, 3}) rig.next(t);
  std::vector<std::uint64_t> slots;
  for (const IoRequest& r : rig.gate->seen()) slots.push_back(r.offset / rig.host->page_bytes());
  slots.erase(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(before));
  CHECK(slots == std::vector<std::uint64_t>{0, 3, 1, 2, 4});
}

TEST_CASE("a deadline ends the wait for a hung read, whether it had begun or not") {
  Rig rig;
  rig.store({1, 2}, 0);
  rig.gate->shut();
  rig.submit({1, {S, H, D}, {{0, 1}, {10, 20}, {0, 1}}, {1, 2}, Priority::kDemand, Clock::now() + milliseconds(20)});
  Completion done = rig.next(1);
  CHECK(hop(done, 1) == all(PageStatus::kOverdue, 2));
  for (const PageStatus status : hop(done, 0))
    CHECK((status == PageStatus::kPending || status == PageStatus::kOverdue));
  rig.gate->open();
  if (!done.final) done = rig.next(1);
  CHECK(done.final);
  CHECK(hop(done, 1) == all(PageStatus::kOverdue, 2));
  CHECK(rig.memory[0] == std::byte{0xEE});
}

TEST_CASE("a hung read holds up nothing but its own slots") {
  Rig rig;
  rig.store({1, 2, 3, 4}, 0);
  rig.gate->shut();
  rig.submit({1, {S, H, D}, {{0, 2}, {10, 20}, {0, 2}}, {1, 3}});
  REQUIRE(rig.gate->await_waiting(2));
  rig.mover->cancel(1);
  Completion done = rig.next(1);  // both reads hang
  CHECK_FALSE(done.final);
  CHECK(hop(done, 0) == all(PageStatus::kPending, 2));
  CHECK(hop(done, 1) == all(PageStatus::kCancelled, 2));
  rig.submit({2, {H, D}, {{30}, {7}}, {9}});
  CHECK(rig.next(2).status == all(kOk, 1));
  rig.gate->let_through(1);
  rig.submit({3, {S, H, D}, {{1}, {40}, {8}}, {2}});
  rig.gate->let_through(1);
  done = rig.next(1);
  CHECK(done.final);
  CHECK(hop(done, 0) == all(PageStatus::kCancelled, 2));
  CHECK(hop(done, 1) == all(PageStatus::kCancelled, 2));
  CHECK(rig.memory[0] == std::byte{0xEE});
  rig.gate->open();
  CHECK(rig.next(3).status == all(kOk, 2));
  CHECK(rig.device_has(8, 2));
}

TEST_CASE("a read that passes the I/O limit ends its transfer, frees its share of the lane, and may still return") {
  MoverOptions options;
  options.io_limit = milliseconds(30);
  options.bytes_in_flight = 8192;  // the hung one fills the lane
  Rig rig(options);
  rig.store({1, 2}, 0);
  rig.gate->shut();
  rig.submit({1, {S, H}, {{0}, {10}}, {1}});
  rig.submit({2, {S, H}, {{1}, {20}}, {2}});
  Completion done = rig.next(1);
  CHECK_FALSE(done.final);
  CHECK(done.status == all(PageStatus::kPending, 1));
  REQUIRE(rig.gate->await_waiting(2));
  rig.gate->open();
  CHECK(rig.next(1).status == all(kOk, 1));
  done = rig.next(2);
  if (!done.final) done = rig.next(2);
  CHECK(done.status == all(kOk, 1));
  CHECK(rig.mover->stats().io.hung >= 1);
  CHECK(rig.mover->stats().lanes[index_of(Lane::kStage)].bytes_in_flight == 0);
}

TEST_CASE("cancelling again and again, at any stage, settles once") {
  Rig rig;
  rig.store({1, 2}, 0);
  rig.gate->shut();
  CHECK_FALSE(rig.mover->cancel(1));
  rig.submit({1, {S, H, D}, {{0}, {10}, {0}}, {1}});
  REQUIRE(rig.gate->await_waiting(1));
  for (int i = 0; i < 3; ++i) CHECK(rig.mover->cancel(1));
  Completion done = rig.next(1);
  CHECK_FALSE(done.final);
  CHECK(hop(done, 1) == all(PageStatus::kCancelled, 1));
  for (int i = 0; i < 3; ++i) CHECK(rig.mover->cancel(1));
  rig.gate->open();
  done = rig.next(1);
  CHECK(done.final);
  CHECK(hop(done, 0) == all(PageStatus::kCancelled, 1));
  CHECK(rig.host->checksum(10) == 0);
  CHECK_FALSE(rig.mover->cancel(1));
  CHECK(rig.mover->pending() == 0);
}

TEST_CASE("a cancelled write leaves no record") {
  Rig rig;
  rig.write_device(0, 1);
  rig.gate->shut();
  rig.submit({1, {D, H, S}, {{0}, {5}, {0}}, {1}});
  REQUIRE(rig.gate->await_waiting(1));
  rig.mover->cancel(1);
  rig.gate->open();
  Completion done = rig.next(1);
  if (!done.final) done = rig.next(1);
  CHECK(hop(done, 0) == all(kOk, 1));
  CHECK(hop(done, 1) == all(PageStatus::kCancelled, 1));
  const auto one = identities_of({1});
  CHECK(rig.disk->checksum_for(0, reinterpret_cast<const PageIdentity*>(one.data())) == 0);
}

TEST_CASE("a disk that keeps failing goes out of service with one warning; the other lanes go on") {
  Rig rig;
  std::vector<std::uint32_t> names(20);
  std::iota(names.begin(), names.end(), 1);
  rig.store(names, 0);
  rig.gate->spoil([](const IoRequest&) { return std::optional<std::int64_t>(-EIO); });
  int failures = 0;
  Ticket ticket = 1;
  for (; ticket < 500 && !rig.mover->stats().offline; ++ticket) {
    rig.submit({ticket, {S, H}, {{static_cast<Slot>(ticket % 20)}, {40}}, {names[ticket % 20]}});
    failures += rig.next(ticket).status[0] == PageStatus::kReadError;
  }
  CHECK(failures >= DiskHealth::kMinFailures);
  const std::string warning = rig.mover->stats().io.warning;
  CHECK(warning.find("Input/output error") != std::string::npos);
  const std::size_t before = rig.gate->seen().size();
  rig.submit({1000, {S, H, D}, {{0}, {41}, {0}}, {1}});
  const Completion done = rig.next(1000);
  CHECK(hop(done, 0) == all(PageStatus::kOffline, 1));
  CHECK(hop(done, 1) == all(PageStatus::kSkipped, 1));
  CHECK(rig.gate->seen().size() == before);
  rig.submit({1001, {H, D}, {{0}, {1}}, {1}});
  CHECK(rig.next(1001).status == all(kOk, 1));
  CHECK(rig.mover->stats().io.warning == warning);
}

TEST_CASE("a few failures among many successes keep the disk in service; no engine at all does not") {
  DiskHealth health;
  for (int i = 0; i < 100; ++i) CHECK_FALSE(health.note(i % 3 != 0));
  MoverOptions options;
  options.make_engine = [](std::string* note) {
    *note = "forbidden";
    return std::unique_ptr<FileEngine>();
  };
  Rig rig(options);
  rig.submit({1, {H, S}, {{0}, {0}}, {1}});
  CHECK(rig.next(1).status == all(PageStatus::kOffline, 1));
  CHECK(rig.mover->stats().io.warning.find("forbidden") != std::string::npos);
}

TEST_CASE("an engine that takes fewer operations than it is given loses none") {
  Rig rig({}, true, 3);
  std::vector<std::uint32_t> names(30);
  std::iota(names.begin(), names.end(), 1);
  rig.store(names, 0);
  auto scattered = run_of(0, 30);
  std::reverse(scattered.begin(), scattered.end());
  rig.submit({1, {S, H, D}, {scattered, run_of(30, 30), run_of(0, 30)}, {names.rbegin(), names.rend()}});
  CHECK(rig.next(1).status == all(kOk, 60));
}

TEST_CASE("closing ends what waits, waits for what runs, and says what never returned") {
  MoverOptions options;
  options.close_limit = milliseconds(100);
  Rig rig(options);
  rig.store({1, 2, 3}, 0);
  rig.gate->shut();
  rig.submit({1, {S, H, D}, {{0}, {10}, {0}}, {1}});
  REQUIRE(rig.gate->await_waiting(1));
  CHECK_FALSE(rig.mover->close());
  const Completion done = rig.next(1);
  CHECK(done.final);
  CHECK(done.status == all(PageStatus::kCancelled, 2));
  CHECK(rig.submit({2, {H, D}, {{0}, {0}}, {1}}) == Submit::kClosed);
  CHECK_FALSE(rig.mover->wait(seconds(60), rig.mover->reports()));
  CHECK_FALSE(rig.mover->close());
}

TEST_CASE("closing with work everywhere settles every ticket") {
  Rig rig;
  std::vector<std::uint32_t> names(20);
  std::iota(names.begin(), names.end(), 1);
  rig.store(names, 0);
  for (Ticket t = 1; t <= 30; ++t) {
    rig.submit({t, {S, H, D}, {run_of(0, 20), run_of(20, 20), run_of(40, 20)}, names, Priority::kPrefetch});
  }
  CHECK(rig.mover->close());
  for (Ticket t = 1; t <= 30; ++t) {
    Completion done = rig.next(t);
    if (!done.final) done = rig.next(t);
    CHECK(std::count(done.status.begin(), done.status.end(), PageStatus::kPending) == 0);
  }
}

TEST_CASE("the eventfd is written only when armed, once until polled, also for what waited already") {
  Rig rig;
  const int fd = rig.mover->fd();
  const auto move = [&](Ticket t) {
    const std::uint64_t seen = rig.mover->reports();
    rig.submit({t, {H, D}, {{0}, {0}}, {1}});
    while (rig.mover->reports() == seen) std::this_thread::yield();  // not wait(): what is unpolled would end it
  };
  move(1);
  CHECK_FALSE(readable(fd));
  rig.mover->arm(true);
  CHECK(readable(fd));
  rig.mover->poll(&rig.reported);
  CHECK_FALSE(readable(fd));
  move(2);  // whoever armed it stays armed, whoever polled
  CHECK(readable(fd));
  move(3);
  rig.mover->poll(&rig.reported);
  CHECK(rig.reported.size() == 3);
  CHECK_FALSE(readable(fd));
  rig.mover->arm(false);
  move(4);
  CHECK_FALSE(readable(fd));
}

TEST_CASE("wait sees what another thread has polled, and times out otherwise") {
  Rig rig;
  CHECK_FALSE(rig.mover->wait(milliseconds(1), rig.mover->reports()));
  const std::uint64_t seen = rig.mover->reports();
  rig.submit({1, {H, D}, {{0}, {0}}, {1}});
  rig.next(1);
  CHECK(rig.mover->wait(seconds(60), seen));
}

TEST_CASE("an order that makes no sense is refused whole") {
  Rig rig;
  const auto refused = [&](const Batch& batch, const char* part) {
    CAPTURE(part);
    try {
      rig.submit(batch);
      FAIL_CHECK("was taken");
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(part) != std::string::npos);
    }
  };
  refused({0, {H, D}, {{0}, {0}}, {1}}, "ticket");
  refused({1, {D, S}, {{0}, {0}}, {1}}, "device -> disk");
  refused({1, {H}, {{0}}, {1}}, "path");
  refused({1, {H, D, H}, {{0}, {0}, {0}}, {1}}, "path");
  refused({1, {H, Tier::kRemote}, {{0}, {0}}, {1}}, "remote");
  refused({1, {H, D}, {{64}, {0}}, {1}}, "64 slots");
  refused({1, {H, D}, {{0}, {kNoSlot}}, {1}}, "device slot 4294967295");
  refused({1, {H, D}, {{0}, {0}}, {1}, static_cast<Priority>(3)}, "priority");
  CHECK(rig.mover->pending() == 0);
}

TEST_CASE("many threads submit, cancel and poll at once; every ticket ends once") {
  MoverOptions options;
  options.copy_threads = 2;
  options.queue_pages = 200;
  options.bytes_in_flight = 64 << 10;
  options.close_limit = seconds(30);
  Rig rig(options);
  std::vector<std::uint32_t> names(kLanes * 4);
  std::iota(names.begin(), names.end(), 1);
  rig.store(names, 0);
  std::atomic<std::uint32_t> reads{0};
  rig.gate->spoil([&](const IoRequest&) -> std::optional<std::int64_t> {
    return ++reads % 7 == 0 ? std::optional<std::int64_t>(-EIO) : std::nullopt;
  });
  std::atomic<Ticket> next{1};
  std::atomic<std::uint64_t> accepted{0}, finals{0};
  std::atomic<bool> submitting{true};
  // Each submitter has slots of its own in every tier, as the catalog would give; the disk's are only read.
  const auto submitter = [&](Slot lane) {
    std::mt19937 random(lane);
    const Slot first = 20 + lane * 8;
    for (int i = 0; i < 150; ++i) {
      const Ticket ticket = next++;
      const Slot disk = lane * 4;
      const auto slots = run_of(first, 4);
      const std::vector<std::uint32_t> mine{names[disk], names[disk + 1], names[disk + 2], names[disk + 3]};
      const std::uint64_t seen = finals;
      const Submit result = rig.submit({ticket,
                                        {S, H, D},
                                        {run_of(disk, 4), slots, slots},
                                        mine,
                                        static_cast<Priority>(random() % 3),
                                        random() % 4 == 0 ? Clock::now() + milliseconds(random() % 3) : kNever});
      if (result == Submit::kAccepted) ++accepted;
      if (random() % 3 == 0) rig.mover->cancel(ticket);
      while (finals == seen && rig.mover->knows(ticket)) std::this_thread::yield();
      while (rig.mover->knows(ticket)) std::this_thread::yield();  // its slots are free again only now
    }
  };
  std::set<Ticket> ended;
  std::thread poller([&] {
    std::vector<Completion> got;
    while (submitting || rig.mover->pending() != 0) {
      const std::uint64_t seen = rig.mover->reports();
      got.clear();
      rig.mover->poll(&got);
      for (const Completion& c : got) {
        if (!c.final) continue;
        CHECK(ended.insert(c.ticket).second);
        ++finals;
      }
      if (got.empty()) rig.mover->wait(milliseconds(5), seen);
    }
  });
  std::vector<std::thread> threads;
  for (Slot lane = 0; lane < 4; ++lane) threads.emplace_back(submitter, lane);
  for (auto& thread : threads) thread.join();
  submitting = false;
  poller.join();
  CHECK(finals == accepted);
  CHECK(rig.mover->pending() == 0);
}

TEST_CASE("who looks without the lock sees every report, and what has become overdue") {
  LedgerOptions options;
  options.device_page_bytes = options.disk_page_bytes = 1;
  Scheduler scheduler(options);
  const Tier down[] = {D, H};
  const Slot slots[] = {0, 0};
  const auto identity = identities_of({1});
  const Time now = Clock::now();
  Order order;
  order.path = down;
  order.slots = slots;
  order.count = 1;
  order.identities = identity.data();
  order.identity_bytes = kIdBytes;
  order.priority = Priority::kPrefetch;
  order.deadline = now + seconds(1000);
  CHECK_FALSE(scheduler.has_reports(now + seconds(2000)));
  order.ticket = 1;
  REQUIRE(scheduler.submit(order) == Submit::kAccepted);
  CHECK_FALSE(scheduler.has_reports(now + seconds(999)));
  REQUIRE(scheduler.promote(1, Priority::kDemand, now + seconds(1500)));
  CHECK_FALSE(scheduler.has_reports(now + seconds(1499)));
  CHECK(scheduler.has_reports(now + seconds(1501)));
  std::vector<Completion> out;
  REQUIRE(scheduler.poll(&out) == 1);
  CHECK(out.back().status == all(PageStatus::kOverdue, 1));
  CHECK_FALSE(scheduler.has_reports(now));

  order.ticket = 2;
  REQUIRE(scheduler.submit(order) == Submit::kAccepted);
  Chunk chunk;
  REQUIRE(scheduler.take_copy_now(Lane::kOffload, 1, &chunk));
  CHECK_FALSE(scheduler.has_reports(now));
  scheduler.finish(chunk, &kOk);
  CHECK(scheduler.has_reports(now));
  CHECK(scheduler.poll(&out) == 1);
  order.ticket = 3;
  REQUIRE(scheduler.submit(order) == Submit::kAccepted);
  CHECK(scheduler.cancel(3));
  CHECK(scheduler.has_reports(now));
}

TEST_CASE("of stores that nobody waits for is told late and together, of anything else at once") {
  LedgerOptions options;
  options.device_page_bytes = options.disk_page_bytes = 1;
  Scheduler scheduler(options);
  const Tier down[] = {D, H}, up[] = {H, D};
  const Slot slots[] = {0, 0};
  const auto identity = identities_of({1});
  std::vector<Completion> out;
  Order order;
  order.slots = slots;
  order.count = 1;
  order.identities = identity.data();
  order.identity_bytes = kIdBytes;
  const auto move = [&](std::span<const Tier> path, Priority priority, PageStatus became) {
    order.path = path;
    order.priority = priority;
    ++order.ticket;
    REQUIRE(scheduler.submit(order) == Submit::kAccepted);
    Chunk chunk;
    REQUIRE(scheduler.take_copy_now(path[0] == D ? Lane::kOffload : Lane::kOnboard, 1, &chunk));
    scheduler.finish(chunk, &became);
  };
  const Time before = Clock::now();
  move(down, Priority::kBackground, PageStatus::kOk);
  const Time after = Clock::now();
  CHECK_FALSE(scheduler.has_reports(before, false));
  CHECK(scheduler.has_reports(before));
  CHECK(scheduler.has_reports(after + Ledger::kPatience, false));
  move(down, Priority::kBackground, PageStatus::kOk);
  CHECK(scheduler.has_reports(after + Ledger::kPatience, false));  // from the first of them on
  REQUIRE(scheduler.poll(&out) == 2);
  CHECK_FALSE(scheduler.has_reports(after + 2 * Ledger::kPatience));

  const auto at_once = [&](std::span<const Tier> path, Priority priority, PageStatus became) {
    move(down, Priority::kBackground, PageStatus::kOk);
    move(path, priority, became);
    CHECK(scheduler.has_reports(Clock::now(), false));
    CHECK(scheduler.poll(&out) == 2);
    CHECK_FALSE(scheduler.has_reports(Clock::now()));
  };
  at_once(down, Priority::kPrefetch, PageStatus::kOk);
  at_once(down, Priority::kDemand, PageStatus::kOk);
  at_once(down, Priority::kBackground, PageStatus::kWriteError);
  at_once(up, Priority::kBackground, PageStatus::kOk);

  move(down, Priority::kBackground, PageStatus::kOk);
  order.path = down;
  ++order.ticket;
  REQUIRE(scheduler.submit(order) == Submit::kAccepted);
  CHECK(scheduler.cancel(order.ticket));
  CHECK(scheduler.has_reports(Clock::now(), false));
}

}  // namespace
}  // namespace kvtier::test
