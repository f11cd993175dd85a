#include "requests/labels.hpp"

#include <stdexcept>
#include <string>

namespace kvtier {

std::size_t block_size_of(const Catalog& catalog) {
  const std::size_t bytes = catalog.label_bytes();
  if (bytes <= kDigestBytes)
    throw std::invalid_argument("content: this catalog's labels of " + std::to_string(bytes) + " bytes are not of it");
  return (bytes - kDigestBytes) / sizeof(std::uint32_t);
}

std::vector<std::uint8_t> labels_of(const Catalog& catalog, const Content& content, std::size_t first,
                                    std::size_t last) {
  const std::size_t block_size = block_size_of(catalog);
  content.require_whole(first, last, block_size);
  std::vector<std::uint8_t> out((last - first) * catalog.label_bytes());
  content.labels(first, last, block_size, out.data());
  return out;
}

}  // namespace kvtier
