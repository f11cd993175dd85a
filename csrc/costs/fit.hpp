// How long something takes, learnt from how long it took: a few non-negative coefficients, robust and forgetting.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvtier {

// seconds ≈ Σ coefficient · feature, for one to three features, all of them zero or more. See kvtier/fit.py for what it
// does and where that comes from.
class Fit {
 public:
  static constexpr std::size_t kMost = 3;
  static constexpr double kSeedWeight = 3;  // observations
  using Features = std::span<const double>;

  // Throws std::invalid_argument for what the documentation does not allow; so does seed.
  Fit(std::span<const double> ridge, double memory, std::size_t window, bool kinds = false);

  std::optional<double> predict(Features features) const;
  bool observe(Features features, double seconds);  // false: that was no time, or of nothing
  void seed(std::span<const double> coefficients, double weight = kSeedWeight);

  bool known() const { return known_; }
  std::span<const double> coefficients() const { return {coefficients_.data(), size_}; }
  std::uint64_t observations() const { return observations_; }
  std::size_t size() const { return size_; }

 private:
  using Vector = std::array<double, kMost>;
  struct Seen {
    Vector features{};
    double seconds = 1;
    double residual = 0;  // log of actual over predicted
  };

  struct Told {
    Vector features{};       // without those that were never seen
    double seconds = 0;      // that they take
    double information = 0;  // the inverse of the variance of that
  };

  std::size_t kind(Features features) const;
  bool explains(std::span<const Seen> news);
  bool level_changed(std::vector<Seen>& recent);
  double residual(const Seen& seen) const;
  void rescale(double factor, std::span<const Seen> surprises);
  Told told(Features features) const;
  void forget(Features features, double most);
  void add(Features features, double seconds, double weight);
  void solve();
  void solve_for(std::span<const std::size_t> used, const Vector& right, double* values) const;
  Features of(const Seen& seen) const { return {seen.features.data(), size_}; }

  std::size_t size_;
  std::size_t window_;
  bool kinds_;
  double memory_;  // observations that are kept of what one tells of, before it is added
  Vector ridge_{};
  std::array<Vector, kMost> squares_{};          // Σ weight · feature · feature, less what was forgotten
  Vector products_{};                            // Σ weight · feature · seconds, likewise
  std::array<std::vector<Seen>, kMost> recent_;  // the last ones of each kind
  Vector coefficients_{};
  bool known_ = false;
  std::uint64_t observations_ = 0;
};

}  // namespace kvtier
