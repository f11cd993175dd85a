#include "catalog/policy.hpp"

#include <stdexcept>

#include "common/array.hpp"

namespace kvtier {
namespace {

// Least recently used. A chain that is touched tail first makes a plain recency list evict leaves first, with no walk
// and no heap: hit for hit the same as choosing the least recent leaf.
class Lru final : public Policy {
 public:
  explicit Lru(NodeId max_pages) : end_(max_pages), links_(static_cast<std::size_t>(max_pages) + 1) {
    links_[end_] = {end_, end_};
  }

  void insert(const NodeId* pages, std::size_t count) override {
    NodeId hottest = links_[end_].colder;
    for (std::size_t i = 0; i < count; ++i) {
      links_[hottest].hotter = pages[i];
      links_[pages[i]].colder = hottest;
      hottest = pages[i];
    }
    join(hottest, end_);
  }
  void insert_coldest(NodeId page) override {
    join(page, links_[end_].hotter);
    join(end_, page);
  }
  void touch(const NodeId* pages, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) {
      if (links_[end_].colder == pages[i]) continue;
      remove(pages + i, 1);
      insert(pages + i, 1);
    }
  }
  void remove(const NodeId* pages, std::size_t count) override {
    for (std::size_t i = 0; i < count;) {
      // What was used as one run lies in the order as one run, this way or the other, and is cut out in one piece.
      auto [colder, hotter] = links_[pages[i++]];
      for (; i < count; ++i) {
        if (pages[i] == colder && colder != end_) {
          colder = links_[colder].colder;
        } else if (pages[i] == hotter && hotter != end_) {
          hotter = links_[hotter].hotter;
        } else {
          break;
        }
      }
      join(colder, hotter);
    }
  }
  std::size_t coldest(NodeId* pages, std::size_t most) const override {
    std::size_t count = 0;
    for (NodeId page = links_[end_].hotter; page != end_ && count < most; page = links_[page].hotter)
      pages[count++] = page;
    return count;
  }
  NodeId hotter(NodeId page) const override { return links_[page].hotter == end_ ? kNoNode : links_[page].hotter; }
  std::size_t memory_bytes() const override { return links_.bytes(); }

 private:
  struct Link {
    NodeId colder;
    NodeId hotter;
  };

  void join(NodeId colder, NodeId hotter) {
    links_[colder].hotter = hotter;
    links_[hotter].colder = colder;
  }

  NodeId end_;  // the ring's sentinel: its hotter neighbour is the coldest page, its colder one the hottest
  Array<Link> links_;
};

}  // namespace

void EvictionOrder::tell() const {
  const std::size_t count = std::exchange(noted_, 0);
  if (count == 0) return;
  if (change_ == Change::kInsert) policy_->insert(pages_, count);
  if (change_ == Change::kTouch) policy_->touch(pages_, count);
  if (change_ == Change::kRemove) policy_->remove(pages_, count);
}

std::unique_ptr<Policy> make_policy(std::string_view name, NodeId max_pages) {
  if (name == "lru") return std::make_unique<Lru>(max_pages);
  throw std::invalid_argument("policy: '" + std::string(name) + "' is not known; known policies: lru");
}

}  // namespace kvtier
