#include "bindings/completions.hpp"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <limits>
#include <string>

#include "bindings/arrays.hpp"
#include "bindings/lanes.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr std::size_t kFields = 6, kHopFields = 7;  // that are read, of those in kvtier.messages

// A lane that is not known here carried nothing that could be learnt from.
HopReport hop_of(const nb::tuple& told) {
  HopReport hop;
  if (told.size() < kHopFields) throw nb::cast_error();
  const std::optional<Lane> lane = lane_named(nb::cast<std::string>(told[0]));
  if (!lane) return hop;
  hop.lane = *lane;
  hop.bytes = nb::cast<std::uint64_t>(told[1]);
  hop.queue_s = nb::cast<double>(told[2]);
  hop.busy_s = nb::cast<double>(told[3]);
  hop.started_s = nb::cast<double>(told[4]);
  hop.ended_s = nb::cast<double>(told[5]);
  hop.carried = nb::cast<std::uint64_t>(told[6]);
  return hop;
}

Completion read(nb::handle told) {
  const auto fields = nb::cast<nb::tuple>(told);
  if (fields.size() < kFields) throw nb::cast_error();
  const auto status = nb::cast<ArrayIn<std::uint8_t, 2>>(fields[2]);
  const auto hops = nb::cast<nb::tuple>(fields[3]);
  const bool some_hops = status.shape(0) >= 1 && status.shape(0) <= kMaxHops && hops.size() <= kMaxHops;
  if (!some_hops || status.shape(1) > std::numeric_limits<std::uint32_t>::max()) throw nb::cast_error();
  Completion done;
  done.ticket = nb::cast<Ticket>(fields[0]);
  done.final = nb::cast<bool>(fields[1]);
  done.hop_count = static_cast<int>(status.shape(0));
  done.count = static_cast<std::uint32_t>(status.shape(1));
  const auto* words = reinterpret_cast<const PageStatus*>(status.data());
  done.status.assign(words, words + status.size());
  for (std::size_t hop = 0; hop < hops.size(); ++hop) done.hops[hop] = hop_of(nb::cast<nb::tuple>(hops[hop]));
  done.submitted_s = nb::cast<double>(fields[4]);
  done.finished_s = nb::cast<double>(fields[5]);
  return done;
}

}  // namespace

Completion completion_of(nb::handle told) {
  try {
    return read(told);
  } catch (const nb::cast_error&) {
    const std::string kind = Py_TYPE(told.ptr())->tp_name;
    throw nb::type_error(("completion: this " + kind + " is none; accepted: a kvtier.messages.Completion of one or " +
                          "two hops, its status uint8 [hops, pages]")
                             .c_str());
  }
}

}  // namespace kvtier
