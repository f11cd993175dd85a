#include "catalog/catalog.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "common/sha256.hpp"
#include "content/content.hpp"
#include "requests/entering.hpp"
#include "requests/growing.hpp"
#include "requests/labels.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

template <class T>
using In = ArrayIn<T, 1>;
using Bytes2d = ArrayIn<std::uint8_t, 2>;

template <class T>
std::span<const T> view(const In<T>& array) {
  return array.span();
}

template <class T>
ArrayOut<T> give(const std::vector<T>& values) {
  return array_of<T, 1>(values.data(), {values.size()});
}

template <class T>
ArrayOut<T> give(const std::vector<T>& values, std::size_t rows, std::size_t columns) {
  return array_of<T, 2>(values.data(), {rows, columns});
}

using GivenMatch =
    std::tuple<std::uint32_t, ArrayOut<NodeId>, ArrayOut<std::uint8_t>, ArrayOut<Slot>, ArrayOut<Ticket>>;

GivenMatch give(const Match& match) {
  return {match.hit, give(match.nodes), give(match.tiers), give(match.slots), give(match.filling)};
}

ArrayOut<bool> give_flags(const std::vector<bool>& values) {
  const auto flags = std::make_unique<bool[]>(values.size());
  std::copy(values.begin(), values.end(), flags.get());
  return array_of<bool, 1>(flags.get(), {values.size()});
}

Digest digest_of(const nb::bytes& space) {
  if (space.size() != kDigestBytes)
    throw std::invalid_argument("space: " + std::to_string(space.size()) + " bytes given; a fingerprint has 32");
  Digest digest;
  std::memcpy(digest.data(), space.c_str(), digest.size());
  return digest;
}

std::vector<TierSpec> tier_specs(const std::vector<std::tuple<int, std::uint32_t, std::string, bool>>& tiers) {
  std::vector<TierSpec> specs;
  for (const auto& [tier, slots, policy, keeps_last] : tiers) {
    if (tier < 0 || tier >= kTiers) throw std::invalid_argument("tiers: unknown tier " + std::to_string(tier));
    specs.push_back({static_cast<Tier>(tier), slots, policy, keeps_last});
  }
  return specs;
}

ArrayOut<std::uint8_t> identities_of(Catalog& catalog, std::span<const NodeId> nodes) {
  const std::size_t bytes = identity_bytes(catalog.label_bytes());
  std::vector<std::uint8_t> out(nodes.size() * bytes);
  catalog.identities(nodes, out.data());
  return give(out, nodes.size(), bytes);
}

nb::bytes sha256(const nb::bytes& data, bool portable) {
  std::uint8_t digest[kDigestBytes];
  Sha256 hash = portable ? Sha256::portable() : Sha256();
  hash.add(data.c_str(), data.size()).finish(digest);
  return nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest);
}

nb::typed<nb::dict, nb::str, int> stats_dict(const Catalog& catalog) {
  const CatalogStats stats = catalog.stats();
  nb::typed<nb::dict, nb::str, int> out;
  out["matches"] = stats.matches;
  out["blocks_asked"] = stats.blocks_asked;
  out["blocks_hit"] = stats.blocks_hit;
  out["settled_late"] = stats.settled_late;
  out["pages_lost"] = stats.pages_lost;
  out["nodes_pruned"] = stats.nodes_pruned;
  out["nodes"] = stats.nodes;
  out["max_nodes"] = stats.max_nodes;
  out["roots"] = stats.roots;
  out["leases"] = stats.leases;
  out["transfers"] = stats.transfers;
  return out;
}

