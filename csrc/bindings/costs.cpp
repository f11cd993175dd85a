#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/completions.hpp"
#include "bindings/lanes.hpp"
#include "costs/cost_model.hpp"
#include "costs/fit.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

const std::vector<double>& of_size(const Fit& fit, const std::vector<double>& features) {
  if (features.size() == fit.size()) return features;
  throw std::invalid_argument("features: " + std::to_string(features.size()) +
                              " given; accepted: " + std::to_string(fit.size()));
}

nb::object coefficients(const Fit& self) {
  if (!self.known()) return nb::none();
  nb::list out;
  for (const double c : self.coefficients()) out.append(c);
  return nb::tuple(out);
}

using Path = std::vector<Tier>;

Lane known_lane(const std::string& name) {
  if (const std::optional<Lane> lane = lane_named(name)) return *lane;
  std::string lanes;
  for (int i = 0; i < kLanes; ++i) lanes += (i == 0 ? "" : ", ") + std::string(lane_name(static_cast<Lane>(i)));
  throw std::invalid_argument("lane '" + name + "'; accepted: " + lanes);
}

std::vector<Ticket> tickets_of(const nb::iterable& tickets) {
  std::vector<Ticket> out;
  for (const nb::handle ticket : tickets) {
    Ticket number = 0;
    if (!nb::try_cast(ticket, number)) throw nb::type_error("tickets: accepted: whole numbers");
    out.push_back(number);
  }
  return out;
}

// A count as Python has it, which may be less than none.
std::uint64_t count_of(const char* field, std::int64_t count, std::int64_t least) {
  if (count >= least) return static_cast<std::uint64_t>(count);
  throw std::invalid_argument(std::string(field) + ": " + std::to_string(count) +
                              "; accepted: " + std::to_string(least) + " or more");
}

std::optional<std::pair<nb::tuple, std::uint64_t>> prefill_speed(const CostModel& self) {
  const std::optional<CostModel::PrefillSpeed> speed = self.prefill_speed();
  if (!speed) return std::nullopt;
  nb::list out;
  for (const double c : speed->coefficients) out.append(c);
  return std::pair(nb::tuple(out), speed->pass_tokens);
}

void bind_learning(nb::class_<CostModel>& c) {
  c.def(
       "submitted",
       [](CostModel& self, Ticket ticket, const Path& path, std::size_t blocks, int priority, double now) {
         self.submitted(ticket, path, blocks, priority_of(priority), now);
       },
       nb::arg("ticket"), nb::arg("path"), nb::arg("blocks"), nb::arg("priority"), nb::arg("now"),
       "A transfer of `blocks` pages was queued.")
      .def(
          "promoted",
          [](CostModel& self, Ticket ticket, int priority) { self.promoted(ticket, priority_of(priority)); },
          nb::arg("ticket"), nb::arg("priority"), "A transfer under way is now served with another priority.")
      .def(
          "completed", [](CostModel& self, nb::handle done) { self.completed(completion_of(done)); },
          nb::arg("done").none(), nb::sig("def completed(self, done: tuple[typing.Any, ...]) -> None"),
          "A transfer was reported. Only what moved is learnt from; a report that is not final is none.")
      .def(
          "overran",
          [](CostModel& self, const nb::typed<nb::iterable, int>& tickets, double now) {
            self.overran(tickets_of(tickets), now);
          },
          nb::arg("tickets"), nb::arg("now"),
          "These have not ended by now: their first lane takes at least that long, whenever they will have ended.")
      .def(
          "observe_prefill",
          [](CostModel& self, std::int64_t new_tokens, std::int64_t context, double seconds) {
            self.observe_prefill(count_of("new_tokens", new_tokens, 1), count_of("context", context, 0), seconds);
          },
          nb::arg("new_tokens"), nb::arg("context"), nb::arg("seconds"),
          "One pass of the model computed `new_tokens` behind `context` tokens of one request in `seconds`.");
}

void bind_predicting(nb::class_<CostModel>& c) {
  c.def(
       "queue_wait",
       [](const CostModel& self, const std::string& lane, double now, int priority) {
         return self.queue_wait(known_lane(lane), now, priority_of(priority));
       },
       nb::arg("lane"), nb::arg("now"), nb::arg("priority") = 0,
       "Seconds until the lane would take a new transfer's first page, by what is under way as of now.")
      .def(
          "load",
          [](const CostModel& self, const Path& path, std::int64_t blocks, double now, int priority) {
            return self.load(path, blocks < 0 ? 0 : static_cast<std::size_t>(blocks), now, priority_of(priority));
          },
          nb::arg("path"), nb::arg("blocks"), nb::arg("now"), nb::arg("priority") = 0,
          "Seconds until `blocks` pages have come along `path`; None: one of its lanes has never been seen.")
      .def(
          "recompute",
          [](const CostModel& self, std::int64_t tokens, std::int64_t context) {
            return self.recompute(tokens < 0 ? 0 : static_cast<std::uint64_t>(tokens), count_of("context", context, 0));
          },
          nb::arg("tokens"), nb::arg("context"),
          "Seconds to compute `tokens` behind `context` tokens, in passes as the engine makes them; None: not known.")
      .def(
          "expected_end",
          [](const CostModel& self, const nb::typed<nb::iterable, int>& tickets) {
            return self.expected_end(tickets_of(tickets));
          },
          nb::arg("tickets"),
          "By when the transfers were predicted to have ended, at their submission; None: of one nothing was known.")
      .def("onboards", &CostModel::onboards, nb::arg("ticket"),
           "Whether a transfer is under way that ends on the device.")
      .def(
          "last_end", [](const CostModel& self, const std::string& lane) { return self.last_end(known_lane(lane)); },
          nb::arg("lane"), "When a transfer last ended on the lane; 0: never.");
}

