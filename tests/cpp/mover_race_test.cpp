// The mover with everything real, its threads and the kernel's rings, while others submit, cancel, poll and close.
#include <algorithm>
#include <atomic>
#include <future>
#include <random>
#include <set>
#include <thread>

#include "mover_rig.hpp"

namespace kvtier::test {
namespace {

using std::chrono::milliseconds;

constexpr Slot kWorkers = 3, kEach = 6;

// What one of the engine's requests would do, again and again, in slots that are its own in every tier.
class Worker {
 public:
  Worker(Rig& rig, Slot number, std::atomic<Ticket>& tickets) : rig_(rig), first_(number * kEach), tickets_(tickets) {
    names_.resize(kEach);
    std::iota(names_.begin(), names_.end(), first_ + 1);
  }

  // Until the mover is closed; counts what it took.
  std::uint64_t run(int rounds) {
    std::mt19937 random(first_);
    std::uint64_t accepted = 0;
    const auto slots = run_of(first_, kEach);
    for (int i = 0; i < rounds; ++i) {
      const Ticket ticket = tickets_++;
      const bool load = random() % 2 == 0;
      const std::vector<Tier> path = load ? std::vector{S, H, D} : std::vector{D, H, S};
      const Time deadline = random() % 5 == 0 ? Clock::now() + milliseconds(random() % 2) : kNever;
      const Submit result = rig_.submit({ticket, path, {slots, slots, slots}, names_, Priority::kDemand, deadline});
      if (result == Submit::kClosed) break;
      accepted += result == Submit::kAccepted;
      if (random() % 4 == 0) rig_.mover->cancel(ticket);
      while (rig_.mover->knows(ticket)) std::this_thread::yield();  // its slots are free again only now
    }
    return accepted;
  }

 private:
  Rig& rig_;
  const Slot first_;
  std::atomic<Ticket>& tickets_;
  std::vector<std::uint32_t> names_;
};

void race(IoPath io, bool close_early) {
  std::string note;
  if (!make_engine(io, 1, 1, nullptr, 0, &note)) return;  // io_uring is refused here
  MoverOptions options;
  options.copy_threads = 2;
  options.close_limit = std::chrono::seconds(30);
  options.make_engine = [io](std::string* why) { return make_engine(io, 8, 2, nullptr, 0, why); };
  Rig rig(options);
  for (Slot i = 0; i < kWorkers * kEach; ++i) rig.write_device(i, i + 1);
  std::atomic<Ticket> tickets{1};
  std::atomic<std::uint64_t> accepted{0};
  std::atomic<bool> working{true};
  std::set<Ticket> ended;
  std::thread poller([&] {
    std::vector<Completion> got;
    while (working || rig.mover->pending() != 0) {
      const std::uint64_t seen = rig.mover->reports();
      got.clear();
      rig.mover->poll(&got);
      for (const Completion& completion : got) {
        if (!completion.final) continue;
        CHECK(ended.insert(completion.ticket).second);
        CHECK(std::count(completion.status.begin(), completion.status.end(), PageStatus::kPending) == 0);
      }
      if (got.empty()) rig.mover->wait(milliseconds(5), seen);
    }
  });
  std::vector<std::thread> threads;
  for (Slot number = 0; number < kWorkers; ++number) {
    threads.emplace_back([&, number] { accepted += Worker(rig, number, tickets).run(close_early ? 1'000'000 : 40); });
  }
  if (close_early) {
    while (tickets < 40) std::this_thread::yield();
    std::thread other([&] { rig.mover->close(); });
    CHECK(rig.mover->close());
    other.join();
  }
  for (std::thread& thread : threads) thread.join();
  working = false;
  poller.join();
  CHECK(ended.size() == accepted);
  CHECK(rig.mover->pending() == 0);
  // Whatever was cancelled or late on the way: a block is in its slot whole, or was wholly overwritten by itself.
  for (Slot i = 0; i < kWorkers * kEach; ++i) CHECK(rig.device_has(i, i + 1));
}

TEST_CASE("requests, cancellations and deadlines at once leave every block whole") {
  SUBCASE("io_uring") { race(IoPath::kUring, false); }
  SUBCASE("threads") { race(IoPath::kThreads, false); }
}

TEST_CASE("who waits hears of what another's poll found overdue") {
  LedgerOptions options;
  options.device_page_bytes = 16;
  Scheduler scheduler(options);  // and nobody who would move anything
  const Tier path[] = {H, D};
  const Slot slots[] = {0, 0};
  const std::vector<std::byte> identity = identities_of({1});
  Order order;
  order.ticket = 1;
  order.path = path;
  order.slots = slots;
  order.count = 1;
  order.identities = identity.data();
  order.identity_bytes = kIdBytes;
  order.deadline = Clock::now() + milliseconds(50);
  const std::uint64_t seen = scheduler.reports();
  REQUIRE(scheduler.submit(order) == Submit::kAccepted);
  auto waiter = std::async(std::launch::async, [&] { return scheduler.wait(Clock::now() + 2 * kPatience, seen); });
  std::this_thread::sleep_until(order.deadline);
  std::vector<Completion> told;
  CHECK(scheduler.poll(&told) == 1);
  CHECK(told[0].status == all(PageStatus::kOverdue, 1));
  CHECK(waiter.wait_for(kPatience) == std::future_status::ready);
  scheduler.close();
  CHECK(waiter.get());
}

// A scheduler that nobody serves, with one load in two slices.
struct Load {
  explicit Load(Time deadline = kNever) : scheduler(with_sizes()), identity(identities_of({1})) {
    Order order;
    order.ticket = 1;
    order.path = path;
    order.slots = slots;
    order.count = 1;
    order.identities = identity.data();
    order.identity_bytes = kIdBytes;
    order.deadline = deadline;
    order.cuts = cuts;
    REQUIRE(scheduler.submit(order) == Submit::kAccepted);
  }
  static LedgerOptions with_sizes() {
    LedgerOptions options;
    options.device_page_bytes = 32;
    return options;
  }
  std::future<bool> wait(Time until) {
    return std::async(std::launch::async, [this, until] { return scheduler.wait_slices(1, 1, until); });
  }
  void come() {  // its first slice
    Chunk chunk;
    REQUIRE(scheduler.take_copy_now(Lane::kOnboard, 16, &chunk));
    const PageStatus ok = PageStatus::kOk;
    scheduler.finish(chunk, &ok);
  }

