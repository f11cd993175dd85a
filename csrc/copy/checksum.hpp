// The page checksum: what a page's bytes and its identity are reduced to, the same on every processor.
//
// Definition, version 1. All arithmetic is unsigned and wraps at 64 bits; bytes are read little-endian.
//
//   mix(x)   x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
//            (David Stafford's variant 13 of MurmurHash3's finaliser, as in splitmix64)
//   m(x)     (x mod 2^32) * (x >> 32)                                  one 32 x 32 -> 64 multiply
//   k1       mix(key.lo ^ 0x6B76746965722E31)                          the page's keys ("kvtier.1")
//   k2       mix(key.hi + k1 + 0xD6E8FEB86659FD93)
//
// The payload is cut into 16-byte lanes, the last one filled up with zeros. Lane i holds two words (a, b) and is put
// through a three-round Feistel network, a bijection, keyed by its position:
//
//   p = k1 + i * 0x9E3779B97F4A7C15,  q = k2 + i * 0xC2B2AE3D27D4EB4F
//   a += m(b ^ p);  b += m(a ^ q);  a += m(b ^ p)
//
// A is the sum of all a, B the sum of all b, and the checksum is
//
//   mix(mix(A + payload * 0x9E3779B97F4A7C15) ^ (B + k2))              0 is replaced by 1
//
// Lanes meet only in two sums, so they may be taken in any order, by any number of vector elements, threads or streams
// of a GPU. A change within one lane always changes (A, B), because the network is a bijection; the final mix lets it
// pass unseen with probability 2^-64. The multiplies make a lane's share depend on its position, so that swapped
// lanes, segments or pages do not cancel. It guards against faults, not against someone who builds collisions: the
// keys are public.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/identity.hpp"

namespace kvtier {

// 0 never comes out: a stored 0 means "no checksum". `page` needs no alignment and no padding.
std::uint64_t checksum(const std::byte* page, std::size_t payload, ChecksumKey key);

}  // namespace kvtier
