#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "copy/lanes.hpp"

#define KVTIER_TARGET __attribute__((target("avx2")))
#define KVTIER_INLINE __attribute__((target("avx2"), always_inline)) static inline

namespace kvtier::lanes {
namespace {

using Vec = __m256i;
constexpr std::size_t kVec = sizeof(Vec);

struct Op {
  KVTIER_INLINE Vec load(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const Vec*>(p)); }
  KVTIER_INLINE void store(std::byte* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<Vec*>(p), v); }
  KVTIER_INLINE void stream(std::byte* p, Vec v) { _mm256_stream_si256(reinterpret_cast<Vec*>(p), v); }
  KVTIER_INLINE Vec zero() { return _mm256_setzero_si256(); }
  KVTIER_INLINE Vec splat(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
  KVTIER_INLINE Vec add(Vec x, Vec y) { return _mm256_add_epi64(x, y); }
  KVTIER_INLINE Vec exor(Vec x, Vec y) { return _mm256_xor_si256(x, y); }
  KVTIER_INLINE Vec product(Vec x) { return _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)); }
  KVTIER_INLINE Vec low(Vec x, Vec y) { return _mm256_unpacklo_epi64(x, y); }
  KVTIER_INLINE Vec high(Vec x, Vec y) { return _mm256_unpackhi_epi64(x, y); }
  KVTIER_INLINE Vec ramp(std::uint64_t s) {
    return _mm256_set_epi64x(static_cast<long long>(3 * s), static_cast<long long>(s), static_cast<long long>(2 * s),
                             0);
  }
  KVTIER_INLINE std::uint64_t total(Vec v) {
    alignas(32) std::uint64_t word[4];
    _mm256_store_si256(reinterpret_cast<Vec*>(word), v);
    return word[0] + word[1] + word[2] + word[3];
  }
};

#include "copy/vector_kernel.inc"

}  // namespace

extern const Kernels kAvx2 = {"avx2", sum_lanes, copy_sum, copy};

}  // namespace kvtier::lanes
#endif
