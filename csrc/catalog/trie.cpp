#include "catalog/trie.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

namespace kvtier {
namespace {

// How far ahead of the comparison a chain's labels are fetched: a few lines hide a miss, many would only evict others.
constexpr std::size_t kLabelsAhead = 8;
constexpr std::size_t kBucketsAhead = 16;

std::uint64_t load64(const std::uint8_t* p) {
  std::uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// Of `bytes`, or where that is known at compile time of kBytes.
template <std::size_t kBytes>
bool equal(const std::uint8_t* a, const std::uint8_t* b, std::size_t bytes) {
  if constexpr (kBytes == 0) return std::memcmp(a, b, bytes) == 0;
  using Lane [[gnu::vector_size(16)]] = std::uint64_t;
  Lane difference{};
  for (std::size_t i = 0; i < kBytes; i += sizeof(Lane)) {
    Lane x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    difference |= x ^ y;
  }
  return (difference[0] | difference[1]) == 0;
}

}  // namespace

Moment moment_of(double seconds) {
  constexpr double kLast = 4294967295.0;
  return seconds > 0 ? static_cast<Moment>(std::min(std::ceil(seconds * 16), kLast)) : 0;
}

Trie::Trie(std::size_t label_bytes, NodeId max_nodes)
    : label_bytes_(label_bytes),
      max_nodes_(max_nodes),
      labels_(label_bytes * max_nodes),
      parent_(max_nodes),
      nodes_(max_nodes),
      needed_(max_nodes),
      tags_(max_nodes),
      digests_(max_nodes),
      has_digest_(max_nodes),
      table_(std::bit_ceil(std::max<std::size_t>(2 * static_cast<std::size_t>(max_nodes), 16))),
      mask_(static_cast<std::uint32_t>(table_.size() - 1)),
      free_(max_nodes),
      free_count_(max_nodes) {
  // A secret seed, so that nobody can choose prompts that collide. It changes where entries lie, never an answer.
  std::random_device device;
  seed_ = (static_cast<std::uint64_t>(device()) << 32) | device();
  std::fill_n(parent_.data(), max_nodes, kNoNode);
  for (NodeId i = 0; i < max_nodes; ++i) free_[i] = max_nodes - 1 - i;
}

std::size_t Trie::memory_bytes() const {
  return labels_.bytes() + parent_.bytes() + nodes_.bytes() + needed_.bytes() + tags_.bytes() + digests_.bytes() +
         has_digest_.bytes() + table_.bytes() + free_.bytes();
}

std::uint32_t Trie::hash(NodeId parent, const std::uint8_t* label) const {
  std::uint64_t h = mix(seed_ ^ parent, 0x9E3779B97F4A7C15ull);
  std::size_t at = 0;
  for (; at + 16 <= label_bytes_; at += 16)
    h = mix(load64(label + at) ^ 0xA0761D6478BD642Full ^ h, load64(label + at + 8) ^ seed_);
  for (; at < label_bytes_; at += 4) {
    std::uint32_t word;
    std::memcpy(&word, label + at, 4);
    h = mix(h ^ word, 0xE7037ED1A0B428DBull ^ seed_);
  }
  return static_cast<std::uint32_t>(h ^ (h >> 32));
}

bool Trie::same_label(NodeId node, const std::uint8_t* label) const {
  return std::memcmp(this->label(node), label, label_bytes_) == 0;
}

NodeId Trie::probe(NodeId parent, const std::uint8_t* label) const {
  const std::uint32_t tag = hash(parent, label);
  for (std::uint32_t at = tag & mask_;; at = (at + 1) & mask_) {
    const Entry entry = table_[at];
    if (entry.node == 0) return kNoNode;
    const NodeId node = entry.node - 1;
    if (entry.tag == tag && parent_[node] == parent && same_label(node, label)) return node;
  }
}

template <std::size_t kBytes>
std::size_t Trie::walk_as(NodeId parent, const std::uint8_t* labels, std::size_t count, NodeId* out) const {
  const NodeId* const parents = parent_.data();
  const std::uint8_t* const stored = labels_.data();
  const NodeId end = max_nodes_;
  const std::size_t bytes = kBytes == 0 ? label_bytes_ : kBytes;
  std::size_t found = 0;
  for (; found < count; ++found, labels += bytes) {
    NodeId next = parent + 1;  // of a root: never a node
    if (next < end && parents[next] == parent && equal<kBytes>(stored + next * bytes, labels, bytes)) {
      prefetch_label(stored + next * bytes, kLabelsAhead);
    } else {
      next = probe(parent, labels);
      if (next == kNoNode) break;
      for (std::size_t i = 1; i <= kLabelsAhead; ++i) prefetch_label(stored + next * bytes, i);
    }
    prefetch_label(labels, kLabelsAhead);
    out[found] = parent = next;
  }
  return found;
}

std::size_t Trie::walk(NodeId parent, const std::uint8_t* labels, std::size_t count, NodeId* out) const {
  if (label_bytes_ == 96) return walk_as<96>(parent, labels, count, out);  // 16 tokens and a media digest
  if (label_bytes_ == 32) return walk_as<32>(parent, labels, count, out);  // a hash
  return walk_as<0>(parent, labels, count, out);
}

std::size_t Trie::create(NodeId parent, const std::uint8_t* labels, std::size_t count, NodeId* out) {
  count = std::min(count, free_count_);
  if (count == 0) return 0;
  const std::uint32_t root = is_root(parent) ? root_index_.at(parent) : nodes_[parent].root;
  std::uint32_t position = is_root(parent) ? 0 : nodes_[parent].position + 1;
  // A new node has no children yet, so from the first new block on all are new and their parents are known in advance:
  // buckets can be fetched ahead, of those that need one.
  const NodeId first_parent = parent;
  const NodeId* ids = free_.data() + free_count_ - 1;  // downwards
  auto prepare = [&](std::size_t i) {
    const NodeId node = *(ids - i);
    const NodeId above = i == 0 ? first_parent : *(ids - i + 1);
    if (above + 1 == node) return;
    tags_[node] = hash(above, labels + i * label_bytes_);
    __builtin_prefetch(&table_[tags_[node] & mask_], 1);
  };
  for (std::size_t i = 0; i < std::min(count, kBucketsAhead); ++i) prepare(i);
  ++children_of(parent);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kBucketsAhead < count) prepare(i + kBucketsAhead);
    const NodeId node = *(ids - i);
    parent_[node] = parent;
    nodes_[node] = {.children = i + 1 < count ? 1u : 0u, .holds = 0, .position = position++, .root = root};
    has_digest_[node] = 0;
    if (needed_[node] != 0) needed_[node] = 0;  // memory of it is touched where there are hints only
    std::uint8_t* const label = labels_.data() + node * label_bytes_;
    label_bytes_ == 96 ? std::memcpy(label, labels + i * 96, 96)
                       : std::memcpy(label, labels + i * label_bytes_, label_bytes_);
    if (tabled(node)) table_insert(tags_[node], node);
    out[i] = parent = node;
  }
  free_count_ -= count;
  return count;
}

