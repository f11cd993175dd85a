#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
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

}  // namespace

void bind_costs(nb::module_& m) {
  nb::class_<Fit>(m, "Fit", "See kvtier.fit.Fit.")
      .def(
          "__init__",
          [](Fit* self, const std::vector<double>& ridge, double memory, std::int64_t window) {
            new (self) Fit(ridge, memory, window < 0 ? 0 : static_cast<std::size_t>(window));
          },
          nb::arg("ridge"), nb::arg("memory") = 32.0, nb::arg("window") = 3)
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
          nb::arg("coefficients"), nb::arg("weight") = 3.0,
          "Begin anew with known coefficients, to count as `weight` observations.")
      .def_prop_ro("coefficients", &coefficients, nb::sig("def coefficients(self) -> tuple[float, ...] | None"),
                   "Seconds per unit of each feature; None before the first observation.")
      .def_prop_ro("observations", &Fit::observations);
}

}  // namespace kvtier
