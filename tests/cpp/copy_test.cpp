// Pages between device segments and host memory: what is copied, what is summed, and what is never touched.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy/checksum.hpp"
#include "copy/host_arena.hpp"
#include "copy/lanes.hpp"
#include "copy/page_copy.hpp"
#include "copy/segments.hpp"

namespace kvtier {
namespace {

using Bytes = std::vector<std::byte>;

constexpr ChecksumKey kKey{0x0123456789ABCDEFull, 0xFEDCBA9876543210ull};
constexpr std::byte kUntouched{0xA5};

Bytes random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<const lanes::Kernels*> kernels_here() {
  std::vector<const lanes::Kernels*> sets;
  for (const char* name : {"scalar", "avx2", "avx512"})
    if (const lanes::Kernels* set = lanes::named(name)) sets.push_back(set);
  return sets;
}

// The definition in checksum.hpp, word for word and with nothing shared.
std::uint64_t by_the_book(const Bytes& page, ChecksumKey key) {
  const auto mix = [](std::uint64_t x) {
    x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27, x *= 0x94D049BB133111EBull;
    return x ^ x >> 31;
  };
  const auto m = [](std::uint64_t x) { return (x % (std::uint64_t{1} << 32)) * (x >> 32); };
  const std::uint64_t k1 = mix(key.lo ^ 0x6B76746965722E31ull), k2 = mix(key.hi + k1 + 0xD6E8FEB86659FD93ull);
  Bytes padded = page;
  padded.resize((page.size() + 15) / 16 * 16);
  std::uint64_t sum_a = 0, sum_b = 0;
  for (std::uint64_t i = 0; i < padded.size() / 16; ++i) {
    std::uint64_t a, b;
    std::memcpy(&a, padded.data() + 16 * i, 8);
    std::memcpy(&b, padded.data() + 16 * i + 8, 8);
    const std::uint64_t p = k1 + i * 0x9E3779B97F4A7C15ull, q = k2 + i * 0xC2B2AE3D27D4EB4Full;
    a += m(b ^ p), b += m(a ^ q), a += m(b ^ p);
    sum_a += a, sum_b += b;
  }
  const std::uint64_t value = mix(mix(sum_a + page.size() * 0x9E3779B97F4A7C15ull) ^ (sum_b + k2));
  return value == 0 ? 1 : value;
}

TEST_CASE("every instruction set gives the checksum that is defined, whatever the length and the alignment") {
  for (const std::size_t length : {1, 15, 16, 17, 255, 256, 4096, 4097, 33'000, 70'016, 200'000}) {
    const Bytes page = random_bytes(length, static_cast<std::uint32_t>(length));
    const std::uint64_t want = by_the_book(page, kKey);
    CHECK(checksum(page.data(), length, kKey) == want);
    for (const lanes::Kernels* set : kernels_here()) {
      for (const std::size_t shift : {0, 1, 8, 16}) {
        CAPTURE(set->name);
        CAPTURE(length);
        CAPTURE(shift);
        Bytes elsewhere(length + shift);
        std::memcpy(elsewhere.data() + shift, page.data(), length);
        CHECK(lanes::checksum_by(*set, elsewhere.data() + shift, length, kKey) == want);
      }
    }
  }
}

TEST_CASE("every instruction set copies what it sums, and not one byte more") {
  for (const lanes::Kernels* set : kernels_here()) {
    for (const std::size_t length : {0, 16, 240, 256, 4096 + 16, 32 * 1024, 131'072 + 272}) {
      for (const std::size_t shift : {0, 3, 16, 48}) {
        CAPTURE(set->name);
        CAPTURE(length);
        CAPTURE(shift);
        const Bytes from = random_bytes(length + 16, 7);  // a kernel is given no null pointer, for nothing either
        Bytes to(length + 128, kUntouched);
        lanes::Sum copied, summed;
        const lanes::Keys keys = lanes::derive(kKey);
        set->sum(from.data(), length, 5, keys, summed);
        set->copy_sum(from.data(), to.data() + shift, length, 5, keys, copied, nullptr);
        CHECK(copied.a == summed.a);
        CHECK(copied.b == summed.b);
        Bytes want(length + 128, kUntouched);
        std::memcpy(want.data() + shift, from.data(), length);
        CHECK(to == want);
        to.assign(to.size(), kUntouched);
        set->copy(from.data(), to.data() + shift, length, from.data());
        CHECK(to == want);
      }
    }
  }
}

TEST_CASE("any bit of a page, its length and every part of its identity change the checksum") {
  Bytes page = random_bytes(300, 1);
  std::set<std::uint64_t> seen{checksum(page.data(), page.size(), kKey)};
  std::size_t made = 1;
  for (std::size_t bit = 0; bit < page.size() * 8; ++bit, ++made) {
    const auto mask = static_cast<std::byte>(1u << bit % 8);
    page[bit / 8] ^= mask;
    seen.insert(checksum(page.data(), page.size(), kKey));
    page[bit / 8] ^= mask;
  }
  for (std::size_t length = 1; length < page.size(); ++length, ++made) seen.insert(checksum(page.data(), length, kKey));
  PageIdentity identity{};
  for (int byte = 0; byte < 16; ++byte, ++made) {  // checksum_key takes 16 of the digest's bytes
    identity.digest[byte] = 1;
    seen.insert(checksum(page.data(), page.size(), checksum_key(identity)));
    identity.digest[byte] = 0;
  }
  for (std::uint64_t generation = 0; generation < 64; ++generation, ++made) {
    identity.generation = generation;
    seen.insert(checksum(page.data(), page.size(), checksum_key(identity)));
  }
  CHECK(seen.size() == made);
  CHECK(seen.count(0) == 0);
}

TEST_CASE("zeros at the end, exchanged lanes and moved bytes do not cancel out") {
  Bytes page(4096), longer(4112), turned(4096);
  page[0] = longer[0] = std::byte{1};
  turned[16] = std::byte{1};
  CHECK(checksum(page.data(), 4096, kKey) != checksum(longer.data(), 4112, kKey));
  CHECK(checksum(page.data(), 4096, kKey) != checksum(turned.data(), 4096, kKey));
}

// Two slots' worth of a device whose pages are pieces of these lengths.
struct Device {
  static constexpr Slot kSlots = 3;

  explicit Device(const std::vector<std::size_t>& lengths) {
    const std::size_t page = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
    memory = random_bytes((page + kGap * lengths.size()) * kSlots, 11);
    std::vector<Segment> segments;
    std::byte* at = memory.data();
    for (const std::size_t length : lengths) {
      segments.push_back({at, length + kGap, length});
      at += (length + kGap) * kSlots;
    }
    pool = std::make_unique<DevicePool>(segments, kSlots);
  }

  Bytes page(Slot slot) const {
    Bytes bytes;
    for (const Segment& s : pool->segments()) bytes.insert(bytes.end(), s.at(slot), s.at(slot) + s.length);
    return bytes;
  }

  static constexpr std::size_t kGap = 48;  // between slots: nobody's
  Bytes memory;
  std::unique_ptr<DevicePool> pool;
};

const std::vector<std::vector<std::size_t>> kShapes = {
    {16}, {1}, {4096, 4096}, {100, 28}, {7, 9, 16}, {16, 1}, {64 * 1024, 64 * 1024 + 16}, {160 * 1024 + 48}};

TEST_CASE("a page gathered has the segments' bytes, zeros behind them, and the checksum of the bytes") {
  for (const auto& shape : kShapes) {
    Device device(shape);
    const std::size_t payload = device.pool->payload_bytes();
    CAPTURE(payload);
    HostArena arena(2, payload);
    std::memset(arena.base(), static_cast<int>(kUntouched), arena.bytes());
    for (const Slot next : {Slot{2}, kNoSlot}) {
      const Bytes before = device.memory;
      const std::uint64_t sum = gather(*device.pool, 1, arena.page(0), arena.page_bytes(), kKey, next);
      Bytes want = device.page(1);
      CHECK(sum == checksum(want.data(), payload, kKey));
      want.resize(arena.page_bytes());
      CHECK(std::memcmp(arena.page(0), want.data(), want.size()) == 0);
      CHECK(arena.page(1)[0] == kUntouched);
      CHECK(device.memory == before);
    }
  }
}

TEST_CASE("a page scattered fills its slot's segments and touches no other byte") {
  for (const auto& shape : kShapes) {
    Device device(shape);
    const std::size_t payload = device.pool->payload_bytes();
    CAPTURE(payload);
    HostArena arena(1, payload);
    const Bytes page = random_bytes(payload, 5);
    std::memcpy(arena.page(0), page.data(), payload);
    Device want(shape);
    std::size_t done = 0;
    for (const Segment& s : want.pool->segments()) {
      std::memcpy(s.at(1), page.data() + done, s.length);
      done += s.length;
    }
    scatter(arena.page(0), *device.pool, 1);
    CHECK(device.memory == want.memory);
    Device verified(shape);
    CHECK(
        scatter_verified(arena.page(0), *verified.pool, 1, kKey, checksum(page.data(), payload, kKey), arena.page(0)));
    CHECK(verified.memory == want.memory);
    Device ranges(shape);  // the same in ranges that begin anywhere, the last one first
    for (std::size_t end = payload; end > 0;) {
      const std::size_t begin = end > payload / 3 + 1 ? end - payload / 3 - 1 : 0;
      scatter(arena.page(0), *ranges.pool, 1, ByteRange{begin, end});
      end = begin;
    }
    CHECK(ranges.memory == want.memory);
  }
}

TEST_CASE("a page that is not the one its checksum was taken of is refused") {
  for (const auto& shape : kShapes) {
    Device device(shape);
    const std::size_t payload = device.pool->payload_bytes();
    CAPTURE(payload);
    HostArena arena(1, payload);
    const std::uint64_t sum = gather(*device.pool, 0, arena.page(0), arena.page_bytes(), kKey);
    for (const std::size_t at : {std::size_t{0}, payload / 2, payload - 1}) {
      arena.page(0)[at] ^= std::byte{0x40};
      CHECK_FALSE(scatter_verified(arena.page(0), *device.pool, 1, kKey, sum));
      arena.page(0)[at] ^= std::byte{0x40};
    }
    CHECK_FALSE(scatter_verified(arena.page(0), *device.pool, 1, {kKey.lo, kKey.hi + 1}, sum));
    CHECK_FALSE(scatter_verified(arena.page(0), *device.pool, 1, kKey, sum + 1));
    CHECK(scatter_verified(arena.page(0), *device.pool, 1, kKey, sum));
    CHECK(device.page(1) == device.page(0));
  }
}

TEST_CASE("threads copy different pages of one pool and arena at once") {
  Device device({8192, 100});
  HostArena arena(Device::kSlots, device.pool->payload_bytes());
  std::vector<std::thread> threads;
  for (Slot slot = 0; slot < Device::kSlots; ++slot) {
    threads.emplace_back([&, slot] {
      const std::uint64_t sum = gather(*device.pool, slot, arena.page(slot), arena.page_bytes(), kKey);
      arena.checksum(slot) = sum;
      if (!scatter_verified(arena.page(slot), *device.pool, slot, kKey, sum)) arena.checksum(slot) = 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Slot slot = 0; slot < Device::kSlots; ++slot) CHECK(arena.checksum(slot) != 0);
}

TEST_CASE("the arena has every slot it was asked for, apart, aligned, zeroed and writable") {
  const HostArena arena(5, 4097);
  CHECK(arena.page_bytes() == 8192);
  CHECK(reinterpret_cast<std::uintptr_t>(arena.base()) % (2u << 20) == 0);
  CHECK(arena.bytes() <= arena.mapped_bytes());
  CHECK(arena.huge_bytes() <= arena.mapped_bytes());
  for (std::size_t i = 0; i < arena.bytes(); ++i) REQUIRE(arena.base()[i] == std::byte{0});
  for (Slot slot = 0; slot < 5; ++slot) std::memset(arena.page(slot), static_cast<int>(slot) + 1, arena.page_bytes());
  for (Slot slot = 0; slot < 5; ++slot) CHECK(arena.page(slot)[8191] == static_cast<std::byte>(slot + 1));
}

template <class Make>
std::string refusal(Make make) {
  try {
    make();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "was taken";
}

TEST_CASE("an arena that makes no sense or that the machine cannot give is refused with its size") {
  const auto arena = [](Slot slots, std::size_t payload) { return refusal([=] { HostArena made(slots, payload); }); };
  CHECK(arena(0, 4096).find("slots is 0") != std::string::npos);
  CHECK(arena(kNoSlot, 4096).find("slots is 4294967295") != std::string::npos);
  CHECK(arena(1, 0).find("payload_bytes is 0") != std::string::npos);
  CHECK(arena(1, (std::size_t{1} << 31) + 1).find("payload_bytes") != std::string::npos);
  CHECK(arena(1u << 30, std::size_t{1} << 30).find("GiB are available here") != std::string::npos);
}

TEST_CASE("segments of which no page can be made are refused by number") {
  static std::array<std::byte, 4096> memory;
  const auto pool = [](std::vector<Segment> segments, Slot slots) {
    return refusal([&] { DevicePool made(segments, slots); });
  };
  std::byte* const base = memory.data();
  CHECK(pool({}, 4).find("segments is empty") != std::string::npos);
  CHECK(pool({{base, 64, 64}}, 0).find("slots is 0") != std::string::npos);
  CHECK(pool({{nullptr, 64, 64}}, 4).find("segments[0] has a null base") != std::string::npos);
  CHECK(pool({{base, 64, 0}}, 4).find("segments[0] has length 0") != std::string::npos);
  CHECK(pool({{base, 63, 64}}, 4).find("segments[0] has stride 63") != std::string::npos);
  CHECK(pool({{base, 64, 64}, {base + 255, 64, 64}}, 4).find("segments[1] shares memory with segments[0]") !=
        std::string::npos);
  CHECK(pool({{base, 128, 64}, {base + 63, 128, 64}}, 4).find("shares memory") != std::string::npos);
  CHECK(pool({{base, SIZE_MAX / 2, 64}}, 4).find("past the address space") != std::string::npos);
  CHECK(DevicePool({{base, 128, 64}, {base + 64, 128, 64}}, 4).payload_bytes() == 128);  // interleaved
  CHECK(DevicePool({{base, 0, 64}}, 1).payload_bytes() == 64);                           // one slot needs no stride
}

// Where the parent's arena is the child has nothing, and the kernel may give it that place for something else.
TEST_CASE("an arena that a forked child lets go takes nothing of the child's own") {
  auto arena = std::make_unique<HostArena>(4, std::size_t{1} << 20);
  std::byte* const base = arena->base();
  const std::size_t bytes = arena->mapped_bytes();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    void* own = ::mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != base) ::_exit(2);
    arena.reset();
    ::_exit(::msync(own, bytes, MS_ASYNC) == 0 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  arena.reset();
  CHECK(::msync(base, bytes, MS_ASYNC) != 0);  // who made it gives it back
}

}  // namespace
}  // namespace kvtier
