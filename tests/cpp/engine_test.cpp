// File engines on a real file: io_uring where the kernel allows it, threads, and the one that fails on purpose.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "io/faulty_engine.hpp"
#include "io/file_engine.hpp"
#include "io/files.hpp"
#include "io/probe.hpp"
#include "io/raw_loop.hpp"
#include "temp_dir.hpp"

namespace kvtier::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr std::size_t kPage = 4096;
constexpr seconds kPatience{60};  // a bound, never a measure

using Made = std::vector<std::unique_ptr<FileEngine>>;

// One of each kind that works here; io_uring with and without registered buffers.
Made engines(unsigned depth, std::byte* base, std::size_t bytes) {
  Made made;
  made.push_back(make_thread_engine(3, depth));
  for (const bool registered : {false, true}) {
    std::string note;
    auto engine = make_uring_engine(depth, registered ? base : nullptr, registered ? bytes : 0, &note);
    if (engine) {
      made.push_back(std::move(engine));
    } else {
      MESSAGE(note);
    }
  }
  return made;
}

struct File {
  explicit File(std::size_t pages = 64) : fd(files::open(dir.path() + "/file", O_RDWR | O_CREAT)) {
    files::check(files::preallocate(fd.get(), pages * kPage), "no file");
  }
  TempDir dir;
  files::Fd fd;
};

