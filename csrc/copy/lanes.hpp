// The checksum's lanes and the kernels that run over them. Internal to csrc/copy; the definition is in checksum.hpp.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/identity.hpp"

namespace kvtier::lanes {

static_assert(std::endian::native == std::endian::little, "lanes are read little-endian");

inline constexpr std::size_t kLane = 16;
inline constexpr std::uint64_t kStep1 = 0x9E3779B97F4A7C15ull;
inline constexpr std::uint64_t kStep2 = 0xC2B2AE3D27D4EB4Full;

struct Keys {
  std::uint64_t k1, k2;
};

struct Sum {
  std::uint64_t a = 0, b = 0;
};

inline constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline constexpr std::uint64_t product(std::uint64_t x) { return (x & 0xFFFFFFFFull) * (x >> 32); }

inline Keys derive(ChecksumKey key) {
  const std::uint64_t k1 = mix(key.lo ^ 0x6B76746965722E31ull);
  return {k1, mix(key.hi + k1 + 0xD6E8FEB86659FD93ull)};
}

inline void absorb(Sum& sum, std::uint64_t a, std::uint64_t b, std::uint64_t p, std::uint64_t q) {
  a += product(b ^ p);
  b += product(a ^ q);
  a += product(b ^ p);
  sum.a += a;
  sum.b += b;
}

inline void absorb_lane(Sum& sum, const std::byte* at, std::uint64_t index, Keys keys) {
  std::uint64_t word[2];
  std::memcpy(word, at, kLane);
  absorb(sum, word[0], word[1], keys.k1 + index * kStep1, keys.k2 + index * kStep2);
}

inline std::uint64_t finish(const Sum& sum, std::size_t payload, Keys keys) {
  const std::uint64_t value = mix(mix(sum.a + payload * kStep1) ^ (sum.b + keys.k2));
  return value == 0 ? 1 : value;
}

// One instruction set's kernels. `bytes` is a multiple of 16, `first` the index of the first lane in its page; nothing
// needs alignment, but the copies are fast only where `to` is 16-byte aligned. Copies may bypass the cache: the
// caller has to fence before it tells another thread. `next` is where the caller will copy from after this, or null: a
// hint that is never read through.
struct Kernels {
  const char* name;
  void (*sum)(const std::byte* from, std::size_t bytes, std::uint64_t first, Keys keys, Sum& sum);
  void (*copy_sum)(const std::byte* from, std::byte* to, std::size_t bytes, std::uint64_t first, Keys keys, Sum& sum,
                   const std::byte* next);
  void (*copy)(const std::byte* from, std::byte* to, std::size_t bytes, const std::byte* next);
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// The best set that this processor has and that agreed with kScalar when the process first asked.
const Kernels& best();
// By name, for tests; null when this processor cannot run it.
const Kernels* named(const char* name);
// checksum() by a given set.
std::uint64_t checksum_by(const Kernels& kernels, const std::byte* page, std::size_t payload, ChecksumKey key);

}  // namespace kvtier::lanes
