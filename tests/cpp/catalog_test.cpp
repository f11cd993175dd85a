// The catalog under a seeded random engine, for the sanitizers: every call, any order, check() after each.
#include "catalog/catalog.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace kvtier {
namespace {

constexpr std::size_t kLabelBytes = 16;
constexpr std::uint32_t kChain = 12;

class Engine {
 public:
  explicit Engine(std::uint32_t seed)
      : random_(seed),
        catalog_({{Tier::kDevice, 24, "lru"}, {Tier::kHost, 20, "lru"}, {Tier::kDisk, 40, "lru"}}, kLabelBytes, 200) {
    for (std::size_t i = 0; i < spaces_.size(); ++i) spaces_[i].fill(static_cast<std::uint8_t>(i + 1));
  }

  void step() {
    switch (below(10)) {
      case 0:
      case 1:
        serve();
        break;
      case 2:
        match_only();
        break;
      case 3:
      case 4:
        load();
        break;
      case 5:
      case 6:
        store();
        break;
      case 7:
        settle_one();
        break;
      case 8:
        release_one();
        break;
      default:
        upkeep();
    }
    const std::string broken = catalog_.check();
    REQUIRE_MESSAGE(broken.empty(), broken);
  }

  void finish() {
    while (!open_.empty()) settle_one();
    for (const RequestId request : requests_) catalog_.release(request);
    REQUIRE(catalog_.check().empty());
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kDisk}) {
      const Usage usage = catalog_.usage(tier);
      CHECK(usage.pinned == 0);
      CHECK(usage.free + usage.ready == usage.capacity);
    }
  }

 private:
  struct Open {
    std::size_t hops;
    std::size_t count;
  };

  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }

  std::vector<std::uint8_t> labels(std::uint32_t blocks) {
    std::vector<std::uint8_t> bytes(blocks * kLabelBytes);
    const std::uint32_t stem = below(3);
    for (std::uint32_t i = 0; i < blocks; ++i) bytes[i * kLabelBytes] = static_cast<std::uint8_t>(10 * stem + i);
    if (blocks > 2 && below(3) == 0) bytes[(blocks - 1) * kLabelBytes + 3] = static_cast<std::uint8_t>(below(4));
    return bytes;
  }

  NodeId root() { return catalog_.root(spaces_[below(2)], 0, generation_); }

  RequestId fresh() {
    requests_.push_back(++last_request_);
    return last_request_;
  }

  // A request from its match to its blocks being everyone's; it stays, with its lease.
  void serve() {
    const NodeId at = root();
    const std::vector<std::uint8_t> wanted = labels(1 + below(kChain));
    const RequestId request = fresh();
    const Match match = catalog_.match({&at, 1}, wanted, 0, request, wanted.size());
    const std::uint32_t blocks = static_cast<std::uint32_t>(wanted.size() / kLabelBytes);
    if (match.hit == blocks) return;
    const std::vector<Slot> slots = catalog_.take(Tier::kDevice, blocks - match.hit, request);
    if (slots.empty()) return;
    const NodeId parent = match.hit ? match.nodes.back() : at;
    const std::span<const std::uint8_t> rest(wanted.data() + match.hit * kLabelBytes,
                                             wanted.size() - match.hit * kLabelBytes);
    const std::vector<NodeId> nodes = catalog_.insert(parent, rest, request);
    catalog_.adopt(Tier::kDevice, nodes, std::span(slots).first(nodes.size()), request);
  }

  void match_only() {
    const NodeId at = root();
    const std::vector<std::uint8_t> wanted = labels(kChain);
    catalog_.match({&at, 1}, wanted, 0, fresh(), wanted.size());
  }

  void move(const std::vector<Tier>& path, RequestId request, const std::vector<NodeId>& nodes) {
    const Reservation got = catalog_.reserve(path, nodes, request, below(2) == 0, below(2) == 0);
    if (got.count != 0) open_[got.ticket] = {path.size() - 1, got.count};
  }

  void load() {
    const NodeId at = root();
    const std::vector<std::uint8_t> wanted = labels(kChain);
    const RequestId request = fresh();
    const Match match = catalog_.match({&at, 1}, wanted, 0, request, wanted.size());
    if (match.nodes.empty()) return;
    const bool from_disk = below(2) == 0;
    move(from_disk ? std::vector{Tier::kDisk, Tier::kHost, Tier::kDevice} : std::vector{Tier::kHost, Tier::kDevice},
         request, match.nodes);
    if (below(2) == 0) catalog_.narrow(request, Tier::kDevice);
  }

  void store() {
    const bool spill = below(2) == 0;
    const NodeId at = root();
    const std::vector<std::uint8_t> wanted = labels(kChain);
    const RequestId request = fresh();
    const Match match = catalog_.match({&at, 1}, wanted, 0, request, wanted.size());
    if (!match.nodes.empty())
      move(spill ? std::vector{Tier::kHost, Tier::kDisk} : std::vector{Tier::kDevice, Tier::kHost}, 0, match.nodes);
    catalog_.release(request);
  }

  void settle_one() {
    if (open_.empty()) return;
    auto it = open_.begin();
    std::advance(it, below(static_cast<std::uint32_t>(open_.size())));
    const auto [hops, count] = it->second;
    std::vector<std::uint8_t> status(hops * count, static_cast<std::uint8_t>(PageStatus::kOk));
    for (std::size_t i = 0; i < count; ++i)
      if (below(6) == 0)
        for (std::size_t hop = 0; hop < hops; ++hop)
          status[hop * count + i] = static_cast<std::uint8_t>(hop ? PageStatus::kSkipped : PageStatus::kCorrupt);
    if (below(4) == 0) catalog_.cancel(it->first);
    const Ticket ticket = it->first;
    catalog_.settle(ticket, status, hops, count);
    open_.erase(it);
    if (below(4) == 0) CHECK_FALSE(catalog_.settle(ticket, status, hops, count));
  }

  void release_one() {
    if (requests_.empty()) return;
    const std::size_t i = below(static_cast<std::uint32_t>(requests_.size()));
    catalog_.release(requests_[i]);
    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void upkeep() {
    if (below(6) == 0) {
      catalog_.invalidate(below(2) ? &spaces_[0] : nullptr, ++generation_);
      return;
    }
    std::vector<NodeId> cold = catalog_.cold(Tier::kHost, 4, Tier::kDisk);
    if (!cold.empty()) move({Tier::kHost, Tier::kDisk}, 0, cold);
    catalog_.drop(Tier::kDisk, cold);
  }

  std::mt19937 random_;
  Catalog catalog_;
  std::array<Digest, 2> spaces_;
  std::uint64_t generation_ = 0;
  RequestId last_request_ = 0;
  std::vector<RequestId> requests_;
  std::map<Ticket, Open> open_;
};

TEST_CASE("the catalog keeps its promises in any order of calls") {
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Engine engine(seed);
    for (int i = 0; i < 1500; ++i) engine.step();
    engine.finish();
  }
}

}  // namespace
}  // namespace kvtier
