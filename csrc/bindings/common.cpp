#include <nanobind/nanobind.h>

#include "bindings/bindings.hpp"
#include "common/types.hpp"

namespace nb = nanobind;

namespace kvtier {

void bind_common(nb::module_& m) {
  nb::enum_<Tier>(m, "Tier", nb::is_arithmetic(), "A storage tier, fastest first.")
      .value("DEVICE", Tier::kDevice)
      .value("HOST", Tier::kHost)
      .value("DISK", Tier::kDisk)
      .value("REMOTE", Tier::kRemote);
  nb::enum_<PageStatus>(m, "PageStatus", nb::is_arithmetic(), "What became of one page on one hop of a transfer.")
      .value("PENDING", PageStatus::kPending)
      .value("OK", PageStatus::kOk)
      .value("SKIPPED", PageStatus::kSkipped)
      .value("CANCELLED", PageStatus::kCancelled)
      .value("OVERDUE", PageStatus::kOverdue)
      .value("WRITE_ERROR", PageStatus::kWriteError)
      .value("OFFLINE", PageStatus::kOffline)
      .value("READ_ERROR", PageStatus::kReadError)
      .value("SHORT_READ", PageStatus::kShortRead)
      .value("CORRUPT", PageStatus::kCorrupt)
      .value("STALE", PageStatus::kStale);
  m.attr("NO_SLOT") = kNoSlot;
  m.attr("NO_NODE") = kNoNode;
}

}  // namespace kvtier
