// What grows as a request runs, its tokens, the slots of its blocks and their nodes; a step of a batch of them, and the
// blocks that some of them have computed.
//
//   tokens    |<---------- computed by the pass ---------->|<- made ->|
//   nodes     |<- cached ->|                                              in the catalog
//   table     |<-------------------- slots --------------------------->|   for all of them, where there is room
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "catalog/catalog.hpp"
#include "content/content.hpp"

namespace kvtier {

struct Growing {
  Growing(Content& its_content, RequestId its_request) : content(its_content), request(its_request) {}

  Content& content;  // outlives this
  RequestId request;
  std::vector<Slot> table;
  std::size_t noted = 0;       // of its blocks that are computed, those that somebody knows of
  std::size_t cached = 0;      // of its blocks, from the first, those that were offered to the catalog
  std::optional<NodeId> leaf;  // the last of their nodes, if the catalog kept any
  std::vector<NodeId> later;   // nodes that nobody has asked for yet
  bool cacheable = true;       // others may have its blocks

  // Has the processor bring what a step reads of it, so that those of a batch are waited for together.
  void fetch() const {
    __builtin_prefetch(&content);
    __builtin_prefetch(&table);
    __builtin_prefetch(&later);
  }
  void joined(std::span<const NodeId> nodes) {  // these are the next ones
    cached += nodes.size();
    if (!nodes.empty()) leaf = nodes.back();
    later.insert(later.end(), nodes.begin(), nodes.end());
  }
};

// Blocks of a request that are computed and in its slots, up to a number of them; below `root` where none is cached.
struct Computed {
  Growing* growing = nullptr;
  std::size_t blocks = 0;
  std::optional<NodeId> root;
};

// Offers the catalog, whose labels are of content, the blocks of these that it was not offered yet; returns the nodes
// whose pages are new in the tier. What it has no room for, or no such root any more, is not cached and not noted
// either. Throws std::invalid_argument, and none is offered, for one that has not so many slots or whole blocks.
std::vector<NodeId> extend(Catalog& catalog, Tier tier, std::span<const Computed> computed);

// One request's part of a step: what it is to say, then what came of it.
struct Advance {
  Growing* growing = nullptr;
  std::span<const std::uint32_t> made;

  std::size_t had = 0;        // tokens
  std::size_t grown = 0;      // slots at the end of its table that are new
  bool lacks_room = false;    // it needed some, and got none
  std::size_t completed = 0;  // blocks that were neither noted nor cached, up to growing->noted
};

// A pass has computed the tokens that each had, and made more: takes the slots that these need, then adds them, then
// notes the blocks that are full. Where the first throws, nothing has changed.
class Step {
 public:
  Step(Catalog& catalog, Tier tier, std::size_t block_size) : catalog_(catalog), tier_(tier), block_(block_size) {}

  std::string wrong_with(const Advance& part) const;  // empty, or why it cannot be
  void run(std::span<Advance> parts);

 private:
  void take(Advance& part);
  void give_back(Advance& part);
  std::size_t blocks(std::size_t tokens) const { return (tokens + block_ - 1) / block_; }

  Catalog& catalog_;
  Tier tier_;
  std::size_t block_;
};

}  // namespace kvtier