void bind_request(nb::class_<Catalog>& c) {
  c.def(
      "match",
      [](Catalog& self, const std::vector<NodeId>& roots, In<std::uint8_t> labels, std::uint32_t start,
         RequestId request,
         std::uint64_t limit) { return give(self.match(roots, view(labels), start, request, limit)); },
      nb::arg("roots"), nb::arg("labels"), nb::arg("start"), nb::arg("request"), nb::arg("limit"));
  c.def(
      "find",
      [](Catalog& self, const nb::bytes& space, std::uint64_t generation, Growing& growing,
         std::optional<std::uint64_t> limit) -> std::optional<GivenMatch> {
        const Match match = find(self, digest_of(space), generation, growing, limit.value_or(SIZE_MAX));
        if (match.hit == 0)
          return std::nullopt;  // as it mostly is, and arrays take longer to make than it took to look
        return give(match);
      },
      nb::arg("space"), nb::arg("generation"), nb::arg("growing"), nb::arg("limit") = nb::none(),
      "As match, of a request's content in a namespace; None: there is nothing.");
  c.def(
      "peek",
      [](Catalog& self, const std::vector<NodeId>& roots, In<std::uint8_t> labels) {
        return self.peek(roots, view(labels));
      },
      nb::arg("roots"), nb::arg("labels"));
  c.def(
      "insert",
      [](Catalog& self, NodeId parent, In<std::uint8_t> labels, RequestId request) {
        return give(self.insert(parent, view(labels), request));
      },
      nb::arg("parent"), nb::arg("labels"), nb::arg("request"));
  c.def(
      "adopt",
      [](Catalog& self, Tier tier, In<NodeId> nodes, In<Slot> slots, RequestId request) {
        return give_flags(self.adopt(tier, view(nodes), view(slots), request));
      },
      nb::arg("tier"), nb::arg("nodes"), nb::arg("slots"), nb::arg("request"));
  c.def(
      "extend",
      [](Catalog& self, const std::vector<std::tuple<Growing*, std::size_t, std::optional<NodeId>>>& computed,
         Tier tier) {
        std::vector<Computed> parts;
        parts.reserve(computed.size());
        for (const auto& [growing, blocks, root] : computed) {
          if (growing == nullptr) throw nb::type_error("computed: None; accepted: (Growing, blocks, root)");
          parts.push_back({growing, blocks, root});
        }
        return extend(self, tier, parts);
      },
      nb::arg("computed"), nb::arg("tier"));
  c.def(
      "take",
      [](Catalog& self, Tier tier, std::size_t n, RequestId request) { return give(self.take(tier, n, request)); },
      nb::arg("tier"), nb::arg("n"), nb::arg("request"));
  c.def(
      "give_back",
      [](Catalog& self, Tier tier, In<Slot> slots, RequestId request) { self.give_back(tier, view(slots), request); },
      nb::arg("tier"), nb::arg("slots"), nb::arg("request"));
  c.def("narrow", &Catalog::narrow, nb::arg("request"), nb::arg("tier"));
  c.def("hold_in", &Catalog::hold_in, nb::arg("request"), nb::arg("tier"));
  c.def("release", &Catalog::release, nb::arg("request"));
  c.def("hand_over", &Catalog::hand_over, nb::arg("source"), nb::arg("into"));
}

void bind_exchange(nb::class_<Catalog>& c) {
  c.def(
      "reserve",
      [](Catalog& self, const std::vector<Tier>& path, In<NodeId> nodes, RequestId request, bool ahead, bool cold,
         double due) {
        Reservation r = self.reserve(path, view(nodes), request, ahead, cold, due);
        return std::make_tuple(r.ticket, r.count, give(r.slots, path.size(), r.count),
                               identities_of(self, view(nodes).first(r.count)));
      },
      nb::arg("path"), nb::arg("nodes"), nb::arg("request"), nb::arg("ahead"), nb::arg("cold"), nb::arg("due") = 0.0);
  c.def(
      "settle",
      [](Catalog& self, Ticket ticket, Bytes2d status) {
        return self.settle(ticket, {status.data(), status.size()}, status.shape(0), status.shape(1));
      },
      nb::arg("ticket"), nb::arg("status"));
  c.def("settle_whole", &Catalog::settle_whole, nb::arg("ticket"));
  c.def("cancel", &Catalog::cancel, nb::arg("ticket"));
}