void Trie::erase(NodeId node) {
  if (tabled(node)) table_erase(tags_[node], node);
  const NodeId parent = parent_[node];
  parent_[node] = kNoNode;
  free_[free_count_++] = node;
  if (--children_of(parent) == 0 && is_root(parent)) {
    const std::uint32_t index = root_index_.at(parent);
    if (roots_[index].detached) forget_root(index);
  }
}

void Trie::table_insert(std::uint32_t tag, NodeId node) {
  std::uint32_t at = tag & mask_;
  while (table_[at].node != 0) at = (at + 1) & mask_;
  table_[at] = {tag, node + 1};
}

void Trie::table_erase(std::uint32_t tag, NodeId node) {
  std::uint32_t hole = tag & mask_;
  while (table_[hole].node != node + 1) hole = (hole + 1) & mask_;
  // Close the gap: no tombstones, so a table that has churned for months probes as shortly as a new one.
  for (std::uint32_t at = (hole + 1) & mask_; table_[at].node != 0; at = (at + 1) & mask_) {
    const std::uint32_t home = table_[at].tag & mask_;
    if (((at - home) & mask_) >= ((at - hole) & mask_)) {
      table_[hole] = table_[at];
      hole = at;
    }
  }
  table_[hole] = {0, 0};
}

std::uint32_t& Trie::children_of(NodeId id) {
  return is_root(id) ? roots_[root_index_.at(id)].children : nodes_[id].children;
}

std::string Trie::check() const {
  std::vector<std::uint32_t> children(max_nodes_, 0);
  std::unordered_map<NodeId, std::uint32_t> root_children;
  std::size_t alive_nodes = 0, in_table = 0, entries = 0;
  for (NodeId node = 0; node < max_nodes_; ++node) {
    if (!alive(node)) continue;
    ++alive_nodes;
    const std::string name = "node " + std::to_string(node);
    const NodeId above = parent_[node];
    if (!is_root(above) && !alive(above)) return name + " has a dead parent";
    if (is_root(above) && !root_index_.contains(above)) return name + " hangs from an unknown root";
    const std::uint32_t index = is_root(above) ? root_index_.at(above) : nodes_[above].root;
    if (nodes_[node].root != index) return name + " names another root than its parent does";
    if (nodes_[node].position != (is_root(above) ? 0 : nodes_[above].position + 1))
      return name + " has a wrong position";
    in_table += tabled(node);
    if (tabled(node) && tags_[node] != hash(above, label(node))) return name + " has a wrong hash";
    NodeId found;
    if (walk(above, label(node), 1, &found) == 0 || found != node)
      return name + " is not found under its parent and label";
    if (!tabled(node) && probe(above, label(node)) != kNoNode) return name + " is there twice";
    ++(is_root(above) ? root_children[above] : children[above]);
  }
  for (NodeId node = 0; node < max_nodes_; ++node)
    if (alive(node) && children[node] != nodes_[node].children)
      return "node " + std::to_string(node) + " miscounts its children";
  for (const auto& [id, index] : root_index_) {
    if (roots_[index].id != id) return "a root is filed under another id";
    if (roots_[index].children != root_children[id]) return "root " + std::to_string(id) + " miscounts its children";
    if (roots_[index].detached && roots_[index].children == 0) return "an empty detached root lingers";
    if (!roots_[index].detached && find_root(roots_[index].space, roots_[index].group) != id)
      return "a root is not found under its namespace";
  }
  for (std::size_t at = 0; at < table_.size(); ++at) entries += table_[at].node != 0;
  if (entries != in_table)
    return "the table holds " + std::to_string(entries) + " entries for " + std::to_string(in_table) + " nodes";
  if (alive_nodes + free_count_ != max_nodes_) return "nodes in use and free do not add up";
  std::vector<bool> seen(max_nodes_, false);
  for (std::size_t i = 0; i < free_count_; ++i) {
    if (alive(free_[i]) || seen[free_[i]]) return "node " + std::to_string(free_[i]) + " is free twice or in use";
    seen[free_[i]] = true;
  }
  return {};
}

}  // namespace kvtier
