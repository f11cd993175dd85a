// One function per folder of csrc/, each in its own file. Bindings convert and call; they hold no logic.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvtier {

// A duration of none or more; what is no number is none.
inline std::chrono::nanoseconds seconds(double s) {
  constexpr double kMost = 1e9;  // 30 years: keeps the sum with a clock in range
  return std::chrono::nanoseconds(static_cast<std::int64_t>(s > 0 ? std::min(s, kMost) * 1e9 : 0.0));
}

void bind_common(nanobind::module_& m);
void bind_catalog(nanobind::module_& m);
void bind_content(nanobind::module_& m);
void bind_copy(nanobind::module_& m);
void bind_costs(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_mover(nanobind::module_& m);
void bind_orders(nanobind::module_& m);
void bind_requests(nanobind::module_& m);

}  // namespace kvtier
