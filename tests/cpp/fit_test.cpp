#include "costs/fit.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kvtier {
namespace {

constexpr double kRidge[] = {1e-3, 1e-6};

TEST_CASE("a fit learns a fixed cost and a rate, and believes in a new one when two of three agree") {
  Fit fit(kRidge, 32, 3);
  CHECK_FALSE(fit.predict(std::vector{1.0, 1.0}).has_value());
  std::mt19937 random(1);
  const auto feed = [&](double rate, int count) {
    for (int i = 0; i < count; ++i) {
      const double bytes = 1e5 * static_cast<double>(1 + random() % 50);
      fit.observe(std::vector{1.0, bytes}, 1e-3 + bytes * rate);
    }
  };
  feed(1e-9, 64);
  CHECK(*fit.predict(std::vector{1.0, 4e6}) == doctest::Approx(5e-3).epsilon(0.05));
  fit.observe(std::vector{1.0, 4e6}, 5.0);  // one stalled I/O
  CHECK(*fit.predict(std::vector{1.0, 4e6}) < 8e-3);
  feed(2e-7, 4);
  CHECK(*fit.predict(std::vector{1.0, 4e6}) == doctest::Approx(0.8).epsilon(0.2));
}

TEST_CASE("what no time can be is ignored, and coefficients stay zero or more, whatever comes") {
  Fit fit(kRidge, 32, 3);
  for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")})
    fit.observe(std::vector{1.0, 1.0}, wrong);
  fit.observe(std::vector{0.0, 0.0}, 1.0);
  for (const double wrong : {-1.0, 1e300, std::numeric_limits<double>::infinity(), std::nan("")})
    fit.observe(std::vector{1.0, wrong}, 1.0);
  fit.observe(std::vector{1.0, 1.0}, 1e-300);
  CHECK(fit.observations() == 0);
  fit.observe(std::vector{1.0, 1.0}, 1.0);
  CHECK(*fit.predict(std::vector{1.0, 1.0}) == doctest::Approx(1.0).epsilon(0.01));
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    const auto any = [&] { return std::pow(10.0, static_cast<double>(random() % 100) / 10 - 5); };
    fit.observe(std::vector{random() % 2 != 0 ? 1.0 : 0.0, any()}, any());
    for (const double c : fit.coefficients()) CHECK((c >= 0 && std::isfinite(c)));
  }
  CHECK_THROWS(fit.seed(std::vector{1.0}, 3));
  CHECK_THROWS(fit.seed(std::vector{1.0, -1.0}, 3));
  CHECK_THROWS(fit.seed(std::vector{1.0, 1.0}, std::nan("")));
  fit.seed(std::vector{2.0, 3.0}, 3);
  CHECK(*fit.predict(std::vector{1.0, 1.0}) == doctest::Approx(5.0).epsilon(0.01));
  fit.seed(std::vector{0.0, 0.0}, 3);  // begins anew, with nothing
  CHECK_FALSE(fit.predict(std::vector{1.0, 1.0}).has_value());
  fit.seed(std::vector{1e-300, 3.0}, 3);
  CHECK(*fit.predict(std::vector{1.0, 1.0}) == doctest::Approx(3.0).epsilon(0.01));
  CHECK_THROWS(Fit({}, 32, 3));
  CHECK_THROWS(Fit(std::vector{0.0, 1e-3}, 32, 3));
  CHECK_THROWS(Fit(kRidge, 32, 1001));
  CHECK_THROWS(Fit(kRidge, 0.5, 3));
  CHECK_THROWS(Fit(kRidge, 32, 2));
}

}  // namespace
}  // namespace kvtier
