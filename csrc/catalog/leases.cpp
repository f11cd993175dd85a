#include "catalog/leases.hpp"

#include <stdexcept>
#include <string>

namespace kvtier {

std::uint32_t Leases::get(RequestId request) {
  if (request == 0) throw std::invalid_argument("request: 0 names no request; use a positive number");
  const std::uint32_t known = find(request);
  if (known != kNone) return known;
  if (index_.size() >= kMax)
    throw std::invalid_argument("request: " + std::to_string(kMax) +
                                " requests hold leases already; release some first");
  std::uint32_t lease;
  if (free_.empty()) {
    lease = static_cast<std::uint32_t>(leases_.size());
    leases_.emplace_back();
  } else {
    lease = free_.back();
    free_.pop_back();
  }
  leases_[lease].request = request;
  index_[request] = lease;
  return lease;
}

void Leases::erase(std::uint32_t lease) {
  Lease& entry = leases_[lease];
  index_.erase(entry.request);
  entry.request = 0;
  free_.push_back(lease);
}

}  // namespace kvtier
