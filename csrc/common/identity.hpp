// What a page *is*: the words in which the catalog tells the data plane which block a slot must hold, and in which a
// disk record remembers it. A page is the right one only if its whole identity, label bytes included, is equal.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvtier {

static_assert(std::endian::native == std::endian::little, "identities are stored in little-endian order, unconverted");

// The fixed head of an identity. The block's label (token ids and the digest of the media among them, or a 32-byte
// hash) follows it, then zeros up to a multiple of 8, so that every identity of one catalog has one size and padding
// never carries stray bytes.
struct PageIdentity {
  std::uint8_t digest[32];   // SHA-256(parent ‖ label)
  std::uint8_t parent[32];   // the parent's digest; the root's is SHA-256("kvtier.root.v1" ‖ space ‖ u32 group)
  std::uint8_t space[32];    // fingerprint of the namespace
  std::uint64_t generation;  // of the namespace, at the time the block was named
  std::uint32_t group;
  std::uint32_t position;  // index of the block in its chain, counted from 0
};

inline constexpr std::size_t kIdentityHead = 112;
inline constexpr std::size_t kHashLabelBytes = 32;
static_assert(sizeof(PageIdentity) == kIdentityHead && std::is_trivially_copyable_v<PageIdentity>);

// Bytes of one identity whose label has `label_bytes` bytes.
constexpr std::size_t identity_bytes(std::size_t label_bytes) { return kIdentityHead + (label_bytes + 7) / 8 * 8; }

// The label of an identity stored as `identity_bytes(label_bytes)` contiguous bytes.
inline const std::uint8_t* identity_label(const PageIdentity* identity) {
  return reinterpret_cast<const std::uint8_t*>(identity) + kIdentityHead;
}

inline bool same_identity(const PageIdentity* a, const PageIdentity* b, std::size_t label_bytes) {
  return std::memcmp(a, b, identity_bytes(label_bytes)) == 0;
}

// Seeds a page's checksum, so that the bytes of one block never pass for those of another. The digest covers label,
// parents, namespace and group; the generation is mixed in because an invalidated page must not pass either.
struct ChecksumKey {
  std::uint64_t lo;
  std::uint64_t hi;
};

inline ChecksumKey checksum_key(const PageIdentity& identity) {
  ChecksumKey key;
  std::memcpy(&key.lo, identity.digest, sizeof key.lo);
  std::memcpy(&key.hi, identity.digest + 8, sizeof key.hi);
  key.lo ^= identity.generation * 0x9E3779B97F4A7C15ull;
  return key;
}

}  // namespace kvtier
