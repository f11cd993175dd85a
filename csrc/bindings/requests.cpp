#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "bindings/tokens.hpp"
#include "requests/entering.hpp"
#include "requests/growing.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

// The requests that decode, by id.
struct Decoding {
  Decoding(Catalog& its_catalog, Tier its_tier, std::size_t its_block_size)
      : catalog(its_catalog), tier(its_tier), block_size(its_block_size) {}

  Catalog& catalog;
  Tier tier;
  std::size_t block_size;
  nb::dict growing;  // each a Growing
};

// What some of them have made, by id: a token id or a list of them for each.
struct Batch {
  std::vector<Advance> parts;
  std::vector<nb::object> held;  // of each its name and its Growing: any new object may have Python collect others
  std::vector<std::uint32_t> ids;

  nb::handle name(std::size_t part) const { return held[2 * part]; }

  // False for anything but plain ids of requests that there are.
  bool read(const nb::dict& requests, nb::handle tokens) {
    if (!PyDict_CheckExact(tokens.ptr())) return false;
    const auto size = static_cast<std::size_t>(PyDict_GET_SIZE(tokens.ptr()));
    std::vector<std::size_t> counts;
    parts.reserve(size), held.reserve(2 * size), ids.reserve(size), counts.reserve(size);
    PyObject *name = nullptr, *made = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(tokens.ptr(), &at, &name, &made) != 0;) {
      PyObject* const known = PyUnicode_CheckExact(name) ? PyDict_GetItemWithError(requests.ptr(), name) : nullptr;
      if (known == nullptr) return false;
      const std::size_t before = ids.size();
      std::uint32_t id = 0;
      if (plain_id(made, &id)) {
        ids.push_back(id);
      } else if (!plain_ids(made, &ids)) {
        return false;
      }
      parts.emplace_back().growing = nb::inst_ptr<Growing>(known);
      parts.back().growing->fetch();
      held.push_back(nb::borrow(name));
      held.push_back(nb::borrow(known));
      counts.push_back(ids.size() - before);
    }
    for (const Advance& part : parts) part.growing->content.fetch_end();
    std::size_t first = 0;
    for (std::size_t i = 0; i < parts.size(); first += counts[i++])
      parts[i].made = std::span(ids).subspan(first, counts[i]);
    return true;
  }
};

void check(const Batch& batch, const Step& step) {
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    const std::string why = step.wrong_with(batch.parts[i]);
    if (!why.empty())
      throw std::invalid_argument("tokens[" + std::string(nb::repr(batch.name(i)).c_str()) + "]: " + why);
  }
}

nb::object advance(const Decoding& self, nb::handle tokens) {
  Batch batch;
  if (!batch.read(self.growing, tokens)) return nb::none();
  Step step(self.catalog, self.tier, self.block_size);
  check(batch, step);
  step.run(batch.parts);
  nb::dict grown;
  nb::list completed;
  std::size_t blocks = 0;
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    const Advance& part = batch.parts[i];
    const nb::handle name = batch.name(i);
    if (part.lacks_room) grown[name] = nb::none();
    if (part.grown != 0) {
      const std::vector<Slot>& table = part.growing->table;
      grown[name] = nb::cast(std::vector<Slot>(table.end() - static_cast<std::ptrdiff_t>(part.grown), table.end()));
    }
    if (part.completed != 0) completed.append(name);
    blocks += part.completed;
  }
  return nb::make_tuple(grown, completed, blocks);
}

Growing& made(const nb::handle_t<Growing>& growing) {
  if (!nb::inst_ready(growing)) throw nb::type_error("growing: it was never made; accepted: a Growing that was");
  return *nb::inst_ptr<Growing>(growing);
}

void put(Growing& self, std::size_t first, const ArrayIn<Slot, 1>& slots) {
  if (first > self.table.size()) throw std::invalid_argument("first: it is behind the table's end");
  self.table.resize(std::max(self.table.size(), first + slots.size()));
  std::copy_n(slots.data(), slots.size(), self.table.begin() + static_cast<std::ptrdiff_t>(first));
}

