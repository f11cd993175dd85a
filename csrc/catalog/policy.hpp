// The order in which a tier's pages leave. A policy orders; it never owns: it is told which pages may go (ready,
// unpinned and without a pinned or filling continuation in the tier), and the catalog decides what is done with its
// answer. Whatever the policy answers, the catalog never evicts a block before its continuations in the same tier.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "common/types.hpp"

namespace kvtier {

// Keys are node ids: the pages of a chain have neighbouring keys, and so neighbouring records.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual void insert(NodeId page) = 0;          // may go from now on; counts as a use
  virtual void insert_coldest(NodeId page) = 0;  // may go from now on, before all others
  virtual void touch(NodeId page) = 0;           // used; is in the order
  virtual void remove(NodeId page) = 0;          // may not go, or is gone; is in the order
  virtual NodeId coldest() const = 0;            // the next to go, or kNoNode
  virtual NodeId hotter(NodeId page) const = 0;  // the one to go after `page`, or kNoNode
  virtual std::size_t size() const = 0;
  virtual std::size_t memory_bytes() const = 0;
};

// Throws std::invalid_argument for a name that it does not know, listing those it knows.
std::unique_ptr<Policy> make_policy(std::string_view name, NodeId max_pages);

}  // namespace kvtier