void bind_profile(nb::class_<CostModel>& c) {
  c.def(
       "lane_speed", [](const CostModel& self, const std::string& lane) { return self.lane_speed(known_lane(lane)); },
       nb::arg("lane"), "(fixed seconds, bytes per second) as learnt; None: never seen.")
      .def("prefill_speed", &prefill_speed, nb::sig("def prefill_speed(self) -> tuple[tuple[float, ...], int] | None"),
           "Seconds per pass, per token and per token * token attended to, and the tokens of a pass; None: never seen.")
      .def(
          "seed_lane",
          [](CostModel& self, const std::string& lane, double fixed_s, double bytes_per_s) {
            self.seed_lane(known_lane(lane), fixed_s, bytes_per_s);
          },
          nb::arg("lane"), nb::arg("fixed_s"), nb::arg("bytes_per_s"), "Begin with a lane's measured speed.")
      .def(
          "seed_prefill",
          [](CostModel& self, const std::vector<double>& coefficients, std::int64_t pass_tokens) {
            self.seed_prefill(coefficients, count_of("pass_tokens", pass_tokens, 1));
          },
          nb::arg("coefficients"), nb::arg("pass_tokens"),
          "Begin with measured coefficients, as prefill_speed gives them.")
      .def("recall", &CostModel::recall, nb::arg("other"),
           "Know what `other` has heard of, and nothing else. What is under way stays: its end is heard of here.");
}

}  // namespace

void bind_costs(nb::module_& m) {
  m.def(
      "lane_between",
      [](Tier from, Tier to) -> std::optional<std::string> {
        const std::optional<Lane> lane = lane_between(from, to);
        return lane ? std::optional<std::string>(lane_name(*lane)) : std::nullopt;
      },
      nb::arg("source"), nb::arg("target"), "The lane from one tier to another; None: none joins them.");
  nb::class_<CostModel> c(m, "CostModel", "See kvtier.costmodel.CostModel.");
  c.def(
       "__init__",
       [](CostModel* self, std::int64_t page_bytes, std::int64_t bytes_in_flight) {
         new (self) CostModel(count_of("page_bytes", page_bytes, 1), count_of("bytes_in_flight", bytes_in_flight, 0));
       },
       nb::arg("page_bytes"), nb::kw_only(), nb::arg("bytes_in_flight") = 8 << 20)
      .def_prop_ro("page_bytes", &CostModel::page_bytes);
  bind_learning(c);
  bind_predicting(c);
  bind_profile(c);
  nb::class_<Fit>(m, "Fit", "See kvtier.fit.Fit.")
      .def(
          "__init__",
          [](Fit* self, const std::vector<double>& ridge, double memory, std::int64_t window, bool kinds) {
            new (self) Fit(ridge, memory, window < 0 ? 0 : static_cast<std::size_t>(window), kinds);
          },
          nb::arg("ridge"), nb::arg("memory") = 32.0, nb::arg("window") = 3, nb::arg("kinds") = false)
      .def(
          "predict",
          [](const Fit& self, const std::vector<double>& features) { return self.predict(of_size(self, features)); },
          nb::arg("features"), "Seconds; None while nothing is known.")
      .def(
          "observe",
          [](Fit& self, const std::vector<double>& features, double seconds) {
            self.observe(of_size(self, features), seconds);
          },
          nb::arg("features"), nb::arg("seconds"),
          "It took `seconds`. What is not a positive, finite time of something is ignored.")
      .def(
          "seed",
          [](Fit& self, const std::vector<double>& coefficients, double weight) { self.seed(coefficients, weight); },
          nb::arg("coefficients"), nb::arg("weight") = Fit::kSeedWeight,
          "Begin anew with known coefficients, to count as `weight` observations.")
      .def_prop_ro("coefficients", &coefficients, nb::sig("def coefficients(self) -> tuple[float, ...] | None"),
                   "Seconds per unit of each feature; None before the first observation.")
      .def_prop_ro("observations", &Fit::observations);
}

}  // namespace kvtier