bool lengthen(Growing& self, Catalog& catalog, Tier tier, std::size_t n) {
  const std::vector<Slot> slots = catalog.take(tier, n, self.request);
  self.table.insert(self.table.end(), slots.begin(), slots.end());
  return slots.size() == n;
}

}  // namespace

void bind_requests(nb::module_& m) {
  nb::class_<Growing>(m, "Growing", "What grows as a request runs. See kvtier.sequence.Sequence.")
      .def(
          "__init__",
          [](Growing* self, Content& content, RequestId request) {
            if (request < 1) throw std::invalid_argument("request: 0 names no request; accepted: 1 or more");
            new (self) Growing(content, request);
          },
          nb::arg("content"), nb::arg("request"), nb::keep_alive<1, 2>())
      .def_rw("noted", &Growing::noted, "Of its blocks that are computed, those that somebody knows of.")
      .def("__len__", [](const Growing& self) { return self.table.size(); })
      .def(
          "slots", [](const Growing& self) { return array_of<Slot, 1>(self.table.data(), {self.table.size()}); },
          "A copy of its block table.")
      .def("put", &put, nb::arg("first"), nb::arg("slots"), "These are the slots of its blocks from `first` on.")
      .def_rw("cached", &Growing::cached, "Of its blocks, from the first, those that were offered to the catalog.")
      .def_rw("cacheable", &Growing::cacheable, "Whether others may have its blocks.")
      .def_prop_rw(
          "leaf", [](const Growing& self) { return self.leaf; },
          [](Growing& self, std::optional<NodeId> leaf) { self.leaf = leaf, self.later.clear(); },
          nb::for_setter(nb::arg("leaf").none()),
          "The last of their nodes; None: there is none. Once it is set, all before it are known.")
      .def(
          "joined", [](Growing& self, const std::vector<NodeId>& nodes) { self.joined(nodes); }, nb::arg("nodes"),
          "These are the nodes of its next blocks.")
      .def(
          "take_later", [](Growing& self) { return std::exchange(self.later, {}); },
          "The nodes behind those that are known; they are then.")
      .def("clear", [](Growing& self) { self.table.clear(), self.noted = 0; })
      .def("lengthen", &lengthen, nb::arg("catalog"), nb::arg("tier"), nb::arg("n"),
           "Take so many slots more; False: there is no room, and nothing was changed.");
  nb::class_<Decoding>(m, "Decoding", "The requests that decode. See kvtier.decoding.")
      .def(
          "__init__",
          [](Decoding* self, Catalog& catalog, Tier tier, std::size_t block_size) {
            if (block_size < 1) throw std::invalid_argument("block_size: 0; accepted: 1 or more");
            new (self) Decoding(catalog, tier, block_size);
          },
          nb::arg("catalog"), nb::arg("tier"), nb::arg("block_size"), nb::keep_alive<1, 2>())
      .def(
          "begin",
          [](Decoding& self, const nb::str& request, const nb::handle_t<Growing>& growing) {
            made(growing);
            self.growing[request] = growing;
          },
          nb::arg("request"), nb::arg("growing"))
      .def(
          "enter",
          [](Decoding& self, const nb::str& request, const nb::handle_t<Growing>& growing, std::size_t blocks) {
            if (!give_first(self.catalog, self.tier, made(growing), blocks)) return false;
            self.growing[request] = growing;
            return true;
          },
          nb::arg("request"), nb::arg("growing"), nb::arg("blocks"),
          "Begin one of which nothing is cached, with so many slots; False: there is no room, and nothing has changed.")
      .def(
          "forget",
          [](Decoding& self, const nb::str& request) {
            if (self.growing.contains(request)) nb::del(self.growing[request]);
          },
          nb::arg("request"))
      .def("clear", [](Decoding& self) { self.growing.clear(); })
      .def("advance", &advance, nb::arg("tokens").none(),
           nb::sig("def advance(self, tokens: object) -> tuple[dict[str, list[int] | None], list[str], int] | None"),
           "The slots by which tables grew, None where there was no room; who has full blocks by it, and how many in "
           "all. None: `tokens` is no dict of plain token ids, one or a list of them, by requests that have begun.");
}

}  // namespace kvtier
