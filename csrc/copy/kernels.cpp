// The scalar kernels, which are the definition in code, and the choice among the sets.
#include <string_view>
#include <vector>

#include "copy/checksum.hpp"
#include "copy/lanes.hpp"

namespace kvtier::lanes {
namespace {

void sum_lanes(const std::byte* from, std::size_t bytes, std::uint64_t first, Keys keys, Sum& sum) {
  for (std::size_t at = 0; at < bytes; at += kLane) absorb_lane(sum, from + at, first + at / kLane, keys);
}

void copy(const std::byte* from, std::byte* to, std::size_t bytes, const std::byte* /*next*/) {
  std::memcpy(to, from, bytes);
}

void copy_sum(const std::byte* from, std::byte* to, std::size_t bytes, std::uint64_t first, Keys keys, Sum& sum,
              const std::byte* next) {
  copy(from, to, bytes, next);
  sum_lanes(from, bytes, first, keys, sum);
}

[[maybe_unused]] bool agrees(const Kernels& set) {
  // A length that takes the paths of four streams, one stream and single lanes, at a destination off the 64-byte grid.
  constexpr std::size_t kBytes = 160 * 1024 + 256 + 48;
  std::vector<std::byte> from(kBytes), to(kBytes + kLane);
  for (std::size_t i = 0; i < kBytes; ++i) from[i] = static_cast<std::byte>(mix(i));
  const Keys keys = derive({1, 2});
  Sum want, summed, copied;
  sum_lanes(from.data(), kBytes, 7, keys, want);
  set.sum(from.data(), kBytes, 7, keys, summed);
  set.copy_sum(from.data(), to.data() + kLane, kBytes, 7, keys, copied, nullptr);
  const auto equal = [](const Sum& x, const Sum& y) { return x.a == y.a && x.b == y.b; };
  return equal(want, summed) && equal(want, copied) && std::memcmp(from.data(), to.data() + kLane, kBytes) == 0;
}

const Kernels& choose() {
#if defined(__x86_64__)
  for (const char* name : {"avx512", "avx2"}) {
    const Kernels* set = named(name);
    if (set != nullptr && agrees(*set)) return *set;
  }
#endif
  return kScalar;
}

}  // namespace

extern const Kernels kScalar = {"scalar", sum_lanes, copy_sum, copy};

const Kernels* named(const char* name) {
  const std::string_view wanted = name;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (wanted == "avx512") return __builtin_cpu_supports("avx512f") ? &kAvx512 : nullptr;
  if (wanted == "avx2") return __builtin_cpu_supports("avx2") ? &kAvx2 : nullptr;
#endif
  return wanted == "scalar" ? &kScalar : nullptr;
}

const Kernels& best() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace kvtier::lanes

namespace kvtier {

std::uint64_t checksum(const std::byte* page, std::size_t payload, ChecksumKey key) {
  return lanes::checksum_by(lanes::best(), page, payload, key);
}

std::uint64_t lanes::checksum_by(const Kernels& kernels, const std::byte* page, std::size_t payload, ChecksumKey key) {
  const Keys keys = derive(key);
  const std::size_t whole = payload / kLane * kLane;
  Sum sum;
  kernels.sum(page, whole, 0, keys, sum);
  if (whole != payload) {
    std::byte last[kLane] = {};
    std::memcpy(last, page + whole, payload - whole);
    absorb_lane(sum, last, whole / kLane, keys);
  }
  return finish(sum, payload, keys);
}

}  // namespace kvtier