void bind_upkeep(nb::class_<Catalog>& c) {
  c.def(
      "invalidate",
      [](Catalog& self, const std::optional<nb::bytes>& space, std::uint64_t generation) {
        if (!space) return self.invalidate(nullptr, generation);
        const Digest digest = digest_of(*space);
        return self.invalidate(&digest, generation);
      },
      nb::arg("space").none(), nb::arg("generation"));
  c.def(
      "drop", [](Catalog& self, Tier tier, In<NodeId> nodes) { return self.drop(tier, view(nodes)); }, nb::arg("tier"),
      nb::arg("nodes"));
  c.def(
      "drop_ahead", [](Catalog& self, Tier tier, In<NodeId> nodes) { return self.drop_ahead(tier, view(nodes)); },
      nb::arg("tier"), nb::arg("nodes"));
  c.def(
      "foresee",
      [](Catalog& self, NodeId root, const Content& content, std::size_t first, std::size_t last, Tier source,
         bool lost, RequestId request, double now, double due) {
        const Foreseen found = self.foresee(root, labels_of(self, content, 0, content.size() / block_size_of(self)),
                                            first, last, source, lost, request, now, due);
        return std::make_tuple(found.nodes, found.below);
      },
      nb::arg("root"), nb::arg("content"), nb::arg("first"), nb::arg("last"), nb::arg("source"), nb::arg("lost"),
      nb::arg("request"), nb::arg("now") = 0.0, nb::arg("due") = 0.0);
  c.def(
      "foresee",
      [](Catalog& self, NodeId root, In<std::uint8_t> labels, std::size_t first, std::size_t last, Tier source,
         bool lost, RequestId request, double now, double due) {
        const Foreseen found = self.foresee(root, view(labels), first, last, source, lost, request, now, due);
        return std::make_tuple(found.nodes, found.below);
      },
      nb::arg("root"), nb::arg("labels"), nb::arg("first"), nb::arg("last"), nb::arg("source"), nb::arg("lost"),
      nb::arg("request"), nb::arg("now") = 0.0, nb::arg("due") = 0.0);
  c.def(
      "need", [](Catalog& self, In<NodeId> nodes, double now, double due) { self.need(view(nodes), now, due); },
      nb::arg("nodes"), nb::arg("now"), nb::arg("due"));
  c.def(
      "cold", [](const Catalog& self, Tier tier, std::size_t n, Tier lower) { return give(self.cold(tier, n, lower)); },
      nb::arg("tier"), nb::arg("n"), nb::arg("lower"));
  c.def(
      "identities", [](Catalog& self, In<NodeId> nodes) { return identities_of(self, view(nodes)); }, nb::arg("nodes"));
  c.def(
      "lacking",
      [](const Catalog& self, In<NodeId> nodes, Tier source, Tier target) {
        return self.lacking(view(nodes), source, target);
      },
      nb::arg("nodes"), nb::arg("source"), nb::arg("target"));
  c.def(
      "count_ready",
      [](const Catalog& self, Tier tier, In<NodeId> nodes) { return self.count_ready(tier, view(nodes)); },
      nb::arg("tier"), nb::arg("nodes"));
  c.def(
      "restore",
      [](Catalog& self, Tier tier, In<Slot> slots, Bytes2d identities) {
        return give_flags(self.restore(tier, view(slots), identities.data(), identities.size()));
      },
      nb::arg("tier"), nb::arg("slots"), nb::arg("identities"));
  c.def(
      "state",
      [](const Catalog& self, In<NodeId> nodes) {
        std::vector<Slot> slots(nodes.size() * kTiers);
        std::vector<std::uint8_t> residency(nodes.size() * kTiers);
        self.state(view(nodes), slots.data(), residency.data());
        return std::make_tuple(give(slots, nodes.size(), kTiers), give(residency, nodes.size(), kTiers));
      },
      nb::arg("nodes"));
  c.def("evictable", &Catalog::evictable, nb::arg("tier"));
  c.def("has_room", &Catalog::has_room, nb::arg("tier"), nb::arg("n"), "Whether so many slots are free or evictable.");
  c.def(
      "usage",
      [](const Catalog& self, Tier tier) {
        const Usage u = self.usage(tier);
        return std::make_tuple(u.capacity, u.free, u.filling, u.ready, u.draining, u.privates, u.pinned, u.evictions,
                               u.dropped);
      },
      nb::arg("tier"));
  c.def(
      "contents",
      [](const Catalog& self, Tier tier) {
        Contents contents = self.contents(tier);
        return std::make_tuple(give(contents.slots), give(contents.nodes), give_flags(contents.ready));
      },
      nb::arg("tier"));
  c.def("stats", &stats_dict);
  c.def("check", &Catalog::check, "Empty, or the first broken promise found.");
  c.def_prop_ro("memory_bytes", &Catalog::memory_bytes);
}

}  // namespace

void bind_catalog(nb::module_& m) {
  nb::class_<Catalog> c(m, "Catalog", "See kvtier.catalog.Catalog, the typed face.");
  c.def(
      "__init__",
      [](Catalog* self, const std::vector<std::tuple<int, std::uint32_t, std::string, bool>>& tiers,
         std::size_t label_bytes, NodeId max_nodes) { new (self) Catalog(tier_specs(tiers), label_bytes, max_nodes); },
      nb::arg("tiers"), nb::arg("label_bytes"), nb::arg("max_nodes"));
  c.def(
      "root",
      [](Catalog& self, const nb::bytes& space, std::uint32_t group, std::uint64_t generation) {
        return self.root(digest_of(space), group, generation);
      },
      nb::arg("space"), nb::arg("group"), nb::arg("generation"));
  bind_request(c);
  bind_exchange(c);
  bind_upkeep(c);
  m.def("identity_bytes", &identity_bytes, nb::arg("label_bytes"), "Bytes of one page identity.");
  m.def("sha256", &sha256, nb::arg("data"), nb::arg("portable") = false, "SHA-256, for tests against another one.");
  m.def("sha256_accelerated", &Sha256::accelerated, "Whether SHA-256 runs on the processor's own instructions.");
}

}  // namespace kvtier
