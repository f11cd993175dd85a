// The order in which a tier's pages leave. A policy orders; it never owns: it is told which pages may go (ready,
// unpinned and without a pinned or filling continuation in the tier), and the catalog decides what is done with its
// answer. Whatever the policy answers, the catalog never evicts a block before its continuations in the same tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "common/types.hpp"

namespace kvtier {

// Keys are node ids: the pages of a chain have neighbouring keys, and so neighbouring records.
class Policy {
 public:
  virtual ~Policy() = default;
  // Many at once, one after the other as they are listed. None is named twice in a call, but to `touch`.
  virtual void insert(const NodeId* pages, std::size_t count) = 0;         // may go from now on; counts as a use
  virtual void touch(const NodeId* pages, std::size_t count) = 0;          // used; are in the order
  virtual void remove(const NodeId* pages, std::size_t count) = 0;         // may not go, or are gone; are in the order
  virtual void insert_coldest(NodeId page) = 0;                            // may go from now on, before all others
  virtual std::size_t coldest(NodeId* pages, std::size_t most) const = 0;  // the next to go, the first first
  virtual NodeId hotter(NodeId page) const = 0;                            // the one to go after `page`, or kNoNode
  virtual std::size_t memory_bytes() const = 0;
};

// Throws std::invalid_argument for a name that it does not know, listing those it knows.
std::unique_ptr<Policy> make_policy(std::string_view name, NodeId max_pages);

// One tier's order: a policy behind a buffer. A chain is pinned, let go or touched page by page, and the policy hears
// of it in batches, before it is asked anything. What it answers is the same.
class EvictionOrder {
 public:
  explicit EvictionOrder(std::unique_ptr<Policy> policy) : policy_(std::move(policy)) {}

  void insert(NodeId page) { ++size_, note(Change::kInsert, page); }
  void insert(const NodeId* pages, std::size_t count) {
    if (count == 0) return;
    tell();
    size_ += count;
    policy_->insert(pages, count);
  }
  void touch(NodeId page) { note(Change::kTouch, page); }
  void remove(NodeId page) { --size_, note(Change::kRemove, page); }
  void remove(const NodeId* pages, std::size_t count) {
    if (count == 0) return;
    tell();
    size_ -= count;
    policy_->remove(pages, count);
  }
  void insert_coldest(NodeId page) {
    tell();
    ++size_;
    policy_->insert_coldest(page);
  }
  std::size_t coldest(NodeId* pages, std::size_t most) const {
    tell();
    return policy_->coldest(pages, most);
  }
  // Takes the next to go out of the order.
  std::size_t pop_coldest(NodeId* pages, std::size_t most) {
    const std::size_t count = coldest(pages, most);
    policy_->remove(pages, count);
    size_ -= count;
    return count;
  }
  NodeId hotter(NodeId page) const {
    tell();
    return policy_->hotter(page);
  }
  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const { return policy_->memory_bytes(); }

 private:
  static constexpr std::size_t kBatch = 64;
  enum class Change : std::uint8_t { kInsert, kTouch, kRemove };

  void note(Change change, NodeId page) {
    if (change != change_ || noted_ == kBatch) tell();
    change_ = change;
    pages_[noted_++] = page;
  }
  void tell() const;

  std::unique_ptr<Policy> policy_;
  std::size_t size_ = 0;
  mutable std::size_t noted_ = 0;  // what the policy has yet to hear; all of one kind
  Change change_ = Change::kInsert;
  NodeId pages_[kBatch];
};

}  // namespace kvtier