struct Buffer {
  explicit Buffer(std::size_t bytes) : base(static_cast<std::byte*>(std::aligned_alloc(kPage, bytes))) {
    std::memset(base, 0, bytes);
  }
  ~Buffer() { std::free(base); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* const base;
};

std::map<std::uint64_t, std::int64_t> reap_all(FileEngine& engine, std::size_t count) {
  std::map<std::uint64_t, std::int64_t> results;
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  IoResult got[5];
  while (results.size() < count && std::chrono::steady_clock::now() < limit) {
    const std::size_t n = engine.reap(got, 5, seconds(1));
    for (std::size_t i = 0; i < n; ++i) CHECK(results.emplace(got[i].tag, got[i].result).second);
  }
  return results;
}

TEST_CASE("what was written is read back, page for page, and every tag comes back once") {
  constexpr std::size_t kPages = 40;
  File file;
  Buffer out(kPages * kPage), in(kPages * kPage);
  std::mt19937 random(3);
  for (std::size_t i = 0; i < kPages * kPage; ++i) out.base[i] = static_cast<std::byte>(random());
  for (const auto& engine : engines(kPages, in.base, kPages * kPage)) {
    CAPTURE(engine->name());
    std::vector<std::uint64_t> order(kPages);
    std::iota(order.begin(), order.end(), 0);
    for (const bool write : {true, false}) {
      std::shuffle(order.begin(), order.end(), random);
      for (const std::uint64_t page : order) {
        std::byte* const buffer = (write ? out.base : in.base) + page * kPage;
        REQUIRE(engine->submit({~page, file.fd.get(), write, page * kPage, buffer, kPage}));
      }
      CHECK(engine->in_flight() == kPages);
      engine->flush();
      const auto results = reap_all(*engine, kPages);
      REQUIRE(results.size() == kPages);
      for (const auto& [tag, result] : results) CHECK(result == static_cast<std::int64_t>(kPage));
      CHECK(results.count(~std::uint64_t{0}) == 1);  // any tag will do
      CHECK(engine->in_flight() == 0);
    }
    CHECK(std::memcmp(in.base, out.base, kPages * kPage) == 0);
    std::memset(in.base, 0, kPages * kPage);
  }
}

TEST_CASE("errors and short reads are told as they are, and what is full refuses") {
  File file(1);
  Buffer buffer(4 * kPage);
  for (const auto& engine : engines(3, buffer.base, 4 * kPage)) {
    CAPTURE(engine->name());
    REQUIRE(engine->submit({1, -1, false, 0, buffer.base, kPage}));
    REQUIRE(engine->submit({2, file.fd.get(), false, 0, buffer.base, 2 * kPage}));             // half of it is there
    REQUIRE(engine->submit({3, file.fd.get(), false, 0, buffer.base, kMaxTransfer + kPage}));  // never tried
    CHECK_FALSE(engine->submit({4, file.fd.get(), false, 0, buffer.base, kPage}));
    const auto results = reap_all(*engine, 3);
    REQUIRE(results.size() == 3);
    CHECK(results.at(1) == -EBADF);
    CHECK(results.at(2) == static_cast<std::int64_t>(kPage));
    CHECK(results.at(3) == -EINVAL);
    REQUIRE(engine->submit({4, file.fd.get(), false, 8 * kPage, buffer.base, kPage}));
    CHECK(reap_all(*engine, 1).at(4) == 0);  // past the end
    IoResult none[1];
    CHECK(engine->reap(none, 1, kPatience) == 0);  // nothing in flight: no wait
  }
}

// A pipe read that nothing answers stands for a device that hangs.
struct Pipe {
  Pipe() { REQUIRE(::pipe2(ends, O_CLOEXEC) == 0); }
  ~Pipe() { ::close(ends[0]), ::close(ends[1]); }
  int ends[2];
};

TEST_CASE("a wake from another thread ends the wait, also one that came before it") {
  std::string note;
  if (const auto engine = make_uring_engine(4, nullptr, 0, &note)) {
    Pipe pipe;
    Buffer buffer(kPage);
    REQUIRE(engine->submit({1, pipe.ends[0], false, 0, buffer.base, kPage}));
    IoResult result[1];
    engine->wake();
    CHECK(engine->reap(result, 1, kPatience) == 0);
    std::thread waker([&] { engine->wake(); });
    CHECK(engine->reap(result, 1, kPatience) == 0);
    waker.join();
    REQUIRE(::write(pipe.ends[1], "x", 1) == 1);
    CHECK(reap_all(*engine, 1).at(1) == 1);
  }
  File file;
  Buffer buffer(kPage);
  for (const auto& engine : engines(8, nullptr, 0)) {  // wakes beside completions: none is lost
    CAPTURE(engine->name());
    std::atomic<bool> done{false};
    std::thread waker([&] {
      while (!done) engine->wake(), std::this_thread::yield();
    });
    for (std::uint64_t tag = 1; tag <= 200; ++tag) {
      CHECK(engine->submit({tag, file.fd.get(), false, 0, buffer.base, kPage}));
      CHECK(reap_all(*engine, 1).count(tag) == 1);
    }
    done = true;
    waker.join();
  }
}

TEST_CASE("an engine may end with operations in flight") {
  File file;
  Buffer buffer(16 * kPage);
  for (const auto& engine : engines(16, buffer.base, 16 * kPage)) {
    for (std::uint64_t page = 0; page < 16; ++page)
      REQUIRE(engine->submit({page, file.fd.get(), page % 2 == 0, page * kPage, buffer.base + page * kPage, kPage}));
    engine->flush();
  }
}

TEST_CASE("a path that is asked for is the one that is made") {
  std::string note;
  CHECK(std::string(make_engine(IoPath::kThreads, 4, 2, nullptr, 0, &note)->name()) == "threads (2)");
  CHECK(note.empty());
  const auto automatic = make_engine(IoPath::kAuto, 4, 2, nullptr, 0, &note);
  REQUIRE(automatic != nullptr);
  const auto uring = make_engine(IoPath::kUring, 4, 2, nullptr, 0, &note);
  CHECK((uring != nullptr) == (std::string(automatic->name()).find("io_uring") == 0));
}

TEST_CASE("chosen operations fail as they were told to, and the others do not") {
  using Kind = FaultPlan::Kind;
  using On = FaultPlan::On;
  File file;
  Buffer out(kPage), in(kPage);
  std::memset(out.base, 0x55, kPage);
  auto plan = std::make_shared<FaultPlan>();
  const auto engine = make_faulty_engine(make_thread_engine(2, 8), plan);
  std::uint64_t tag = 0;
  const auto run = [&](bool write) {
    REQUIRE(engine->submit({++tag, file.fd.get(), write, 0, write ? out.base : in.base, kPage}));
    return reap_all(*engine, 1).at(tag);
  };
  plan->add({Kind::kError, On::kWrite, 2, 1, ENOSPC});
  plan->add({Kind::kFlip, On::kWrite, 3, 1, 9});
  plan->add({Kind::kShort, On::kRead, 2, 1, 512});
  plan->add({Kind::kShort, On::kRead, 3, 1, 2 * kPage});
  plan->add({Kind::kFlip, On::kRead, 4, 1, 8 * kPage + 17});
  constexpr auto kWhole = static_cast<std::int64_t>(kPage);
  CHECK(run(true) == kWhole);
  CHECK(run(true) == -ENOSPC);
  CHECK(run(true) == kWhole);
  CHECK(out.base[1] == std::byte{0x55});  // as the caller left it
  CHECK(run(false) == kWhole);
  CHECK(in.base[1] == std::byte{0x57});  // but the file has the inverted bit
  CHECK(run(false) == kWhole - 512);
  CHECK(run(false) == 0);
  CHECK(run(false) == kWhole);
  CHECK(in.base[2] == std::byte{0x57});
  CHECK(plan->fired() == 5);
  CHECK(plan->operations() == 7);

  plan->add({Kind::kDelay, On::kAny, 8, 2, FaultPlan::kForever});
  REQUIRE(engine->submit({100, file.fd.get(), true, 0, out.base, kPage}));
  REQUIRE(engine->submit({101, file.fd.get(), true, 0, out.base, kPage}));
  IoResult result[1];
  CHECK(engine->reap(result, 1, milliseconds(5)) == 0);
  CHECK(engine->in_flight() == 2);
  std::thread releaser([&] { plan->release(); });
  CHECK(reap_all(*engine, 2).size() == 2);
  releaser.join();
  plan->clear();
  CHECK(run(false) == kWhole);
}

TEST_CASE("a release counts from the moment that the fault is known to have fired") {
  FaultPlan plan;
  plan.add({FaultPlan::Kind::kDelay, FaultPlan::On::kRead, 1, 2, FaultPlan::kForever});
  for (int i = 0; i < 2; ++i) {  // the second is not let go by what was said before it
    const auto fault = plan.next(FaultPlan::On::kRead);
    REQUIRE(fault.has_value());
    CHECK(plan.fired() == i + 1);
    CHECK(plan.released() == fault->released);
    plan.release();
    plan.sleep(*fault);  // for ever, if the release came too early
  }
}

TEST_CASE("the probe says what works, and refuses what is no disk") {
  TempDir dir;
  const IoProbe found = probe(dir.path());
  CHECK(found.filesystem == check_directory(dir.path()));
  CHECK(found.why.find(found.direct ? "direct I/O" : "buffered I/O") != std::string::npos);
  CHECK(std::filesystem::is_empty(dir.path()));
  const auto refused = [](const std::string& path, const char* why) {
    CAPTURE(path);
    try {
      probe(path);
      FAIL_CHECK("was taken");
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(why) != std::string::npos);
    }
  };
  refused(dir.path() + "/none", "does not exist");
  files::open(dir.path() + "/file", O_RDWR | O_CREAT);
  refused(dir.path() + "/file", "is not a directory");
  refused("/dev/shm", "memory");
}

