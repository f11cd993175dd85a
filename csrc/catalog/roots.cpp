// The trie's roots, one per namespace and group, and what hangs from them by name: digests and identities.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "catalog/trie.hpp"
#include "common/sha256.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kMaxRoots = 65536;

}  // namespace

std::string Trie::root_key(const Digest& space, std::uint32_t group) {
  std::string key(reinterpret_cast<const char*>(space.data()), space.size());
  key.append(reinterpret_cast<const char*>(&group), sizeof group);
  return key;
}

NodeId Trie::find_root(const Digest& space, std::uint32_t group) const {
  const auto found = root_by_key_.find(root_key(space, group));
  return found == root_by_key_.end() ? kNoNode : roots_[found->second].id;
}

const Root& Trie::root_of(NodeId root_id) const {
  const auto found = root_index_.find(root_id);
  if (found == root_index_.end())
    throw std::invalid_argument("root: " + std::to_string(root_id) +
                                " is not a root of this catalog; ask root() for one");
  return roots_[found->second];
}

NodeId Trie::root(const Digest& space, std::uint32_t group, std::uint64_t generation) {
  const auto found = root_by_key_.find(root_key(space, group));
  const std::uint32_t index = found != root_by_key_.end() ? found->second : new_root(space, group, generation);
  roots_[index].used = ++root_clock_;
  return roots_[index].id;
}

bool Trie::has_room_for_root() const {
  return root_index_.size() < kMaxRoots ||
         std::any_of(
             roots_.begin(), roots_.end(), [](const Root& root) { return root.id != kNoNode && root.children == 0; });
}

// Half of the empty ones go at once, those not asked for longest, so that the scan is paid for by as many new
// namespaces.
void Trie::forget_empty_roots() {
  std::vector<std::uint32_t> empty;
  for (std::uint32_t i = 0; i < roots_.size(); ++i)
    if (roots_[i].id != kNoNode && roots_[i].children == 0) empty.push_back(i);
  if (empty.empty())
    throw std::overflow_error("space: no room for another namespace; " + std::to_string(kMaxRoots) +
                              " hold pages already");
  const auto middle = empty.begin() + static_cast<std::ptrdiff_t>((empty.size() - 1) / 2);
  std::nth_element(empty.begin(), middle, empty.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return roots_[a].used < roots_[b].used; });
  std::for_each(empty.begin(), middle + 1, [&](std::uint32_t index) { forget_root(index); });
}

std::uint32_t Trie::new_root(const Digest& space, std::uint32_t group, std::uint64_t generation) {
  if (root_index_.size() >= kMaxRoots) forget_empty_roots();
  if (root_serial_ + 1 >= kRootBit - 1) throw std::invalid_argument("space: root ids are used up; make a new catalog");
  std::uint32_t index;
  if (free_roots_.empty()) {
    index = static_cast<std::uint32_t>(roots_.size());
    roots_.emplace_back();
  } else {
    index = free_roots_.back();
    free_roots_.pop_back();
  }
  Root& root = roots_[index];
  root = {.id = kRootBit | ++root_serial_, .space = space, .generation = generation, .group = group};
  Sha256()
      .add("kvtier.root.v1", 14)
      .add(space.data(), space.size())
      .add(&group, sizeof group)
      .finish(root.digest.data());
  root_index_[root.id] = index;
  root_by_key_[root_key(space, group)] = index;
  return index;
}

void Trie::forget_root(std::uint32_t index) {
  Root& root = roots_[index];
  root_index_.erase(root.id);
  if (!root.detached) root_by_key_.erase(root_key(root.space, root.group));
  root = Root{};
  free_roots_.push_back(index);
}

std::vector<NodeId> Trie::root_ids(const Digest* space) const {
  std::vector<NodeId> ids;
  for (const Root& root : roots_)
    if (root.id != kNoNode && !root.detached && (space == nullptr || root.space == *space)) ids.push_back(root.id);
  return ids;
}

std::vector<NodeId> Trie::detach(NodeId root_id, std::uint64_t generation) {
  const std::uint32_t old = root_index_.at(root_id);
  std::vector<NodeId> members;
  if (roots_[old].children == 0) {
    roots_[old].generation = generation;
    return members;
  }
  // The old tree moves to an id that nobody can ask for; a new, empty one takes over the id that callers hold.
  const Root before = roots_[old];
  if (free_roots_.empty()) {
    free_roots_.push_back(static_cast<std::uint32_t>(roots_.size()));
    roots_.emplace_back();
  }
  const std::uint32_t fresh = free_roots_.back();
  free_roots_.pop_back();
  roots_[fresh] = before;
  roots_[fresh].generation = generation;
  roots_[fresh].children = 0;
  root_index_[root_id] = fresh;
  root_by_key_[root_key(before.space, before.group)] = fresh;
  Root& left = roots_[old];
  left.id = kRootBit | ++root_serial_;
  left.detached = true;
  root_index_[left.id] = old;
  for (NodeId node = 0; node < max_nodes_; ++node) {
    if (!alive(node) || nodes_[node].root != old) continue;
    members.push_back(node);
    if (parent_[node] != root_id) continue;
    table_erase(tags_[node], node);
    parent_[node] = left.id;
    tags_[node] = hash(left.id, label(node));
    table_insert(tags_[node], node);
  }
  return members;
}

const std::uint8_t* Trie::digest(NodeId node) {
  if (has_digest_[node] != 0) return digests_[node].data();
  // Ancestors first; positions bound the walk, so no recursion and no list of what is to do are needed.
  const std::uint32_t last = nodes_[node].position;
  NodeId top = node;
  while (!is_root(parent_[top]) && has_digest_[parent_[top]] == 0) top = parent_[top];
  const std::uint32_t missing = last - nodes_[top].position + 1;
  std::vector<NodeId> path(missing);
  NodeId at = node;
  for (std::uint32_t i = missing; i-- > 0; at = parent_[at]) path[i] = at;
  for (const NodeId next : path) {
    const NodeId above = parent_[next];
    const std::uint8_t* parent = is_root(above) ? root_of_node(next).digest.data() : digests_[above].data();
    Sha256().add(parent, kDigestBytes).add(label(next), label_bytes_).finish(digests_[next].data());
    has_digest_[next] = 1;
  }
  return digests_[node].data();
}

void Trie::identity(NodeId node, std::uint8_t* out) {
  const Root& root = root_of_node(node);
  PageIdentity head{};
  std::memcpy(head.digest, digest(node), kDigestBytes);
  const NodeId above = parent_[node];
  std::memcpy(head.parent, is_root(above) ? root.digest.data() : digests_[above].data(), kDigestBytes);
  std::memcpy(head.space, root.space.data(), kDigestBytes);
  head.generation = root.generation;
  head.group = root.group;
  head.position = nodes_[node].position;
  std::memcpy(out, &head, kIdentityHead);
  std::memset(out + kIdentityHead, 0, identity_bytes(label_bytes_) - kIdentityHead);
  std::memcpy(out + kIdentityHead, label(node), label_bytes_);
}

}  // namespace kvtier
