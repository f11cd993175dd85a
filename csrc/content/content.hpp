// What a sequence is made of, its tokens and the media among them, and what its blocks are called by that: the labels,
// whose layout kvtier/content.py tells. It only grows, so that no label ever changes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/sha256.hpp"

namespace kvtier {

// A span of placeholder tokens and the digest of what they stand for.
struct MediaSpan {
  std::int64_t start = 0;  // its first token
  std::uint64_t length = 0;
  std::array<std::uint8_t, kDigestBytes> digest{};

  auto operator<=>(const MediaSpan&) const = default;
};

class Content {
 public:
  // Media may reach beyond the tokens that are known so far; start is 0 or more, length 1 or more, both below 2^62.
  void append(std::span<const std::uint32_t> tokens, std::span<const MediaSpan> media = {});
  std::size_t size() const { return tokens_.size(); }
  // Has the processor bring the place of the next token.
  void fetch_end() const { __builtin_prefetch(tokens_.data() + tokens_.size(), 1); }

  // Throws std::invalid_argument unless the blocks [first, last) are there and whole.
  void require_whole(std::size_t first, std::size_t last, std::size_t block_size) const;
  // Their labels, label_bytes(block_size) each; the same throws.
  void labels(std::size_t first, std::size_t last, std::size_t block_size, std::uint8_t* out) const;

  static constexpr std::size_t label_bytes(std::size_t block_size) {
    return block_size * sizeof(std::uint32_t) + kDigestBytes;
  }

 private:
  void digest_of_media(std::size_t block, std::size_t block_size, std::uint8_t* out) const;

  std::vector<std::uint32_t> tokens_;
  std::vector<MediaSpan> media_;  // in order of position
};

}  // namespace kvtier
