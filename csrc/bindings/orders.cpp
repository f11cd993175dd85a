#include "orders/orders.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

std::tuple<Ticket, std::size_t> issue(Orders& self, const std::vector<Tier>& path, const ArrayIn<NodeId, 1>& nodes,
                                      RequestId request, bool backed_only, bool cold, int priority, double deadline_s,
                                      std::uintptr_t stream, const std::vector<std::size_t>& cuts, bool refuse) {
  Wish wish;
  wish.path = path;
  wish.nodes = nodes.span();
  wish.request = request;
  wish.backed_only = backed_only;
  wish.cold = cold;
  wish.priority = static_cast<Priority>(std::clamp(priority, 0, 255));
  if (deadline_s > 0) wish.deadline = Time(seconds(deadline_s));
  wish.cuts = cuts;
  wish.stream = stream;
  const Issued issued = self.issue(wish, refuse);
  return {issued.ticket, issued.count};
}

}  // namespace

void bind_orders(nb::module_& m) {
  nb::class_<Orders>(m, "Orders", "Orders from a catalog to a mover of the same process. See kvtier.orders.")
      .def(nb::init<Catalog&, Mover&>(), nb::arg("catalog"), nb::arg("mover"), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>())
      .def("issue", &issue, nb::arg("path"), nb::arg("nodes"), nb::arg("request"), nb::arg("backed_only"),
           nb::arg("cold"), nb::arg("priority"), nb::arg("deadline_s"), nb::arg("stream"), nb::arg("cuts"),
           nb::arg("refuse"),
           "(ticket, pages that move), or (0, pages that the mover refused): then nothing is reserved any more.");
}

}  // namespace kvtier
