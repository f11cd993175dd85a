// What a store says it holds, as the catalog is told at a restart.
#include <map>
#include <set>
#include <stdexcept>

#include "catalog/catalog.hpp"
#include "common/sha256.hpp"
#include "fuzz.hpp"

namespace kvtier::fuzz {
namespace {

constexpr std::size_t kLabel = 12;
constexpr std::size_t kIdentity = identity_bytes(kLabel);
constexpr Slot kSlots = 24;
using Key = std::vector<std::uint8_t>;

struct Claim {
  PageIdentity head{};
  std::uint8_t label[kIdentity - kIdentityHead] = {};
};
static_assert(sizeof(Claim) == kIdentity);

Key key(const std::uint8_t* digest) { return {digest, digest + kDigestBytes}; }

void root_digest(const PageIdentity& head, std::uint8_t* out) {
  Sha256().add("kvtier.root.v1", 14).add(head.space, 32).add(&head.group, sizeof head.group).finish(out);
}

void name(Claim& claim) {
  Sha256().add(claim.head.parent, kDigestBytes).add(claim.label, kLabel).finish(claim.head.digest);
}

// Chains of a few namespaces, some of them forked, then whatever the input does to them.
std::vector<Claim> claims(Reader& in) {
  std::vector<Claim> made;
  const std::size_t count = in.byte() % kSlots;
  while (made.size() < count) {
    const std::uint8_t shape = in.byte();
    Claim claim;
    const bool first = made.empty() || shape % 4 == 0;
    if (first) {
      std::memset(claim.head.space, shape / 4 % 3, 32);
      claim.head.group = shape / 16 % 2;
      claim.head.generation = shape / 32 % 3;
      root_digest(claim.head, claim.head.parent);
    } else {
      const Claim& above = made[shape % 4 == 1 ? in.below(made.size()) : made.size() - 1];
      claim.head = above.head;
      std::memcpy(claim.head.parent, above.head.digest, kDigestBytes);
      ++claim.head.position;
    }
    claim.label[0] = in.byte() % 8;
    name(claim);
    made.push_back(claim);
  }
  std::vector<std::byte> bytes(made.size() * sizeof(Claim));
  if (!made.empty()) std::memcpy(bytes.data(), made.data(), bytes.size());
  spoil(in, bytes);
  made.resize(bytes.size() / sizeof(Claim));
  if (!made.empty()) std::memcpy(made.data(), bytes.data(), made.size() * sizeof(Claim));
  for (int mends = in.byte() % 8; mends > 0 && !made.empty(); --mends) name(made[in.below(made.size())]);
  return made;
}

}  // namespace

void fuzz_identities(Reader& in) {
  Catalog catalog({{Tier::kHost, 4, "lru"}, {Tier::kDisk, kSlots, "lru"}}, kLabel, 40);
  if (in.flag()) catalog.invalidate(nullptr, in.byte() % 3);
  const std::vector<Claim> told = claims(in);
  std::vector<Slot> slots(told.size());
  const auto step = static_cast<Slot>(in.byte() % 2 == 0 ? 1 : 5);  // 5: coprime to the number of slots
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<Slot>(i * step % kSlots);
  if (!slots.empty() && in.byte() == 1) slots[in.below(slots.size())] = in.byte();  // out of range, or twice
  std::vector<std::uint8_t> bytes(told.size() * sizeof(Claim));
  if (!told.empty()) std::memcpy(bytes.data(), told.data(), bytes.size());

  const std::set<Slot> distinct(slots.begin(), slots.end());
  const bool legal = distinct.size() == slots.size() && (slots.empty() || *distinct.rbegin() < kSlots);
  std::vector<bool> restored;
  try {
    restored = catalog.restore(Tier::kDisk, slots, bytes.data(), bytes.size());
    require(legal, "slots out of range, or named twice, were taken");
  } catch (const std::invalid_argument&) {
    require(!legal, "good slots were refused");
    require(catalog.usage(Tier::kDisk).free == kSlots, "a refused call took slots");
    restored.assign(slots.size(), false);
  }
  const std::string wrong = catalog.check();
  require(wrong.empty(), wrong);
  const auto count = static_cast<Slot>(std::count(restored.begin(), restored.end(), true));
  require(catalog.usage(Tier::kDisk).ready == count, "the catalog has other pages than it said");

  std::map<Key, std::size_t> by_digest;
  for (std::size_t i = 0; i < told.size(); ++i) {
    if (!restored[i]) continue;
    Claim proven = told[i];
    name(proven);
    require(std::memcmp(proven.head.digest, told[i].head.digest, 32) == 0, "a digest is not its label's");
    for (std::size_t pad = kLabel; pad < sizeof proven.label; ++pad)
      require(proven.label[pad] == 0, "a label has something behind its end");
    require(by_digest.emplace(key(told[i].head.digest), i).second, "one block was restored twice");
  }
  for (const auto& [digest, last] : by_digest) {
    // The chain from the root, from what was told alone: the catalog must find it, and this page in this slot.
    std::vector<std::uint8_t> labels;
    std::size_t at = last, depth = told[last].head.position;
    bool whole = true;
    for (;; --depth) {
      require(told[at].head.position == depth, "a block is not one deeper than its parent");
      labels.insert(labels.begin(), told[at].label, told[at].label + kLabel);
      require(std::memcmp(told[at].head.space, told[last].head.space, 32) == 0, "a chain changes its namespace");
      require(told[at].head.group == told[last].head.group, "a chain changes its group");
      require(told[at].head.generation == told[last].head.generation, "a chain changes its generation");
      if (depth == 0) break;
      const auto parent = by_digest.find(key(told[at].head.parent));
      if (parent == by_digest.end()) {  // its parent's page was told wrongly or twice, but its node is there
        whole = false;
        break;
      }
      at = parent->second;
    }
    if (!whole) continue;
    std::uint8_t root[32];
    root_digest(told[at].head, root);
    require(std::memcmp(root, told[at].head.parent, 32) == 0, "a chain starts at another root");
    Digest space;
    std::memcpy(space.data(), told[last].head.space, 32);
    const NodeId id = catalog.root(space, told[last].head.group, told[last].head.generation);
    const NodeId roots[] = {id};
    const Match match = catalog.match(roots, labels, 0, 1, SIZE_MAX);
    require(match.hit == told[last].head.position + 1, "a restored chain is not found");
    require(match.slots.back() == slots[last], "a restored chain is found in another slot");
    std::vector<std::uint8_t> said(sizeof(Claim));
    catalog.identities({&match.nodes.back(), 1}, said.data());
    require(std::memcmp(said.data(), &told[last], sizeof(Claim)) == 0, "a block has another identity than was told");
    catalog.release(1);
  }
}

std::vector<Input> identity_seeds() {
  const Input chain = {0, 6, 0, 1, 2, 2, 2, 3, 2, 4, 2, 5, 2, 6};
  Input forked = {0, 8, 0, 1, 2, 2, 2, 3, 1, 1, 0, 5, 4, 1, 2, 2, 2, 3, 2, 9, 36, 1};
  Input spoiled = chain, mended = chain, twice = chain;
  spoiled.insert(spoiled.end(), {1, 0, 200, 0});
  mended.insert(mended.end(), {1, 1, 112, 0, 9, 1, 0, 0});
  twice.insert(twice.end(), {1, 3, 128, 0, 0, 0, 128, 0});
  Input generations = {1, 1, 6, 64, 1, 2, 2, 32, 1, 2, 2, 0, 1, 2, 2};
  return {{}, chain, forked, spoiled, mended, twice, generations};
}

}  // namespace kvtier::fuzz
