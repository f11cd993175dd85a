#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "copy/lanes.hpp"

#define KVTIER_TARGET __attribute__((target("avx512f")))
#define KVTIER_INLINE __attribute__((target("avx512f"), always_inline)) static inline

namespace kvtier::lanes {
namespace {

using Vec = __m512i;
constexpr std::size_t kVec = sizeof(Vec);

struct Op {
  KVTIER_INLINE Vec load(const std::byte* p) { return _mm512_loadu_si512(p); }
  KVTIER_INLINE void store(std::byte* p, Vec v) { _mm512_storeu_si512(p, v); }
  KVTIER_INLINE void stream(std::byte* p, Vec v) { _mm512_stream_si512(reinterpret_cast<Vec*>(p), v); }
  KVTIER_INLINE Vec zero() { return _mm512_setzero_si512(); }
  KVTIER_INLINE Vec splat(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
  KVTIER_INLINE Vec add(Vec x, Vec y) { return _mm512_add_epi64(x, y); }
  KVTIER_INLINE Vec exor(Vec x, Vec y) { return _mm512_xor_si512(x, y); }
  KVTIER_INLINE Vec product(Vec x) { return _mm512_maskz_mul_epu32(0xFF, x, _mm512_maskz_srli_epi64(0xFF, x, 32)); }
  KVTIER_INLINE Vec low(Vec x, Vec y) { return _mm512_maskz_unpacklo_epi64(0xFF, x, y); }
  KVTIER_INLINE Vec high(Vec x, Vec y) { return _mm512_maskz_unpackhi_epi64(0xFF, x, y); }
  KVTIER_INLINE Vec ramp(std::uint64_t s) {
    alignas(64) const std::uint64_t word[8] = {0, 4 * s, s, 5 * s, 2 * s, 6 * s, 3 * s, 7 * s};
    return _mm512_load_si512(word);
  }
  KVTIER_INLINE std::uint64_t total(Vec v) {
    alignas(64) std::uint64_t word[8];
    _mm512_store_si512(word, v);
    return word[0] + word[1] + word[2] + word[3] + word[4] + word[5] + word[6] + word[7];
  }
};

#include "copy/vector_kernel.inc"

}  // namespace

extern const Kernels kAvx512 = {"avx512", sum_lanes, copy_sum, copy};

}  // namespace kvtier::lanes
#endif
