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

  void insert(NodeId page) override { link(page, links_[end_].colder, end_); }
  void insert_coldest(NodeId page) override { link(page, end_, links_[end_].hotter); }
  void touch(NodeId page) override {
    if (links_[end_].colder == page) return;
    unlink(page);
    link(page, links_[end_].colder, end_);
  }
  void remove(NodeId page) override { unlink(page); }
  NodeId coldest() const override { return known(links_[end_].hotter); }
  NodeId hotter(NodeId page) const override { return known(links_[page].hotter); }
  std::size_t size() const override { return size_; }
  std::size_t memory_bytes() const override { return links_.bytes(); }

 private:
  struct Link {
    NodeId colder;
    NodeId hotter;
  };

  void link(NodeId page, NodeId colder, NodeId hotter) {
    links_[page] = {colder, hotter};
    links_[colder].hotter = page;
    links_[hotter].colder = page;
    ++size_;
  }
  void unlink(NodeId page) {
    const Link link = links_[page];
    links_[link.colder].hotter = link.hotter;
    links_[link.hotter].colder = link.colder;
    --size_;
  }
  NodeId known(NodeId page) const { return page == end_ ? kNoNode : page; }

  NodeId end_;  // the ring's sentinel: its hotter neighbour is the coldest page, its colder one the hottest
  Array<Link> links_;
  std::size_t size_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, NodeId max_pages) {
  if (name == "lru") return std::make_unique<Lru>(max_pages);
  throw std::invalid_argument("policy: '" + std::string(name) + "' is not known; known policies: lru");
}

}  // namespace kvtier
