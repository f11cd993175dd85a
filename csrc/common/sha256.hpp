// SHA-256 (FIPS 180-4), with the x86 SHA instructions where the processor has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

inline constexpr std::size_t kDigestBytes = 32;

class Sha256 {
 public:
  Sha256();
  Sha256& add(const void* data, std::size_t bytes);
  void finish(std::uint8_t digest[kDigestBytes]);

  static bool accelerated();

  // The portable compression only, for tests of one against the other.
  static Sha256 portable();

 private:
  using Compress = void (*)(std::uint32_t state[8], const std::uint8_t* blocks, std::size_t count);
  explicit Sha256(Compress compress);

  Compress compress_;
  std::uint32_t state_[8];
  std::uint8_t tail_[64];
  std::size_t tail_bytes_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace kvtier
