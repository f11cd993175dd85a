// What the blocks of a content are called in a catalog whose labels are of content.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "catalog/catalog.hpp"
#include "content/content.hpp"

namespace kvtier {

// Tokens of a block. Throws std::invalid_argument for a catalog whose labels are of something else.
std::size_t block_size_of(const Catalog& catalog);
// Labels of the content's blocks [first, last); throws std::invalid_argument unless they are there and whole.
std::vector<std::uint8_t> labels_of(const Catalog& catalog, const Content& content, std::size_t first,
                                    std::size_t last);

}  // namespace kvtier
