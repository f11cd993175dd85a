// How a request enters: what the catalog has of its content is found for it, then it is given its slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include "requests/growing.hpp"

namespace kvtier {

// Leases to the request the cached prefix of its content in this namespace, of at most `limit` blocks, the last token
// never in it. Where the catalog can tell no more namespaces apart nothing is found, and nobody may have its blocks.
// Throws std::invalid_argument for a catalog whose labels are not of content.
Match find(Catalog& catalog, const Digest& space, std::uint64_t generation, Growing& growing, std::size_t limit);

// Gives a request of which nothing is cached its first slots, all of them private. False: there is no room, and nothing
// was changed.
bool give_first(Catalog& catalog, Tier tier, Growing& growing, std::size_t blocks);

}  // namespace kvtier
