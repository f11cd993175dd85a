// A batch of requests, of which one cannot be: nothing of the others has changed then.
#include <doctest/doctest.h>

#include <stdexcept>

#include "requests/entering.hpp"
#include "requests/growing.hpp"
#include "requests/labels.hpp"

namespace kvtier::test {
namespace {

constexpr Tier D = Tier::kDevice;
constexpr std::size_t kBlock = 4, kSlots = 8;

struct Requests {
  Requests() : catalog({{D, kSlots, "lru"}}, Content::label_bytes(kBlock), 100) {
    root = catalog.root(Digest{}, 0, 0);
    for (Growing* growing : {&a, &b}) {
      growing->content.append(std::vector<std::uint32_t>(2 * kBlock, static_cast<std::uint32_t>(growing->request)));
      growing->table = catalog.take(D, 2, growing->request);
    }
  }
  bool unchanged() const { return a.cached == 0 && !a.leaf && a.later.empty() && catalog.stats().nodes == 0; }

  Catalog catalog;
  NodeId root = kNoNode;
  Content tokens_of_a, tokens_of_b;
  Growing a{tokens_of_a, 1}, b{tokens_of_b, 2};
};

TEST_CASE("of requests that have computed blocks all are offered, or none where one has none such") {
  Requests r;
  const Computed parts[] = {{&r.a, 2, r.root}, {&r.b, 3, r.root}};
  for (const char* lacks : {"table: ", "blocks: "}) {
    CHECK_THROWS_WITH_AS(extend(r.catalog, D, parts), doctest::Contains(lacks), std::invalid_argument);
    CHECK(r.unchanged());
    r.b.table.push_back(r.catalog.take(D, 1, 2)[0]);
  }
  CHECK(extend(r.catalog, D, {parts, 1}).size() == 2);
  CHECK(r.a.cached == 2);
  CHECK(r.catalog.check().empty());
}

TEST_CASE("a step is made by all of its requests, or by none where one cannot have slots") {
  Requests r;
  Content other;
  Growing nobody(other, 0);  // whom the catalog gives nothing
  const std::vector<std::uint32_t> made(2 * kBlock, 7);
  Advance parts[3];
  parts[0] = {.growing = &r.a, .made = made};
  parts[1] = {.growing = &r.b, .made = std::span(made).first(1)};
  parts[2] = {.growing = &nobody, .made = made};
  Step step(r.catalog, D, kBlock);
  CHECK_THROWS_AS(step.run(parts), std::invalid_argument);
  for (const Growing* growing : {&r.a, &r.b}) {
    CHECK(growing->content.size() == 2 * kBlock);
    CHECK(growing->table.size() == 2);
    CHECK(growing->noted == 0);
  }
  CHECK(r.catalog.usage(D).free == kSlots - 4);
  step.run({parts, 2});
  CHECK(r.a.content.size() == 4 * kBlock);
  CHECK(r.a.table.size() == 4);
  CHECK(r.b.table.size() == 3);
  CHECK(r.catalog.usage(D).free == kSlots - 7);
  CHECK(r.catalog.check().empty());
}

TEST_CASE("who enters is found what there is of its tokens in its namespace, the last of them never") {
  Requests r;
  const Computed part[] = {{&r.a, 2, r.root}};
  REQUIRE(extend(r.catalog, D, part).size() == 2);
  Content same, longer;
  same.append(std::vector<std::uint32_t>(2 * kBlock, 1));
  longer.append(std::vector<std::uint32_t>(2 * kBlock + 1, 1));
  Growing c{same, 3}, d{longer, 4};
  CHECK(find(r.catalog, Digest{}, 0, c, SIZE_MAX).hit == 1);
  CHECK(find(r.catalog, Digest{}, 0, d, SIZE_MAX).hit == 2);
  CHECK(find(r.catalog, Digest{}, 0, d, 1).hit == 1);
  Digest other{};
  other[0] = 1;
  CHECK(find(r.catalog, other, 0, d, SIZE_MAX).hit == 0);
  CHECK(find(r.catalog, Digest{}, 1, d, SIZE_MAX).hit == 0);  // of a later generation
  CHECK(d.cacheable);
  Content nothing;
  Growing e{nothing, 5};
  CHECK(find(r.catalog, Digest{}, 1, e, SIZE_MAX).hit == 0);
}

TEST_CASE("who enters gets all of its slots, or none and nothing has changed") {
  Requests r;
  Content tokens;
  Growing c{tokens, 3};
  CHECK_FALSE(give_first(r.catalog, D, c, kSlots - 3));
  CHECK(c.table.empty());
  CHECK(r.catalog.usage(D).free == kSlots - 4);
  CHECK(give_first(r.catalog, D, c, kSlots - 4));
  CHECK(c.table.size() == kSlots - 4);
  CHECK(r.catalog.has_room(D, 0));
  CHECK_FALSE(r.catalog.has_room(D, 1));
  CHECK(r.catalog.check().empty());
}

}  // namespace
}  // namespace kvtier::test
