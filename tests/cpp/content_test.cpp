#include "content/content.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

namespace kvtier {
namespace {

constexpr std::size_t kBlock = 4;

std::vector<std::uint8_t> label(const Content& content, std::size_t block) {
  std::vector<std::uint8_t> out(Content::label_bytes(kBlock));
  content.labels(block, block + 1, kBlock, out.data());
  return out;
}

bool has_media(const std::vector<std::uint8_t>& label) {
  for (std::size_t i = 4 * kBlock; i < label.size(); ++i)
    if (label[i] != 0) return true;
  return false;
}

TEST_CASE("a label is the tokens of its block and a digest of the media that touch it") {
  Content content;
  const std::vector<std::uint32_t> tokens{1, 2, 3, 4, 5, 6, 7, 8, 9};
  content.append({tokens.data(), 3});
  content.append({tokens.data() + 3, 6}, std::vector<MediaSpan>{{7, 1, {1}}, {5, 2, {2}}});
  CHECK(content.size() == 9);
  const auto first = label(content, 0), second = label(content, 1);
  CHECK(std::memcmp(first.data(), tokens.data(), 4 * kBlock) == 0);
  CHECK(std::memcmp(second.data(), tokens.data() + 4, 4 * kBlock) == 0);
  CHECK_FALSE(has_media(first));
  CHECK(has_media(second));
  Content other;
  other.append(tokens, std::vector<MediaSpan>{{5, 2, {2}}, {7, 1, {1}}});
  CHECK(label(other, 1) == second);
  Content moved;
  moved.append(tokens, std::vector<MediaSpan>{{4, 2, {2}}, {7, 1, {1}}});
  CHECK(label(moved, 1) != second);
}

TEST_CASE("tokens are not there without the media among them") {
  Content content;
  const std::vector<std::uint32_t> tokens(kBlock);
  const std::vector<MediaSpan> media{{0, 1, {1}}};
  const std::span<const MediaSpan> too_many(media.data(), std::size_t{1} << 60);
  CHECK_THROWS_AS(content.append(tokens, too_many), std::length_error);
  CHECK(content.size() == 0);
}

TEST_CASE("only whole blocks have labels") {
  Content content;
  content.append(std::vector<std::uint32_t>(9));
  std::vector<std::uint8_t> out(3 * Content::label_bytes(kBlock));
  content.labels(0, 2, kBlock, out.data());
  content.labels(2, 2, kBlock, out.data());
  CHECK_THROWS(content.labels(0, 3, kBlock, out.data()));
  CHECK_THROWS(content.labels(2, 1, kBlock, out.data()));
  CHECK_THROWS(content.labels(0, 0, 0, out.data()));
}

}  // namespace
}  // namespace kvtier
