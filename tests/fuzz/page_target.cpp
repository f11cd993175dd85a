// A page that comes back from a disk or a peer: what is scattered is what its checksum was taken of.
#include <iterator>
#include <memory>

#include "copy/checksum.hpp"
#include "copy/host_arena.hpp"
#include "copy/page_copy.hpp"
#include "fuzz.hpp"

namespace kvtier::fuzz {
namespace {

struct Rig {
  explicit Rig(const std::vector<std::size_t>& lengths) {
    std::size_t total = 0;
    for (const std::size_t length : lengths) total += 2 * length;
    memory.resize(total);
    std::vector<Segment> segments;
    std::byte* at = memory.data();
    for (const std::size_t length : lengths) {
      segments.push_back({at, length, length});
      at += 2 * length;
    }
    pool = std::make_unique<DevicePool>(segments, 2);
    arena = std::make_unique<HostArena>(1, pool->payload_bytes());
  }

  std::vector<std::byte> slot(Slot slot) const {
    std::vector<std::byte> bytes;
    for (const Segment& s : pool->segments()) bytes.insert(bytes.end(), s.at(slot), s.at(slot) + s.length);
    return bytes;
  }

  std::vector<std::byte> memory;
  std::unique_ptr<DevicePool> pool;
  std::unique_ptr<HostArena> arena;
};

Rig& rig(std::size_t which) {
  static Rig rigs[] = {Rig({16}), Rig({1, 30}), Rig({512, 512, 512}), Rig({4000, 97}), Rig({40'000})};
  return rigs[which % std::size(rigs)];
}

}  // namespace

void fuzz_page(Reader& in) {
  Rig& r = rig(in.byte());
  const std::size_t payload = r.pool->payload_bytes();
  ChecksumKey key{in.number(), in.number()};
  std::uint64_t fill = in.number() | 1;
  for (std::byte& byte : r.memory) byte = static_cast<std::byte>((fill = fill * 6364136223846793005ull + 1) >> 56);
  const std::vector<std::byte> source = r.slot(0);
  const std::uint64_t sum = gather(*r.pool, 0, r.arena->page(0), r.arena->page_bytes(), key);
  require(sum != 0, "a page's checksum is 0");
  require(sum == checksum(source.data(), payload, key), "gather and checksum disagree");
  for (std::size_t i = payload; i < r.arena->page_bytes(); ++i)
    require(r.arena->page(0)[i] == std::byte{0}, "padding is not zero");

  std::vector<std::byte> page(r.arena->page(0), r.arena->page(0) + payload);
  spoil(in, page);
  page.resize(payload);
  std::memcpy(r.arena->page(0), page.data(), payload);
  const ChecksumKey other{key.lo ^ in.number(), key.hi ^ in.number()};
  const bool same = page == source && other.lo == key.lo && other.hi == key.hi;
  const bool taken = scatter_verified(r.arena->page(0), *r.pool, 1, other, sum);
  require(taken == same, same ? "a good page was refused" : "a page was taken that is not the one that was summed");
  if (taken) require(r.slot(1) == source, "other bytes were scattered than are in the page");
  require(r.slot(0) == source, "scatter wrote outside of its slot");
}

std::vector<Input> page_seeds() {
  std::vector<Input> seeds;
  for (std::uint8_t which = 0; which < 5; ++which) {
    Input plain(25, 7);
    plain[0] = which;
    seeds.push_back(plain);
    Input spoiled = plain;  // one bit, a moved piece
    spoiled.insert(spoiled.end(), {2, 0, 9, 0, 3, 0, 0, 16, 0, 32, 0});
    seeds.push_back(spoiled);
  }
  return seeds;
}

}  // namespace kvtier::fuzz
