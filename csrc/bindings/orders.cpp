#include "orders/orders.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "bindings/completions.hpp"
#include "bindings/lanes.hpp"
#include "orders/traffic.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using Path = std::vector<Tier>;
using Nodes = ArrayIn<NodeId, 1>;

std::tuple<Ticket, std::size_t> load(Orders& self, const Path& path, const Nodes& nodes, RequestId request, bool ahead,
                                     int priority, double deadline_s, std::uintptr_t stream,
                                     const std::vector<std::size_t>& cuts, bool refuse) {
  Wish wish;
  wish.path = path;
  wish.nodes = nodes.span();
  wish.request = request;
  wish.ahead = ahead;
  wish.priority = priority_of(priority);
  wish.deadline = deadline_of(deadline_s);
  wish.cuts = cuts;
  wish.stream = stream;
  const Issued issued = self.issue(wish, refuse);
  return {issued.ticket, issued.count};
}

Ticket store(Orders& self, const Path& path, const Nodes& nodes, bool cold, int priority, std::uintptr_t stream,
             bool refuse) {
  if (path.size() != 2) throw std::invalid_argument("path: a store goes from one tier to the next");
  Wish wish;
  wish.path = path;
  wish.nodes = nodes.span();
  wish.cold = cold;
  wish.priority = priority_of(priority);
  wish.stream = stream;
  return self.store(wish, refuse);
}

nb::dict by_ticket(std::span<const Ended> ended) {
  nb::dict out;
  for (const Ended& one : ended) out[nb::int_(one.ticket)] = nb::bool_(one.whole);
  return out;
}

nb::dict settle(Orders& self, bool spill) {
  self.settle(spill);
  nb::dict out = by_ticket(self.traffic().ended());
  self.traffic().told();
  return out;
}

nb::tuple settle_told(Traffic& self, const nb::list& completions) {
  with_each(completions, [&](nb::handle told) { self.settle(completion_of(told)); });
  nb::tuple out =
      nb::make_tuple(by_ticket(self.ended()), std::vector<NodeId>(self.below().begin(), self.below().end()));
  self.told();
  return out;
}

nb::dict pages_moved(const Traffic& self) {
  nb::dict out;
  for (int i = 0; i < kLanes; ++i) {
    const auto lane = static_cast<Lane>(i);
    if (self.pages_moved(lane) != 0) out[lane_name(lane)] = self.pages_moved(lane);
  }
  return out;
}

nb::dict failures(const Traffic& self) {
  nb::dict out;
  for (int i = 0; i < kPageStatuses; ++i) {
    const auto status = static_cast<PageStatus>(i);
    if (self.failures(status) != 0) out[nb::cast(status)] = self.failures(status);
  }
  return out;
}

}  // namespace

void bind_orders(nb::module_& m) {
  nb::class_<Traffic>(m, "Traffic", "What is under way between the tiers. See kvtier.orders.")
      .def(nb::init<Catalog&, CostModel&>(), nb::arg("catalog"), nb::arg("costs"), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>())
      .def(
          "begun",
          [](Traffic& self, Ticket ticket, const Path& path, const Nodes& nodes, int priority, double now) {
            self.begun(ticket, path, nodes.span(), priority_of(priority), now);
          },
          nb::arg("ticket"), nb::arg("path"), nb::arg("nodes"), nb::arg("priority"), nb::arg("now"),
          "The data plane will be asked for a transfer of these pages: said before it is.")
      .def("refused", &Traffic::refuse, nb::arg("ticket"), "It was asked, and has not taken it.")
      .def("dropped", &Traffic::drop, nb::arg("pages"), "So many were to go down, and stay where they are.")
      .def(
          "store_room", [](const Traffic& self, const Path& path) { return self.store_room(path); }, nb::arg("path"),
          "How many pages that nobody waits for may be copied down along `path` now.")
      .def(
          "put_off", [](Traffic& self, const Path& path, const Nodes& nodes) { self.put_off(path, nodes.span()); },
          nb::arg("path"), nb::arg("nodes"), "They are not copied down now, but may be later.")
      .def(
          "take_put_off",
          [](Traffic& self, const Path& path, std::size_t most) { return self.take_put_off(path, most); },
          nb::arg("path"), nb::arg("most"), "The next of these, which may be gone or stored by now.")
      .def("count_put_off", &Traffic::count_put_off, nb::arg("pages"), "So many were, and can't be copied down later.")
      .def(
          "give_way", [](Traffic& self, const Path& path, std::size_t pages) { return self.give_way(path, pages); },
          nb::arg("path"), nb::arg("pages"),
          "The tickets of stores along `path` to be cancelled for the room of so many pages.")
      .def("settle", &settle_told, nb::arg("completions"),
           nb::sig("def settle(self, completions: list[typing.Any]) -> tuple[dict[int, bool], list[int]]"),
           "Words of the data plane, each a kvtier.messages.Completion. By ticket, whether all of it went well, of "
           "those that were under way; and the nodes of what has come down to host memory. A word that is refused is "
           "raised for when the others are settled, and the answer to these is part of the next call's.")
      .def("runs", &Traffic::runs, nb::arg("ticket"), "Whether the last word on the ticket was not said.")
      .def(
          "moves", [](const Traffic& self, const Path& path) { return self.moves(path); }, nb::arg("path"),
          "Whether a transfer along `path` is under way whose end can be expected.")
      .def_prop_ro("under_way", &Traffic::under_way)
      .def_prop_ro("hanging", &Traffic::hanging,
                   "Of these, those that were reported early: when they end nobody knows.")
      .def_prop_rw("disk_offline", &Traffic::disk_offline, &Traffic::take_disk_offline,
                   "Whether a transfer found it out of service.")
      .def_prop_ro("pages_moved", &pages_moved, nb::sig("def pages_moved(self) -> dict[str, int]"), "By lane.")
      .def_prop_ro("failures", &failures, nb::sig("def failures(self) -> dict[PageStatus, int]"),
                   "Pages by what became of them, where that was no success.")
      .def_prop_ro("pages_refused", &Traffic::refused)
      .def_prop_ro("pages_dropped", &Traffic::dropped)
      .def_prop_ro("has_put_off", &Traffic::has_put_off)
      .def_prop_ro("pages_put_off", &Traffic::pages_put_off);
  nb::class_<Orders>(m, "Orders", "Orders from a catalog to a mover of the same process. See kvtier.orders.")
      .def(nb::init<Catalog&, Mover&, Traffic&>(), nb::arg("catalog"), nb::arg("mover"), nb::arg("traffic"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("load", &load, nb::arg("path"), nb::arg("nodes"), nb::arg("request"), nb::arg("ahead"), nb::arg("priority"),
           nb::arg("deadline_s"), nb::arg("stream"), nb::arg("cuts"), nb::arg("refuse"),
           "(ticket, pages that move); (0, 0): nothing does.")
      .def("store", &store, nb::arg("path"), nb::arg("nodes"), nb::arg("cold"), nb::arg("priority"), nb::arg("stream"),
           nb::arg("refuse"), "The ticket; 0: nothing moves.")
      .def("settle", &settle, nb::arg("spill"), nb::sig("def settle(self, spill: bool) -> dict[int, bool]"),
           "What the mover has reported, by ticket: whether all of it went well.");
}

}  // namespace kvtier
