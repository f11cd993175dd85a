#include "common/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_be(const std::uint8_t* p) {
  std::uint32_t v;
  std::memcpy(&v, p, 4);
  return __builtin_bswap32(v);
}

void compress_portable(std::uint32_t state[8], const std::uint8_t* data, std::size_t count) {
  using std::rotr;
  for (; count != 0; --count, data += 64) {
    std::uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_be(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const std::uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const std::uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)

// The instructions keep the state as (ABEF, CDGH) and do two rounds each.
__attribute__((target("sha,sse4.1"))) void compress_sha_ni(std::uint32_t state[8], const std::uint8_t* data,
                                                           std::size_t count) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
  auto* words = reinterpret_cast<__m128i*>(state);
  __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  __m128i cdgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, cdgh, 8);
  cdgh = _mm_blend_epi16(cdgh, cdab, 0xF0);
  for (; count != 0; --count, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      const __m128i round = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + r);
      const __m128i sum = _mm_add_epi32(w[r % 4], round);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      if (r < 12) {
        const __m128i seventh = _mm_alignr_epi8(w[(r + 3) % 4], w[(r + 2) % 4], 4);
        const __m128i part = _mm_add_epi32(_mm_sha256msg1_epu32(w[r % 4], w[(r + 1) % 4]), seventh);
        w[r % 4] = _mm_sha256msg2_epu32(part, w[(r + 3) % 4]);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha_ni() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_SSE4_1) == 0) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) != 0;
}

#else

constexpr auto compress_sha_ni = compress_portable;
bool has_sha_ni() { return false; }

#endif

}  // namespace

bool Sha256::accelerated() {
  static const bool answer = has_sha_ni();
  return answer;
}

Sha256::Sha256() : Sha256(accelerated() ? compress_sha_ni : compress_portable) {}

Sha256 Sha256::portable() { return Sha256(compress_portable); }

Sha256::Sha256(Compress compress) : compress_(compress) {
  constexpr std::uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::memcpy(state_, kStart, sizeof state_);
}

Sha256& Sha256::add(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  total_ += bytes;
  if (tail_bytes_ != 0) {
    const std::size_t part = std::min(bytes, sizeof tail_ - tail_bytes_);
    std::memcpy(tail_ + tail_bytes_, p, part);
    tail_bytes_ += part, p += part, bytes -= part;
    if (tail_bytes_ < sizeof tail_) return *this;
    compress_(state_, tail_, 1);
    tail_bytes_ = 0;
  }
  if (bytes >= sizeof tail_) compress_(state_, p, bytes / sizeof tail_);
  tail_bytes_ = bytes % sizeof tail_;
  if (tail_bytes_ != 0) std::memcpy(tail_, p + bytes - tail_bytes_, tail_bytes_);
  return *this;
}

void Sha256::finish(std::uint8_t digest[kDigestBytes]) {
  const std::uint64_t bits = total_ * 8;
  std::uint8_t padding[128] = {0x80};
  const std::size_t zeros = (tail_bytes_ < 56 ? 56 : 120) - tail_bytes_;
  for (int i = 0; i < 8; ++i) padding[zeros + i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
  add(padding, zeros + 8);
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t word = __builtin_bswap32(state_[i]);
    std::memcpy(digest + 4 * i, &word, 4);
  }
}

}  // namespace kvtier
