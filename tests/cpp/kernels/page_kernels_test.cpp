// The GPU's page kernels, compiled as C++ by the shim, against the CPU's copies over random pools. Built with the
// address and undefined-behaviour sanitizers: every array here ends where its bytes end, so a kernel that reaches past
// one stops.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "copy/host_arena.hpp"
#include "copy/page_copy.hpp"
#include "cuda/page_launch.hpp"

using namespace kvtier;
using namespace kvtier::cuda;

namespace {

std::uint64_t seed_of_run() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("KVTIER_SEED");
    const std::uint64_t chosen = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("KVTIER_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return seed;
}

using Random = std::mt19937_64;
std::size_t up_to(Random& random, std::size_t most) { return 1 + random() % most; }

struct FreeLater {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, FreeLater>;

// `bytes` that begin `skew` bytes past a 16-byte boundary and end where the allocation does.
struct Block {
  explicit Block(std::size_t size, std::size_t skew = 0)
      : bytes(size), memory(static_cast<std::byte*>(std::malloc(size + skew))), data(memory.get() + skew) {}
  void fill(Random& random) {
    std::uint64_t state = random();
    for (std::size_t i = 0; i < bytes; ++i)
      data[i] = static_cast<std::byte>((state = state * 6364136223846793005u + 1) >> 56);
  }
  bool operator==(const Block& other) const { return std::memcmp(data, other.data, bytes) == 0; }
  std::size_t bytes;
  Memory memory;
  std::byte* data;
};

// A random pool: segments in arrays of their own, or interleaved in one; of lengths that are alike or not, that fit 16
// bytes or not, and not always where a 16-byte access may begin.
struct Pool {
  explicit Pool(Random& random) {
    slots = static_cast<Slot>(up_to(random, 9));
    const std::size_t count = up_to(random, random() % 4 == 0 ? 40 : 6);
    const bool alike = random() % 2, on_lanes = random() % 3 != 0, apart = random() % 2;
    const std::size_t most = random() % 5 == 0 ? 40000 : 3000;
    const auto length = [&] { return on_lanes ? 16 * up_to(random, most / 16) : up_to(random, most); };
    const std::size_t common = length(), skew = on_lanes ? 0 : random() % 16;
    std::vector<std::size_t> lengths(count);
    for (std::size_t& each : lengths) each = alike ? common : length();
    const std::size_t gap = on_lanes ? 16 * (random() % 3) : random() % 40;
    if (apart) {
      for (const std::size_t each : lengths) {
        blocks.emplace_back((slots - 1) * (each + gap) + each, skew);
        segments.push_back({blocks.back().data, each + gap, each});
      }
    } else {
      const std::size_t stride = std::accumulate(lengths.begin(), lengths.end(), gap);
      blocks.emplace_back((slots - 1) * stride + stride - gap, skew);
      std::byte* at = blocks[0].data;
      for (const std::size_t each : lengths) {
        segments.push_back({at, stride, each});
        at += each;
      }
    }
    for (Block& block : blocks) block.fill(random);
    std::shuffle(segments.begin(), segments.end(), random);
    device = std::make_unique<DevicePool>(segments, slots);
  }
  Slot slots;
  std::vector<Block> blocks;
  std::vector<Segment> segments;
  std::unique_ptr<DevicePool> device;
};

struct Batch {
  Batch(Random& random, const Pool& pool) : page_bytes(padded(pool.device->payload_bytes())) {
    const std::size_t count = up_to(random, pool.slots);
    std::vector<Slot> all(pool.slots);
    std::iota(all.begin(), all.end(), 0u);
    std::shuffle(all.begin(), all.end(), random);
    slots.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
    for (std::size_t i = 0; i < count; ++i) {
      keys.push_back({random(), random()});
      pages.emplace_back(page_bytes);
      pages.back().fill(random);
      wanted.emplace_back(page_bytes);
    }
    blocks = static_cast<unsigned>(up_to(random, 12));
    sums.reset(new LaneSum[sum_entries(blocks)]);  // not zeroed: every entry that is read must have been written
  }
  PageLaunch with_pages(PageLaunch launch) const {
    for (std::size_t i = 0; i < slots.size(); ++i) add_page(launch, pages[i].data, slots[i], keys[i]);
    return launch;
  }
  std::size_t page_bytes;
  std::vector<Slot> slots;
  std::vector<ChecksumKey> keys;
  std::vector<Block> pages, wanted;
  unsigned blocks;
  std::unique_ptr<LaneSum[]> sums;
};

constexpr int kPools = 240;

}  // namespace

TEST_CASE("a gather makes the page and the checksum that the CPU makes") {
  for (int number = 0; number < kPools; ++number) {
    Random random(seed_of_run() + static_cast<std::uint64_t>(number));
    CAPTURE(number);
    Pool pool(random);
    Batch batch(random, pool);
    const PoolShape shape(*pool.device);
    const PageLaunch launch = batch.with_pages(shape.whole(shape.table().data(), batch.page_bytes, batch.sums.get()));
    run_on_cpu(shape.kernel(Way::kGather), launch, batch.blocks);
    for (unsigned i = 0; i < batch.slots.size(); ++i) {
      const std::uint64_t sum =
          gather(*pool.device, batch.slots[i], batch.wanted[i].data, batch.page_bytes, batch.keys[i]);
      REQUIRE(batch.pages[i] == batch.wanted[i]);
      REQUIRE(page_checksum(launch, batch.blocks, i) == sum);
    }
    const PageLaunch only = batch.with_pages(shape.whole(shape.table().data(), 0, batch.sums.get()));
    run_on_cpu(shape.kernel(Way::kSum), only, batch.blocks);
    for (unsigned i = 0; i < batch.slots.size(); ++i) {
      REQUIRE(page_checksum(only, batch.blocks, i) == page_checksum(launch, batch.blocks, i));
    }
  }
}

TEST_CASE("a scatter writes its slots as the CPU does, and no byte beside them") {
  for (int number = 0; number < kPools; ++number) {
    Random random(seed_of_run() + static_cast<std::uint64_t>(number));
    CAPTURE(number);
    Pool pool(random);
    Batch batch(random, pool);
    const PoolShape shape(*pool.device);
    std::vector<std::vector<std::byte>> before;
    for (const Block& block : pool.blocks) before.emplace_back(block.data, block.data + block.bytes);
    for (std::size_t i = 0; i < batch.slots.size(); ++i) scatter(batch.pages[i].data, *pool.device, batch.slots[i]);
    std::vector<std::vector<std::byte>> wanted;
    for (std::size_t b = 0; b < pool.blocks.size(); ++b) {
      const Block& block = pool.blocks[b];
      wanted.emplace_back(block.data, block.data + block.bytes);
      std::copy(before[b].begin(), before[b].end(), block.data);
    }
    const PageLaunch launch = batch.with_pages(shape.whole(shape.table().data(), 0, nullptr));
    run_on_cpu(shape.kernel(Way::kScatter), launch, batch.blocks);
    for (std::size_t b = 0; b < pool.blocks.size(); ++b) {
      REQUIRE(std::equal(wanted[b].begin(), wanted[b].end(), pool.blocks[b].data));
    }
  }
}

TEST_CASE("ranges of layers, one after the other, make the page, and their sums add up to its own") {
  int ranges = 0;
  for (int number = 0; number < kPools; ++number) {
    Random random(seed_of_run() + static_cast<std::uint64_t>(number));
    CAPTURE(number);
    Pool pool(random);
    Batch batch(random, pool);
    const PoolShape shape(*pool.device);
    std::vector<LaneSum> totals(batch.slots.size(), LaneSum{0, 0});
    const std::size_t payload = pool.device->payload_bytes();
    PageLaunch launch;
    for (std::size_t first = 0, last; first < pool.segments.size(); first = last, ++ranges) {
      last = std::min(first + up_to(random, 4), pool.segments.size());
      const ByteRange range{shape.table()[first].first, shape.table()[last].first};
      launch = batch.with_pages(shape.range(shape.table().data(), range, batch.sums.get()));
      run_on_cpu(shape.kernel(Way::kGather), launch, batch.blocks);
      for (unsigned i = 0; i < batch.slots.size(); ++i) {
        const LaneSum part = page_sum(launch, batch.blocks, i);
        totals[i].a += part.a;
        totals[i].b += part.b;
      }
    }
    const PageLaunch whole = batch.with_pages(shape.whole(shape.table().data(), 0, batch.sums.get()));
    run_on_cpu(shape.kernel(Way::kSum), whole, batch.blocks);
    for (unsigned i = 0; i < batch.slots.size(); ++i) {
      gather(*pool.device, batch.slots[i], batch.wanted[i].data, batch.page_bytes, batch.keys[i]);
      REQUIRE(std::equal(batch.wanted[i].data, batch.wanted[i].data + payload, batch.pages[i].data));
      if (!shape.on_lanes()) continue;
      const LaneSum sum = page_sum(whole, batch.blocks, i);
      REQUIRE(totals[i].a == sum.a);
      REQUIRE(totals[i].b == sum.b);
    }
  }
  CHECK(ranges > kPools);
}

TEST_CASE("pages of more tiles than blocks, and of fewer, are shared out whole") {
  // 2 MiB pages over 1 to 33 blocks: every block boundary falls somewhere else in a page.
  std::vector<std::byte> memory(3 * (2u << 20));
  Random random(seed_of_run());
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  const DevicePool pool({{memory.data(), 2u << 20, 2u << 20}}, 3);
  const PoolShape shape(pool);
  std::vector<std::byte> page(2u << 20);
  const std::uint64_t wanted = gather(pool, 1, page.data(), page.size(), {5, 7});
  for (const unsigned blocks : {1u, 2u, 7u, 10u, 33u}) {
    std::vector<LaneSum> sums(sum_entries(blocks));
    PageLaunch launch = shape.whole(shape.table().data(), 0, sums.data());
    for (Slot slot = 0; slot < 3; ++slot) add_page(launch, nullptr, slot, {5, 7});
    run_on_cpu(shape.kernel(Way::kSum), launch, blocks);
    CHECK(page_checksum(launch, blocks, 1) == wanted);
    CHECK(page_checksum(launch, blocks, 0) != wanted);
  }
}
