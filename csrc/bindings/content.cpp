#include "content/content.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <tuple>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "bindings/tokens.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

bool append(Content& self, nb::handle tokens) {
  std::vector<std::uint32_t> ids;
  if (!plain_ids(tokens, &ids)) return false;
  self.append(ids);
  return true;
}

void extend(Content& self, const ArrayIn<std::uint32_t, 1>& tokens,
            const std::vector<std::tuple<std::int64_t, std::uint64_t, nb::bytes>>& media) {
  std::vector<MediaSpan> spans;
  for (const auto& [start, length, digest] : media) {
    MediaSpan span{start, length, {}};
    if (digest.size() != span.digest.size())
      throw std::invalid_argument("media: a digest of " + std::to_string(digest.size()) + " bytes given; it has 32");
    std::memcpy(span.digest.data(), digest.c_str(), span.digest.size());
    spans.push_back(span);
  }
  self.append(tokens.span(), spans);
}

ArrayOut<std::uint32_t> labels(const Content& self, std::size_t first, std::size_t last, std::size_t block_size) {
  self.require_whole(first, last, block_size);  // before there is memory for them
  const std::size_t words = Content::label_bytes(block_size) / sizeof(std::uint32_t);
  const std::size_t blocks = last - first;
  std::vector<std::uint32_t> out(blocks * words);
  self.labels(first, last, block_size, reinterpret_cast<std::uint8_t*>(out.data()));
  return array_of<std::uint32_t, 2>(out.data(), {blocks, words});
}

}  // namespace

void bind_content(nb::module_& m) {
  nb::class_<Content>(m, "Content", "Tokens and the media among them. Use kvtier.content.Content.")
      .def(nb::init<>())
      .def("append", &append, nb::arg("tokens").none(),
           "Add a list of plain ints that are all token ids. False: it is none, and nothing was changed.")
      .def("extend", &extend, nb::arg("tokens"), nb::arg("media"))
      .def("labels", &labels, nb::arg("first"), nb::arg("last"), nb::arg("block_size"))
      .def("__len__", &Content::size);
}

}  // namespace kvtier
