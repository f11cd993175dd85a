// The ledger alone: one thread, a clock that the test turns.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "mover/ledger.hpp"
#include "mover_rig.hpp"

namespace kvtier::test {
namespace {

using std::chrono::seconds;
constexpr std::size_t kPage = 1000;

struct Desk {
  explicit Desk(LedgerOptions options = {}) : ledger(with_sizes(options)) {}
  static LedgerOptions with_sizes(LedgerOptions options) {
    options.device_page_bytes = options.disk_page_bytes = kPage;
    return options;
  }
  Submit submit(Ticket ticket, std::vector<Tier> path, std::uint32_t count, Priority priority = Priority::kDemand,
                Time deadline = kNever, std::vector<std::size_t> cuts = {}) {
    const std::vector<Slot> slots(path.size() * count);
    const std::vector<std::byte> ids(kIdBytes * count);
    return ledger.submit({ticket, path, slots.data(), count, ids.data(), kIdBytes, priority, deadline, {}, cuts}, now);
  }
  Chunk take(std::span<const Lane> lanes, std::uint32_t most = Chunk::kMaxPages) {
    Chunk chunk;
    if (!ledger.take(lanes, most, 1u << 20, now, &chunk)) chunk.transfer = nullptr;
    return chunk;
  }
  Ticket taken(std::span<const Lane> lanes, std::uint32_t most = Chunk::kMaxPages) {
    const Chunk chunk = take(lanes, most);
    if (chunk.transfer == nullptr) return 0;
    const Ticket ticket = chunk.transfer->ticket;
    finish(chunk, PageStatus::kOk);
    return ticket;
  }
  void finish(const Chunk& chunk, PageStatus status) {
    const std::vector<PageStatus> statuses(chunk.count, status);
    ledger.finish(chunk, statuses.data(), now);
  }
  std::vector<Completion> poll() {
    std::vector<Completion> out;
    for (Completion c; ledger.next_report(&c, now);) out.push_back(std::move(c));
    return out;
  }
  Ledger ledger;
  Time now{seconds(1000)};
};

TEST_CASE("a promoted transfer is served as its new priority and deadline say") {
  Desk desk;
  const Time soon = desk.now + seconds(1);
  desk.submit(1, {S, H}, 1, Priority::kDemand, soon + seconds(9));
  desk.submit(2, {S, H, D}, 2, Priority::kPrefetch);
  desk.submit(3, {S, H}, 1, Priority::kPrefetch);
  CHECK(desk.ledger.promote(2, Priority::kDemand, soon));
  CHECK(desk.ledger.promote(3, Priority::kBackground, soon));  // promotion never takes urgency away
  CHECK_FALSE(desk.ledger.promote(4, Priority::kDemand, soon));
  CHECK(desk.ledger.next_deadline() == soon + seconds(9));
  CHECK(desk.taken(kDiskLanes, 1) == 2);
  CHECK(desk.taken(kDiskLanes, 1) == 2);
  CHECK(desk.taken(kDiskLanes) == 1);
  CHECK(desk.taken(kDiskLanes) == 3);
  CHECK(desk.taken(kCopyLanes) == 2);
}

TEST_CASE("no waiter's patience ends what another still wants") {
  Desk desk;
  const Time soon = desk.now + seconds(1);
  desk.submit(1, {S, H}, 1, Priority::kDemand, soon + seconds(9));
  desk.submit(2, {S, H}, 1, Priority::kPrefetch, soon + seconds(2));
  desk.submit(3, {S, H}, 1, Priority::kPrefetch);
  for (const Ticket ticket : {1, 2, 3}) CHECK(desk.ledger.promote(ticket, Priority::kDemand, soon));
  CHECK(desk.ledger.promote(2, Priority::kDemand, soon + seconds(4)));
  desk.ledger.expire(soon + seconds(3));
  CHECK_FALSE(desk.ledger.has_reports());
  desk.ledger.expire(soon + seconds(4));
  CHECK(desk.ledger.has_reports());
  CHECK(desk.taken(kDiskLanes) == 1);
  CHECK(desk.taken(kDiskLanes) == 3);
}

TEST_CASE("what is wanted for long is served for whoever waits for it until earlier") {
  Desk desk;
  const Time soon = desk.now + seconds(1);
  desk.submit(1, {S, H}, 1, Priority::kDemand, soon + seconds(5));
  desk.submit(2, {S, H}, 1, Priority::kPrefetch, soon + seconds(60));
  desk.submit(3, {S, H}, 1, Priority::kDemand, soon + seconds(60));
  for (const Ticket ticket : {2, 3}) CHECK(desk.ledger.promote(ticket, Priority::kDemand, soon + seconds(4)));
  CHECK(desk.ledger.promote(3, Priority::kDemand, soon + seconds(90)));
  for (const Ticket ticket : {2, 3, 1}) CHECK(desk.taken(kDiskLanes) == ticket);
}

TEST_CASE("serves by priority, then loads, then the earlier deadline, then arrival") {
  Desk desk;
  const Time soon = desk.now + seconds(1), late = desk.now + seconds(9);
  desk.submit(1, {H, D}, 1, Priority::kBackground);
  desk.submit(2, {D, H}, 1, Priority::kDemand);
  desk.submit(3, {H, D}, 1, Priority::kDemand);
  desk.submit(4, {H, D}, 1, Priority::kDemand, late);
  desk.submit(5, {H, D}, 1, Priority::kDemand, soon);
  desk.submit(6, {H, D}, 1, Priority::kPrefetch, soon);
  desk.submit(7, {H, D}, 1, Priority::kDemand);
  std::vector<Ticket> order;
  while (const Ticket ticket = desk.taken(kCopyLanes)) order.push_back(ticket);
  CHECK(order == std::vector<Ticket>{5, 4, 3, 7, 2, 6, 1});
}

TEST_CASE("a long background transfer yields between chunks to a demand one") {
  Desk desk;
  desk.submit(1, {D, H}, 1000, Priority::kBackground);
  CHECK(desk.taken(kCopyLanes) == 1);
  desk.submit(2, {H, D}, 1);
  CHECK(desk.taken(kCopyLanes) == 2);
  CHECK(desk.taken(kCopyLanes) == 1);
}

TEST_CASE("bytes in flight are capped per lane, and one page may always move") {
  LedgerOptions options;
  options.bytes_in_flight = 3 * kPage;
  Desk desk(options);
  desk.submit(1, {S, H}, 10);
  desk.submit(2, {H, S}, 10);
  const Lane stage[] = {Lane::kStage}, spill[] = {Lane::kSpill};
  const Chunk first = desk.take(stage);
  CHECK(first.count == 3);
  CHECK(desk.take(stage).transfer == nullptr);
  CHECK(desk.take(spill).count == 3);
  desk.finish(first, PageStatus::kOk);
  CHECK(desk.take(stage).count == 3);
  options.bytes_in_flight = 1;
  Desk tight(options);
  tight.submit(1, {S, H}, 2);
  CHECK(tight.take(stage).count == 1);
  CHECK(tight.take(stage).transfer == nullptr);
}

TEST_CASE("while somebody waits for pages of the disk others are written one by one") {
  Desk desk({.bytes_in_flight = 4 * kPage});
  desk.submit(1, {H, S}, 9, Priority::kBackground);
  const Chunk before = desk.take(kDiskLanes, 2);
  CHECK(before.count == 2);
  desk.submit(2, {S, H}, 6, Priority::kPrefetch);
  CHECK(desk.take(kDiskLanes).lane == Lane::kStage);  // 4 of them are in flight now
  CHECK(desk.take(kDiskLanes).count == 2);            // and 4 of the store
  desk.finish(before, PageStatus::kOk);
  CHECK(desk.ledger.promote(2, Priority::kDemand, kNever));
  CHECK(desk.take(kDiskLanes).transfer == nullptr);
  Desk idle({.bytes_in_flight = 4 * kPage});
  idle.submit(2, {S, H}, 6);
  idle.submit(1, {H, S}, 9, Priority::kBackground);
  const Chunk read = idle.take(kDiskLanes);
  CHECK(read.count == 4);
  CHECK(idle.take(kDiskLanes).count == 1);  // a store is slow then, but goes on
  CHECK(idle.take(kDiskLanes).transfer == nullptr);
  idle.finish(read, PageStatus::kOk);
  CHECK(idle.take(kDiskLanes).lane == Lane::kStage);  // the last of them, for which nobody waits in the queue any more
  CHECK(idle.take(kDiskLanes).count == 3);
}

TEST_CASE("pages go on to the next hop one by one") {
  Desk desk;
  desk.submit(1, {S, H, D}, 3);
  CHECK(desk.take(kCopyLanes).transfer == nullptr);
  const Chunk first = desk.take(kDiskLanes, 1);
  const Chunk second = desk.take(kDiskLanes, 1);
  desk.finish(second, PageStatus::kOk);
  const Chunk copy = desk.take(kCopyLanes);
  REQUIRE(copy.count == 1);
  CHECK(copy.pages[0] == second.pages[0]);
  desk.finish(first, PageStatus::kCorrupt);
  CHECK(desk.take(kCopyLanes).transfer == nullptr);
  desk.finish(copy, PageStatus::kOk);
  CHECK(desk.taken(kDiskLanes) == 1);
  CHECK(desk.taken(kCopyLanes) == 1);
  const auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(done[0].final);
  CHECK(hop(done[0], 0) == std::vector{PageStatus::kCorrupt, PageStatus::kOk, PageStatus::kOk});
  CHECK(hop(done[0], 1) == std::vector{PageStatus::kSkipped, PageStatus::kOk, PageStatus::kOk});
}

TEST_CASE("a full lane refuses, until a store worth more drops the least valuable queued store") {
  LedgerOptions options;
  options.queue_pages = 10;
  Desk desk(options);
  CHECK(desk.submit(99, {D, H}, 11) == Submit::kFull);
  CHECK(desk.submit(1, {D, H}, 4, Priority::kPrefetch) == Submit::kAccepted);
  CHECK(desk.submit(2, {D, H}, 3, Priority::kBackground) == Submit::kAccepted);
  CHECK(desk.submit(3, {D, H}, 3, Priority::kBackground, desk.now + seconds(5)) == Submit::kAccepted);
  CHECK(desk.submit(4, {D, H}, 1, Priority::kBackground) == Submit::kFull);  // worth no more than what waits
  CHECK(desk.submit(5, {D, H}, 7, Priority::kPrefetch) == Submit::kFull);    // 6 pages at most: none is dropped in vain
  CHECK(desk.poll().empty());
  CHECK(desk.submit(6, {D, H}, 2, Priority::kPrefetch) == Submit::kAccepted);
  auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(done[0].ticket == 2);
  CHECK(hop(done[0], 0) == all(PageStatus::kCancelled, 3));
  CHECK(desk.submit(7, {D, H}, 4, Priority::kDemand) == Submit::kAccepted);
  done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(done[0].ticket == 3);
  CHECK(desk.submit(8, {H, D}, 10) == Submit::kAccepted);  // another lane has its own bound
  CHECK(desk.submit(9, {H, D}, 1, Priority::kDemand, desk.now + seconds(1)) == Submit::kFull);  // loads drop nothing
}

TEST_CASE("a page in flight is not dropped for a newcomer") {
  LedgerOptions options;
  options.queue_pages = 4;
  Desk desk(options);
  desk.submit(1, {D, H}, 4, Priority::kBackground);
  const Chunk chunk = desk.take(kCopyLanes, 3);
  CHECK(desk.submit(2, {D, H}, 2) == Submit::kFull);
  CHECK(desk.submit(3, {D, H}, 1) == Submit::kAccepted);
  desk.finish(chunk, PageStatus::kOk);
  const auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(hop(done[0], 0) == std::vector{PageStatus::kOk, PageStatus::kOk, PageStatus::kOk, PageStatus::kCancelled});
}

TEST_CASE("transfers that nobody polls are bounded") {
  LedgerOptions options;
  options.max_transfers = 3;
  Desk desk(options);
  for (Ticket t = 1; t <= 3; ++t) {
    CHECK(desk.submit(t, {D, H}, 1) == Submit::kAccepted);
    CHECK(desk.taken(kCopyLanes) == t);
  }
  CHECK(desk.submit(4, {D, H}, 1) == Submit::kFull);
  CHECK(desk.poll().size() == 3);
  CHECK(desk.submit(4, {D, H}, 1) == Submit::kAccepted);
}

TEST_CASE("a ticket in use is refused, and may be used again once reported") {
  Desk desk;
  desk.submit(1, {D, H}, 1);
  CHECK(desk.submit(1, {D, H}, 1) == Submit::kDuplicate);
  desk.taken(kCopyLanes);
  CHECK(desk.submit(1, {D, H}, 1) == Submit::kDuplicate);
  desk.poll();
  CHECK(desk.submit(1, {D, H}, 1) == Submit::kAccepted);
}

TEST_CASE("an empty transfer is reported at once") {
  Desk desk;
  desk.submit(1, {D, H}, 0);
  const auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(done[0].final);
}

TEST_CASE("a cancelled transfer starts nothing more and is final when the copy in flight ends") {
  Desk desk;
  desk.submit(1, {D, H, S}, 4);
  const Chunk chunk = desk.take(kCopyLanes, 2);
  CHECK(desk.ledger.cancel(1, desk.now));
  CHECK(desk.ledger.cancel(1, desk.now));
  CHECK(desk.poll().empty());  // a copy ends by itself: no early word
  CHECK(desk.take(kCopyLanes).transfer == nullptr);
  desk.finish(chunk, PageStatus::kOk);
  CHECK(desk.take(kDiskLanes).transfer == nullptr);
  const auto done = desk.poll();
  REQUIRE(done.size() == 1);
  const auto ok = PageStatus::kOk, cancelled = PageStatus::kCancelled;
  CHECK(hop(done[0], 0) == std::vector{ok, ok, cancelled, cancelled});
  CHECK(hop(done[0], 1) == all(cancelled, 4));
  CHECK_FALSE(desk.ledger.cancel(1, desk.now));
}

TEST_CASE("with only disk I/O left, an ended transfer is reported early, once, and nothing it said changes") {
  Desk desk;
  desk.submit(1, {S, H, D}, 4);
  const Chunk io = desk.take(kDiskLanes, 2);
  const Chunk more = desk.take(kDiskLanes, 1);
  desk.finish(more, PageStatus::kOk);
  const Chunk copy = desk.take(kCopyLanes);
  desk.ledger.cancel(1, desk.now);
  CHECK(desk.poll().empty());  // its destination is being written
  desk.finish(copy, PageStatus::kOk);
  auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK_FALSE(done[0].final);
  const auto pending = PageStatus::kPending, ok = PageStatus::kOk, cancelled = PageStatus::kCancelled;
  CHECK(hop(done[0], 0) == std::vector{pending, pending, ok, cancelled});
  CHECK(hop(done[0], 1) == std::vector{cancelled, cancelled, ok, cancelled});
  desk.ledger.cancel(1, desk.now);
  CHECK(desk.poll().empty());
  desk.finish(io, PageStatus::kReadError);
  done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(done[0].final);
  CHECK(hop(done[0], 0) == std::vector{PageStatus::kReadError, PageStatus::kReadError, ok, cancelled});
  CHECK(hop(done[0], 1) == std::vector{cancelled, cancelled, ok, cancelled});
}

TEST_CASE("an early report that was not read becomes the final one") {
  Desk desk;
  desk.submit(1, {S, H}, 1);
  const Chunk io = desk.take(kDiskLanes);
  desk.ledger.cancel(1, desk.now);
  desk.finish(io, PageStatus::kOk);
  const auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(done[0].final);
}

TEST_CASE("the deadline is looked at before every hop") {
  Desk desk;
  desk.submit(1, {S, H, D}, 2, Priority::kDemand, desk.now + seconds(5));
  desk.submit(2, {S, H, D}, 1);
  const Chunk io = desk.take(kDiskLanes, 1);
  CHECK(desk.ledger.next_deadline() == desk.now + seconds(5));
  desk.now += seconds(5);
  CHECK(desk.take(kDiskLanes).transfer->ticket == 2);
  CHECK(desk.ledger.next_deadline() == kNever);
  desk.finish(io, PageStatus::kOk);
  CHECK(desk.take(kCopyLanes).transfer == nullptr);
  const auto done = desk.poll();
  REQUIRE(done.size() == 1);
  CHECK(hop(done[0], 0) == std::vector{PageStatus::kOk, PageStatus::kOverdue});
  CHECK(hop(done[0], 1) == all(PageStatus::kOverdue, 2));
}

TEST_CASE("a disk out of service fails queued and new disk hops at once and leaves the others") {
  Desk desk;
  desk.submit(1, {S, H, D}, 2);
  desk.submit(2, {D, H, S}, 1);
  const Chunk io = desk.take(kDiskLanes, 1);
  const Chunk copy = desk.take(kCopyLanes);
  desk.ledger.take_disk_offline(desk.now);
  desk.submit(3, {H, S}, 2);
  desk.finish(copy, PageStatus::kOk);
  desk.finish(io, PageStatus::kOk);
  CHECK(desk.taken(kCopyLanes) == 1);
  std::map<Ticket, Completion> done;
  for (auto& c : desk.poll()) done[c.ticket] = c;
  REQUIRE(done.size() == 3);
  const auto ok = PageStatus::kOk, offline = PageStatus::kOffline, skipped = PageStatus::kSkipped;
  CHECK(hop(done[1], 0) == std::vector{ok, offline});
  CHECK(hop(done[1], 1) == std::vector{ok, skipped});
  CHECK(hop(done[2], 0) == std::vector{ok});
  CHECK(hop(done[2], 1) == std::vector{offline});
  CHECK(hop(done[3], 0) == all(offline, 2));
}

TEST_CASE("of a transfer in slices a slice of all pages goes before the next of any, and is there when all of it is") {
  Desk desk;
  desk.submit(1, {H, D}, 3, Priority::kDemand, kNever, {16, 48, kPage});
  CHECK(desk.ledger.slices_there(1) == 0);
  const Chunk first = desk.take(kCopyLanes, 2), second = desk.take(kCopyLanes), third = desk.take(kCopyLanes);
  CHECK((first.slice == 0 && first.count == 2 && first.pages[1] == 1));
  CHECK((second.slice == 0 && second.count == 1 && second.pages[0] == 2));
  CHECK((third.slice == 1 && third.count == 3 && third.pages[0] == 0));
  CHECK(desk.ledger.stats(Lane::kOnboard).bytes_in_flight == 3 * 16 + 3 * 32);
  desk.finish(third, PageStatus::kOk);
  desk.finish(first, PageStatus::kOk);
  CHECK(desk.ledger.slices_there(1) == 0);
  desk.finish(second, PageStatus::kOk);
  CHECK(desk.ledger.slices_there(1) == 2);
  CHECK(desk.poll().empty());
  CHECK(desk.taken(kCopyLanes) == 1);
  CHECK(desk.ledger.slices_there(1) == 3);
  const std::vector<Completion> told = desk.poll();
  REQUIRE(told.size() == 1);
  CHECK(told[0].status == std::vector<PageStatus>(3, PageStatus::kOk));
  CHECK((told[0].hops[0].bytes == 3 * kPage && told[0].hops[0].carried == 3 * kPage));
  CHECK(desk.ledger.slices_there(1) == -1);
  CHECK(desk.ledger.stats(Lane::kOnboard).bytes_in_flight == 0);
}

TEST_CASE("a page of which one slice failed or was cancelled is not there, and is told when no copy can touch it") {
  Desk desk;
  desk.submit(1, {H, D}, 2, Priority::kDemand, kNever, {16, kPage});
  const Chunk first = desk.take(kCopyLanes, 1), second = desk.take(kCopyLanes, 1);
  desk.finish(first, PageStatus::kCorrupt);
  CHECK(desk.ledger.slices_there(1) == -1);
  const Chunk last = desk.take(kCopyLanes, 1);
  CHECK((last.slice == 1 && last.pages[0] == 0));
  desk.ledger.cancel(1, desk.now);
  CHECK(desk.poll().empty());  // copies of both pages are under way
  desk.finish(last, PageStatus::kOk);
  CHECK(desk.poll().empty());
  desk.finish(second, PageStatus::kOk);
  const std::vector<Completion> told = desk.poll();
  REQUIRE(told.size() == 1);
  CHECK(told[0].final);
  CHECK(told[0].status == std::vector<PageStatus>{PageStatus::kCorrupt, PageStatus::kCancelled});
}

TEST_CASE("whatever happens in whatever order, every ticket is settled once and nothing is left over") {
  const std::vector<std::vector<Tier>> paths{{D, H}, {H, D}, {H, S}, {S, H}, {S, H, D}, {D, H, S}};
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](std::uint32_t n) { return random() % n; };
    LedgerOptions options;
    options.queue_pages = 40;
    options.max_transfers = 12;
    options.bytes_in_flight = 5 * kPage;
    Desk desk(options);
    std::vector<Chunk> flying;
    std::map<Ticket, Completion> early;
    std::set<Ticket> open, closed;
    const auto poll = [&] {
      for (Completion& c : desk.poll()) {
        REQUIRE(open.contains(c.ticket));
        if (early.contains(c.ticket)) {
          REQUIRE(c.final);
          for (std::size_t i = 0; i < c.status.size(); ++i) {
            const PageStatus said = early[c.ticket].status[i];
            REQUIRE((said == PageStatus::kPending || said == c.status[i]));
          }
        }
        if (!c.final) {
          early[c.ticket] = c;
          continue;
        }
        REQUIRE(std::count(c.status.begin(), c.status.end(), PageStatus::kPending) == 0);
        open.erase(c.ticket);
        closed.insert(c.ticket);
      }
    };
    const auto land = [&](std::size_t index) {
      const Chunk chunk = flying[index];
      flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(index));
      const PageStatus statuses[] = {PageStatus::kOk, PageStatus::kOk, PageStatus::kOk, PageStatus::kReadError};
      desk.finish(chunk, statuses[below(4)]);
    };
    for (Ticket ticket = 1; ticket < 400; ++ticket) {
      desk.now += std::chrono::milliseconds(below(50));
      const Time deadline = below(3) == 0 ? desk.now + std::chrono::milliseconds(below(500)) : kNever;
      const std::uint32_t way = below(6);
      std::vector<std::size_t> cuts;
      if (way == 1 && below(2) == 0)
        cuts = below(2) == 0 ? std::vector<std::size_t>{16, 48, kPage} : std::vector{kPage};
      if (desk.submit(ticket, paths[way], below(12), static_cast<Priority>(below(3)), deadline, cuts) ==
          Submit::kAccepted) {
        open.insert(ticket);
      }
      for (std::uint32_t n = below(4); n-- > 0;) {
        const Chunk chunk = below(2) != 0 ? desk.take(kCopyLanes, 1 + below(6)) : desk.take(kDiskLanes, 1 + below(6));
        if (chunk.transfer != nullptr) flying.push_back(chunk);
      }
      while (flying.size() > below(6)) land(below(static_cast<std::uint32_t>(flying.size())));
      if (below(5) == 0 && !open.empty()) desk.ledger.cancel(*std::next(open.begin(), below(open.size())), desk.now);
      if (below(300) == 0) desk.ledger.take_disk_offline(desk.now);
      if (below(3) == 0) poll();
    }
    desk.ledger.close(desk.now);
    CHECK(desk.submit(1000, {D, H}, 1) == Submit::kClosed);
    while (!flying.empty()) land(0);
    poll();
    CHECK(open.empty());
    CHECK(closed.size() > 20);
    CHECK(desk.ledger.pending() == 0);
    for (int lane = 0; lane < kLanes; ++lane) {
      CHECK(desk.ledger.stats(static_cast<Lane>(lane)).queued_pages == 0);
      CHECK(desk.ledger.stats(static_cast<Lane>(lane)).bytes_in_flight == 0);
    }
  }
}

}  // namespace
}  // namespace kvtier::test
