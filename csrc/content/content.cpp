#include "content/content.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kvtier {

void Content::append(std::span<const std::uint32_t> tokens, std::span<const MediaSpan> media) {
  media_.reserve(media_.size() + media.size());  // or tokens might be there without the media among them
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  if (media.empty()) return;
  media_.insert(media_.end(), media.begin(), media.end());
  std::sort(media_.begin(), media_.end());
}

void Content::require_whole(std::size_t first, std::size_t last, std::size_t block_size) const {
  if (block_size == 0 || first > last || last > tokens_.size() / block_size)
    throw std::invalid_argument("blocks: [" + std::to_string(first) + ", " + std::to_string(last) + ") of " +
                                std::to_string(block_size) + " tokens given; " + std::to_string(tokens_.size()) +
                                " tokens are known");
}

void Content::labels(std::size_t first, std::size_t last, std::size_t block_size, std::uint8_t* out) const {
  require_whole(first, last, block_size);
  const std::size_t bytes = block_size * sizeof(std::uint32_t);
  for (std::size_t block = first; block < last; ++block, out += bytes + kDigestBytes) {
    std::memcpy(out, tokens_.data() + block * block_size, bytes);
    digest_of_media(block, block_size, out + bytes);
  }
}

// All zeros where the block touches no media.
void Content::digest_of_media(std::size_t block, std::size_t block_size, std::uint8_t* out) const {
  const auto begin = static_cast<std::int64_t>(block * block_size);
  const auto end = begin + static_cast<std::int64_t>(block_size);
  static constexpr char kDomain[] = "kvtier.media.v1";
  Sha256 hash;
  bool touched = false;
  for (const MediaSpan& span : media_) {
    if (span.start >= end) break;
    if (span.start + static_cast<std::int64_t>(span.length) <= begin) continue;
    if (!touched) hash.add(kDomain, sizeof kDomain - 1);
    touched = true;
    const std::int64_t from = span.start - begin;
    hash.add(&from, sizeof from).add(&span.length, sizeof span.length).add(span.digest.data(), span.digest.size());
  }
  if (touched)
    hash.finish(out);
  else
    std::memset(out, 0, kDigestBytes);
}

}  // namespace kvtier
