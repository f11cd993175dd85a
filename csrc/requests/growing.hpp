// What grows as a request runs, its tokens and the slots of its blocks, and a step of a batch of them.
//
//   tokens    |<---------- computed by the pass ---------->|<- made ->|
//   table     |<-------------------- slots --------------------------->|   for all of them, where there is room
#pragma once

#include <cstddef>
#include <cstdint>
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
  std::size_t noted = 0;  // of its blocks that are computed, those that somebody was told of
};

// One request's part of a step: what it is to say, then what came of it.
struct Advance {
  Growing* growing = nullptr;
  std::span<const std::uint32_t> made;

  std::size_t had = 0;      // tokens
  std::size_t grown = 0;    // slots at the end of its table that are new
  bool lacks_room = false;  // it needed some, and got none
  bool completed = false;   // blocks, up to growing->noted
};

// A pass has computed the tokens that each had, and made more: adds these, then takes the slots that they need, then
// notes the blocks that are full.
class Step {
 public:
  Step(Catalog& catalog, Tier tier, std::size_t block_size) : catalog_(catalog), tier_(tier), block_(block_size) {}

  std::string wrong_with(const Advance& part) const;  // empty, or why it cannot be
  void run(std::span<Advance> parts);

 private:
  std::size_t blocks(std::size_t tokens) const { return (tokens + block_ - 1) / block_; }

  Catalog& catalog_;
  Tier tier_;
  std::size_t block_;
};

}  // namespace kvtier