TEST_CASE("the raw loop moves whole pages and names what failed") {
  std::string note;
  if (!make_uring_engine(1, nullptr, 0, &note)) return;
  constexpr std::size_t kPages = 20;
  File file(kPages);
  Buffer buffer(8 * kPage);
  for (std::size_t i = 0; i < 8; ++i) std::memset(buffer.base + i * kPage, static_cast<int>(i) + 1, kPage);
  std::vector<std::uint32_t> order(kPages);
  std::iota(order.rbegin(), order.rend(), 0);
  CHECK(raw_loop(file.fd.get(), true, buffer.base, 8 * kPage, kPage, order, 1) > 0);
  for (std::size_t i = 0; i < kPages; ++i) {
    std::byte first{};
    REQUIRE(files::read_all(file.fd.get(), &first, 1, order[i] * kPage) == 1);
    CHECK(first == static_cast<std::byte>(i % 8 + 1));
  }
  CHECK(raw_loop(file.fd.get(), false, buffer.base, 8 * kPage, kPage, order, 4) > 0);
  const std::uint32_t beyond[] = {kPages};
  CHECK_THROWS_AS(raw_loop(file.fd.get(), false, buffer.base, 8 * kPage, kPage, beyond, 1), std::system_error);
  CHECK_THROWS_AS(raw_loop(file.fd.get(), false, buffer.base, kPage - 1, kPage, order, 1), std::invalid_argument);
}

}  // namespace
}  // namespace kvtier::test
