// The trie: which blocks there are, and how they continue each other. It knows nothing of tiers.
//
// The nodes of a chain stand side by side when they were created in one run, so a chain is followed by trying node
// k + 1 first (parent and label are compared). Only a node that does not stand right behind its parent has an entry in
// an open-addressing table, keyed by (parent, label), which is probed when that guess is wrong. Labels are always
// compared in full: a hash only says where to look.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/array.hpp"
#include "common/identity.hpp"
#include "common/types.hpp"

namespace kvtier {

using Digest = std::array<std::uint8_t, 32>;

// A point in time in sixteenths of a second, 0: none.
using Moment = std::uint32_t;
Moment moment_of(double seconds);  // of what is no time or before the first, none

// A root's id has the top bit set and is never used twice, so an old one can never mean another namespace.
inline constexpr NodeId kRootBit = 0x80000000u;
constexpr bool is_root(NodeId id) { return (id & kRootBit) != 0; }

struct Root {
  NodeId id = kNoNode;  // kNoNode: this entry is free
  Digest space{};
  Digest digest{};
  std::uint64_t generation = 0;
  std::uint64_t used = 0;  // for giving the place of the least recently asked-for empty root away
  std::uint32_t group = 0;
  std::uint32_t children = 0;
  bool detached = false;  // invalidated: what is left below it belongs to running requests and is never found again
};

class Trie {
 public:
  Trie(std::size_t label_bytes, NodeId max_nodes);

  // Roots. `root` finds or creates, `find_root` answers kNoNode, `root_of` throws for an unknown id.
  NodeId root(const Digest& space, std::uint32_t group, std::uint64_t generation);
  bool has_room_for_root() const;
  NodeId find_root(const Digest& space, std::uint32_t group) const;
  const Root& root_of(NodeId root_id) const;
  bool knows_root(NodeId id) const { return root_index_.contains(id); }
  const Root& root_of_node(NodeId node) const { return roots_[nodes_[node].root]; }
  bool detached(NodeId node) const { return root_of_node(node).detached; }
  // Puts an empty tree of `generation` under the same id. What hung there is detached; the nodes are returned.
  std::vector<NodeId> detach(NodeId root_id, std::uint64_t generation);
  std::vector<NodeId> root_ids(const Digest* space) const;  // attached ones; of one namespace if given
  std::size_t root_count() const { return root_index_.size(); }

  // Chains. Both write node ids to `out` and answer how many.
  std::size_t walk(NodeId parent, const std::uint8_t* labels, std::size_t count, NodeId* out) const;
  std::size_t create(NodeId parent, const std::uint8_t* labels, std::size_t count, NodeId* out);
  void erase(NodeId node);  // has no child and no hold

  void prefetch(NodeId node) const {
    __builtin_prefetch(&nodes_[node], 1);
    __builtin_prefetch(&parent_[node], 1);
  }

  bool alive(NodeId node) const { return node < max_nodes_ && parent_[node] != kNoNode; }
  NodeId parent(NodeId node) const { return parent_[node]; }
  std::uint32_t position(NodeId node) const { return nodes_[node].position; }
  std::uint32_t children(NodeId node) const { return nodes_[node].children; }
  std::uint32_t holds(NodeId node) const { return nodes_[node].holds; }
  bool bare(NodeId node) const { return nodes_[node].children == 0 && nodes_[node].holds == 0; }
  void hold(NodeId node) { ++nodes_[node].holds; }
  void unhold(NodeId node) { --nodes_[node].holds; }
  // When it will be needed, the earliest that was told and is not past `now`. See Moment.
  Moment needed(NodeId node) const { return needed_[node]; }
  void need(NodeId node, Moment when, Moment now) {
    if (needed_[node] < now || when < needed_[node]) needed_[node] = when;
  }
  void need_no_more(NodeId node) { needed_[node] = 0; }
  const std::uint8_t* label(NodeId node) const {
    return labels_.data() + static_cast<std::size_t>(node) * label_bytes_;
  }

  const std::uint8_t* digest(NodeId node);  // computed on first use, with those of its ancestors
  void identity(NodeId node, std::uint8_t* out);

  std::size_t label_bytes() const { return label_bytes_; }
  NodeId max_nodes() const { return max_nodes_; }
  std::size_t free_nodes() const { return free_count_; }
  std::size_t memory_bytes() const;

  std::string check() const;  // empty, or the first thing found wrong

 private:
  struct Node {
    std::uint32_t children;
    std::uint32_t holds;
    std::uint32_t position;
    std::uint32_t root;  // index in roots_
  };
  struct Entry {
    std::uint32_t tag;   // low bits of the hash: its home in the table
    std::uint32_t node;  // + 1; 0 is empty
  };

  template <std::size_t kBytes>  // of a label; 0: told by label_bytes_
  std::size_t walk_as(NodeId parent, const std::uint8_t* labels, std::size_t count, NodeId* out) const;
  // Fetches the label that lies `ahead` labels behind this one, if there is one: the address is not followed.
  void prefetch_label(const std::uint8_t* label, std::size_t ahead) const {
    const auto first = reinterpret_cast<std::uintptr_t>(label) + ahead * label_bytes_;
    __builtin_prefetch(reinterpret_cast<const void*>(first));
    __builtin_prefetch(reinterpret_cast<const void*>(first + label_bytes_ - 1));
  }
  bool tabled(NodeId node) const { return parent_[node] + 1 != node; }
  std::uint32_t hash(NodeId parent, const std::uint8_t* label) const;
  NodeId probe(NodeId parent, const std::uint8_t* label) const;
  bool same_label(NodeId node, const std::uint8_t* label) const;
  void table_insert(std::uint32_t tag, NodeId node);
  void table_erase(std::uint32_t tag, NodeId node);
  std::uint32_t& children_of(NodeId id);
  std::uint32_t new_root(const Digest& space, std::uint32_t group, std::uint64_t generation);
  void forget_root(std::uint32_t index);
  void forget_empty_roots();
  static std::string root_key(const Digest& space, std::uint32_t group);

  std::size_t label_bytes_;
  NodeId max_nodes_;
  std::uint64_t seed_;
  Array<std::uint8_t> labels_;
  Array<NodeId> parent_;  // kNoNode: the node is free
  Array<Node> nodes_;
  Array<Moment> needed_;
  Array<std::uint32_t> tags_;  // of those in the table
  Array<Digest> digests_;
  Array<std::uint8_t> has_digest_;
  Array<Entry> table_;
  std::uint32_t mask_;
  Array<NodeId> free_;  // a stack; leaves are erased tail first, so what is popped runs upwards again
  std::size_t free_count_;

  std::vector<Root> roots_;
  std::vector<std::uint32_t> free_roots_;
  std::unordered_map<NodeId, std::uint32_t> root_index_;
  std::unordered_map<std::string, std::uint32_t> root_by_key_;
  std::uint32_t root_serial_ = 0;
  std::uint64_t root_clock_ = 0;
};

}  // namespace kvtier