  static constexpr Tier path[] = {H, D};
  static constexpr Slot slots[] = {0, 0};
  static constexpr std::size_t cuts[] = {16, 32};
  Scheduler scheduler;
  const std::vector<std::byte> identity;
};

TEST_CASE("who waits for slices hears at once that they will not come, also while a copy is under way") {
  Load load;
  Chunk chunk;
  REQUIRE(load.scheduler.take_copy_now(Lane::kOnboard, 16, &chunk));
  auto waiter = load.wait(Clock::now() + 2 * kPatience);
  std::this_thread::sleep_for(milliseconds(50));  // long enough that it waits, mostly
  CHECK(load.scheduler.cancel(1));
  CHECK(waiter.wait_for(kPatience) == std::future_status::ready);
  load.scheduler.close();
  CHECK_FALSE(waiter.get());
}

TEST_CASE("who waits for slices waits as long as anybody wants them: no promotion to an earlier deadline ends that") {
  const Time late = Clock::now() + 2 * kPatience;
  Load load(late);
  auto waiter = load.wait(late);
  REQUIRE(load.scheduler.promote(1, Priority::kDemand, Clock::now() + milliseconds(20)));
  std::this_thread::sleep_for(milliseconds(50));
  CHECK_FALSE(load.scheduler.wait_slices(1, 1, Clock::now()));  // whose own time is over goes
  load.come();
  CHECK(waiter.get());
}

TEST_CASE("who waits for slices goes on past a deadline that was put off while it waited") {
  Load load(Clock::now() + milliseconds(100));
  auto waiter = load.wait(Clock::now() + 2 * kPatience);
  REQUIRE(load.scheduler.promote(1, Priority::kDemand, Clock::now() + 2 * kPatience));
  std::this_thread::sleep_for(milliseconds(150));
  load.come();
  CHECK(waiter.get());
}

TEST_CASE("a close in the middle of all that settles every ticket once") {
  SUBCASE("io_uring") { race(IoPath::kUring, true); }
  SUBCASE("threads") { race(IoPath::kThreads, true); }
}

}  // namespace
}  // namespace kvtier::test
