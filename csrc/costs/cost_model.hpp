// What loads and prefills take, predicted from what they took. See kvtier/costmodel.py for what is learnt and how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "common/completion.hpp"
#include "common/lane.hpp"
#include "common/types.hpp"
#include "costs/fit.hpp"

namespace kvtier {

// Times are seconds, points in time those of one monotonic clock. What is refused throws std::invalid_argument.
class CostModel {
 public:
  using Path = std::span<const Tier>;
  struct PrefillSpeed {
    std::span<const double> coefficients;
    std::uint64_t pass_tokens = 1;
  };

  CostModel(std::size_t page_bytes, std::size_t bytes_in_flight);
  std::size_t page_bytes() const { return page_bytes_; }

  // -- learning
  void submitted(Ticket ticket, Path path, std::size_t blocks, Priority priority, double now);
  void forget(Ticket ticket);                       // it does not run after all; nothing for one that is not known
  void promoted(Ticket ticket, Priority priority);  // at least that
  void completed(const Completion& done);
  void overran(std::span<const Ticket> tickets, double now);
  void observe_prefill(std::uint64_t new_tokens, std::uint64_t context, double seconds);

  // -- predicting; nothing: it was never seen
  double queue_wait(Lane lane, double now, Priority priority) const;
  std::optional<double> load(Path path, std::size_t blocks, double now, Priority priority) const;
  std::optional<double> recompute(std::uint64_t tokens, std::uint64_t context) const;
  std::optional<double> expected_end(std::span<const Ticket> tickets) const;
  bool onboards(Ticket ticket) const;  // a transfer under way that ends on the device
  double last_end(Lane lane) const { return at(lane).ended; }

  // -- a profile
  std::optional<std::pair<double, double>> lane_speed(Lane lane) const;  // fixed seconds, bytes per second
  std::optional<PrefillSpeed> prefill_speed() const;
  void seed_lane(Lane lane, double fixed_s, double bytes_per_s);
  void seed_prefill(std::span<const double> coefficients, std::uint64_t pass_tokens);
  void recall(const CostModel& other);  // what the other has heard of, and nothing else; what is under way stays

 private:
  struct LaneCosts {
    LaneCosts();
    bool idle() const;
    double takes(double bytes) const;                        // found idle
    double occupied(std::uint64_t ahead, double now) const;  // seconds until so many bytes under way have passed
    void learn(std::uint64_t size, double started_s, double ended_s);
    void observe(Fit::Features features, double seconds);

    Fit fit;                     // of whether it was found idle, and bytes
    std::optional<double> only;  // what the only transfer took, while there was no other
    double began = 0;            // of the transfer that ended last
    double ended = 0;
    double busy_since = 0;
    std::uint64_t queued[kPriorities] = {};  // bytes under way
    std::uint64_t seen = 0;
    std::uint64_t pending = 0;  // bytes that ended together with others and are counted with the next ones
  };
  struct UnderWay {
    Lane lanes[kMaxHops];
    int hops = 0;
    std::uint64_t bytes = 0;
    Priority priority = Priority::kDemand;
    double submitted = 0;
    std::optional<double> expected_end;
    std::span<const Lane> path() const { return {lanes, static_cast<std::size_t>(hops)}; }
  };

  LaneCosts& at(Lane lane) { return lanes_[index_of(lane)]; }
  const LaneCosts& at(Lane lane) const { return lanes_[index_of(lane)]; }
  const UnderWay* find(Ticket ticket) const;

  std::size_t page_bytes_;
  std::uint64_t in_flight_;
  LaneCosts lanes_[kLanes];
  std::unordered_map<Ticket, UnderWay> under_way_;
  Fit prefill_;  // of passes, tokens, tokens · what they attend to
  std::uint64_t pass_tokens_ = 1;
};

}  // namespace kvtier
