#include "costs/fit.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string>

namespace kvtier {
namespace {

const double kSurprise = std::log(1.5);  // of the log of actual over predicted, from where an observation is one
constexpr std::uint64_t kYoung = 8;      // observations up to which each is solved for; from then on one in so many
// Observations that what was known counts as, when the level has changed: its shape, until others tell.
constexpr double kKept = 0.25;
// Amounts and times beyond these are none, and the squares of their quotients would be no numbers any more.
constexpr double kLeast = 1e-50, kGreatest = 1e50;
constexpr std::size_t kLongest = 999;  // window

bool is_amount(double x) { return x >= 0 && x <= kGreatest; }

}  // namespace

Fit::Fit(std::span<const double> ridge, double memory, std::size_t window, bool kinds)
    : size_(ridge.size()), window_(window), kinds_(kinds), memory_(memory - 1) {
  const bool positive = std::all_of(ridge.begin(), ridge.end(), [](double r) { return r > 0 && r <= kGreatest; });
  if (ridge.empty() || ridge.size() > kMost || !positive || !(memory >= 1) || window % 2 != 1 || window > kLongest)
    throw std::invalid_argument("ridge: " + std::to_string(ridge.size()) +
                                " features, memory: " + std::to_string(memory) + ", window: " + std::to_string(window) +
                                "; accepted: 1 to 3 features above 0, 1 or more, an odd number up to 999");
  std::copy(ridge.begin(), ridge.end(), ridge_.begin());
}

std::optional<double> Fit::predict(Features features) const {
  if (!known_) return std::nullopt;
  double seconds = 0;
  for (std::size_t i = 0; i < size_; ++i) seconds += coefficients_[i] * features[i];
  return seconds;
}

bool Fit::observe(Features features, double seconds) {
  const bool something = std::any_of(features.begin(), features.end(), [](double x) { return x > kLeast; });
  const bool amounts = std::all_of(features.begin(), features.end(), is_amount);
  if (!(seconds > kLeast && seconds <= kGreatest) || !something || !amounts) return false;
  ++observations_;
  double expected = predict(features).value_or(0);
  if (expected != 0) {
    Seen seen{{}, seconds, std::log(seconds / expected)};
    std::copy(features.begin(), features.end(), seen.features.begin());
    if (kinds_ && std::abs(seen.residual) > kSurprise && explains({&seen, 1})) return true;
    std::vector<Seen>& recent = recent_[kind(features)];
    if (recent.size() == window_) recent.erase(recent.begin());
    recent.push_back(seen);
    if (level_changed(recent)) {
      expected = predict(features).value_or(0);
      if (expected == 0) expected = seconds;
    }
  }
  add(features, seconds, std::pow(std::max(expected, seconds), -2.0));
  if (observations_ < kYoung || observations_ % kYoung == 0) solve();
  return true;
}

// Which of the features makes up most of it; all are of one kind where they are not told apart.
std::size_t Fit::kind(Features features) const {
  std::size_t most = 0;
  for (std::size_t i = 1; kinds_ && i < size_; ++i)
    if (coefficients_[i] * features[i] > coefficients_[most] * features[most]) most = i;
  return most;
}

// Learns them as they are, if most can be explained together with what is known, or for the better part, being noise as
// well: nothing like them was seen before.
bool Fit::explains(std::span<const Seen> news) {
  const auto squares = squares_;
  const Vector products = products_, coefficients = coefficients_;
  for (const Seen& seen : news) {
    const double scale = std::max(predict(of(seen)).value_or(0), seen.seconds);
    add(of(seen), seen.seconds, std::pow(scale, -2.0));
  }
  solve();
  const auto explained = [this](const Seen& seen) {
    return std::abs(residual(seen)) <= std::max(kSurprise, std::abs(seen.residual) / 2);
  };
  if (2 * std::count_if(news.begin(), news.end(), explained) > std::ssize(news)) return true;
  squares_ = squares, products_ = products, coefficients_ = coefficients;
  return false;
}

void Fit::seed(std::span<const double> coefficients, double weight) {
  const bool fine = std::all_of(coefficients.begin(), coefficients.end(), is_amount);
  if (coefficients.size() != size_ || !fine || !(weight > 0 && weight <= kGreatest))
    throw std::invalid_argument("coefficients: " + std::to_string(coefficients.size()) +
                                " given, weight: " + std::to_string(weight) + "; accepted: " + std::to_string(size_) +
                                " of them, zero or more, and a weight above 0");
  squares_ = {};
  products_ = {};
  coefficients_ = {};
  known_ = false;
  for (std::size_t i = 0; i < size_; ++i) {
    const double c = coefficients[i];
    if (c <= kLeast) continue;
    squares_[i][i] += weight / (c * c);
    products_[i] += weight / c;
  }
  for (std::vector<Seen>& recent : recent_) recent.assign(window_ - 1, Seen{});
  solve();
}

// Whether the last observations agree that it takes longer, or shorter, than was believed; that is so then.
bool Fit::level_changed(std::vector<Seen>& recent) {
  if (recent.size() < window_) return false;
  std::vector<double> residuals;
  for (const Seen& seen : recent) residuals.push_back(seen.residual);
  const auto middle = residuals.begin() + static_cast<std::ptrdiff_t>(window_ / 2);
  std::nth_element(residuals.begin(), middle, residuals.end());
  const double level = *middle;
  if (std::abs(level) <= kSurprise) return false;
  std::vector<Seen> agree;
  std::copy_if(recent.begin(), recent.end(), std::back_inserter(agree),
               [level](const Seen& seen) { return seen.residual * level > 0 && std::abs(seen.residual) > kSurprise; });
  const Seen& newest = recent.back();  // is added by who asks
  const bool newest_agrees = newest.residual * level > 0 && std::abs(newest.residual) > kSurprise;
  const std::span<const Seen> earlier(agree.data(), agree.size() - (newest_agrees ? 1 : 0));
  if (!kinds_ || !explains(earlier)) {
    rescale(std::exp(level), agree);
    for (const Seen& seen : earlier) add(of(seen), seen.seconds, std::pow(seen.seconds, -2.0));
    solve();
  }
  for (std::vector<Seen>& each : recent_)
    for (Seen& seen : each) seen.residual = residual(seen);
  return true;
}

double Fit::residual(const Seen& seen) const {
  const double expected = predict(of(seen)).value_or(0);
  return expected != 0 ? std::log(seen.seconds / expected) : 0.0;
}

// What made up most of the surprises took `factor` times as long, the rest in proportion to its share in them; weights
// are those of relative errors still.
void Fit::rescale(double factor, std::span<const Seen> surprises) {
  Vector shares{}, factors{};
  for (const Seen& seen : surprises) {
    const double whole = predict(of(seen)).value_or(0);
    for (std::size_t i = 0; i < size_ && whole > 0; ++i) shares[i] += coefficients_[i] * seen.features[i] / whole;
  }
  const double largest = *std::max_element(shares.begin(), shares.end());
  const double most = largest != 0 ? largest : 1.0;
  for (std::size_t i = 0; i < size_; ++i)  // above zero, also where next to nothing is left
    factors[i] = std::max(1.0 + (factor - 1.0) * shares[i] / most, std::min(factor, 1.0));
  const double kept = kinds_ ? 1.0 : kKept / (memory_ + 1);  // of another kind they tell little
  for (std::size_t i = 0; i < size_; ++i) {
    for (std::size_t j = 0; j < size_; ++j) squares_[i][j] *= kept / (factors[i] * factors[j]);
    products_[i] *= kept / factors[i];
    coefficients_[i] *= factors[i];
  }
  for (const Seen& seen : surprises) {
    const double expected = predict(of(seen)).value_or(0);
    if (expected > 0) forget(of(seen), kKept / (expected * expected));
  }
}

// What is known of the time that these features take together.
Fit::Told Fit::told(Features features) const {
  Told out;
  Vector found{};
  std::array<std::size_t, kMost> used{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < size_; ++i)
    if (squares_[i][i] > 0) out.features[i] = features[i], used[count++] = i;
  solve_for({used.data(), count}, out.features, found.data());
  double variance = 0;
  for (std::size_t a = 0; a < count; ++a) {
    variance += found[a] * features[used[a]];
    out.seconds += found[a] * products_[used[a]];
  }
  if (variance > 0 && std::isfinite(1 / variance)) out.information = 1 / variance;
  return out;
}

// Of what is known of the time that these features take together keeps no more than `most`; what is known beside it
// stays.
void Fit::forget(Features features, double most) {
  const Told known = told(features);
  const double ridge = *std::max_element(ridge_.begin(), ridge_.end());
  // Short of all of it, for what is left is to have an inverse, with the ridge that goes with it.
  const double less = std::min(known.information - most, known.information / (1 + 2 * ridge));
  if (!(less > 0)) return;
  for (std::size_t i = 0; i < size_; ++i) {
    for (std::size_t j = 0; j < size_; ++j) squares_[i][j] -= less * known.features[i] * known.features[j];
    products_[i] -= less * known.features[i] * known.seconds;
  }
}

void Fit::add(Features features, double seconds, double weight) {
  forget(features, memory_ * weight);
  for (std::size_t i = 0; i < size_; ++i) {
    for (std::size_t j = 0; j < size_; ++j) squares_[i][j] += weight * features[i] * features[j];
    products_[i] += weight * features[i] * seconds;
  }
}

void Fit::solve() {
  std::array<std::size_t, kMost> used{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < size_; ++i)
    if (squares_[i][i] > 0) used[count++] = i;
  for (; count != 0; --count) {
    double found[kMost];
    solve_for({used.data(), count}, products_, found);
    const std::size_t worst = static_cast<std::size_t>(std::min_element(found, found + count) - found);
    if (found[worst] >= 0) {
      coefficients_ = {};
      for (std::size_t i = 0; i < count; ++i) coefficients_[used[i]] = found[i];
      known_ = true;
      return;
    }
    std::copy(used.begin() + static_cast<std::ptrdiff_t>(worst) + 1, used.begin() + static_cast<std::ptrdiff_t>(count),
              used.begin() + static_cast<std::ptrdiff_t>(worst));
  }
}

// Gaussian elimination of the normal equations in these features, each scaled to a diagonal of one.
void Fit::solve_for(std::span<const std::size_t> used, const Vector& right, double* values) const {
  const std::size_t n = std::min(used.size(), kMost);
  Vector scale{};
  std::array<std::array<double, kMost + 1>, kMost> rows{};
  for (std::size_t a = 0; a < n; ++a) scale[a] = 1 / std::sqrt(squares_[used[a]][used[a]]);
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < n; ++b)
      rows[a][b] = squares_[used[a]][used[b]] * scale[a] * scale[b] + (a == b ? ridge_[used[a]] : 0.0);
    rows[a][n] = right[used[a]] * scale[a];
  }
  for (std::size_t column = 0; column < n; ++column) {  // positive definite by the ridge: no pivoting needed
    for (std::size_t below = column + 1; below < n; ++below) {
      const double factor = rows[below][column] / rows[column][column];
      for (std::size_t k = column; k <= n; ++k) rows[below][k] -= factor * rows[column][k];
    }
  }
  for (std::size_t row = n; row-- > 0;) {
    double rest = rows[row][n];
    for (std::size_t k = row + 1; k < n; ++k) rest -= rows[row][k] * values[k];
    values[row] = rest / rows[row][row];
  }
  for (std::size_t a = 0; a < n; ++a) values[a] *= scale[a];
}

}  // namespace kvtier
