#include "mover/mover.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "bindings/cuda.hpp"
#include "bindings/lanes.hpp"
#include "io/faulty_engine.hpp"
#include "io/throttled_engine.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using Slots = ArrayIn<std::uint32_t, 2>;
using Identities = ArrayIn<std::uint8_t, 2>;

IoPath io_path(const std::string& io) {
  if (io == "auto") return IoPath::kAuto;
  if (io == "io_uring") return IoPath::kUring;
  if (io == "threads") return IoPath::kThreads;
  throw std::invalid_argument("io = \"" + io + "\": auto, io_uring or threads");
}

void construct(Mover* self, const DevicePool* device, HostArena* host, DiskStore* disk, const std::string& io,
               unsigned copy_threads, std::size_t bytes_in_flight, std::uint32_t queue_pages, bool verify_host,
               bool verify, unsigned io_threads, double io_limit_s, double close_limit_s, std::size_t op_bytes,
               std::shared_ptr<FaultPlan> faults, std::shared_ptr<Throttle> throttle, const CudaCopies* cuda) {
  MoverOptions options;
  options.copy_threads = copy_threads;
  options.bytes_in_flight = bytes_in_flight;
  options.queue_pages = queue_pages;
  options.verify_host = verify_host;
  options.verify = verify;
  options.io_limit = seconds(io_limit_s);
  options.close_limit = seconds(close_limit_s);
  options.op_bytes = op_bytes;
  if (!faults) faults = faults_in_use();
  options.make_engine = [faults, throttle, path = io_path(io), io_threads,
                         base = host != nullptr ? host->base() : nullptr,
                         bytes = host != nullptr ? host->bytes() : 0](std::string* note) {
    auto engine = make_engine(path, IoOptions{}.depth, io_threads, base, bytes, note);
    if (engine && faults) engine = make_faulty_engine(std::move(engine), faults);
    if (engine && throttle) engine = make_throttled_engine(std::move(engine), throttle);
    return engine;
  };
  nb::gil_scoped_release free;  // the driver may let an allocation wait for what it runs
  std::unique_ptr<StreamCopier> copier;
  if (cuda != nullptr && device != nullptr && host != nullptr) {
    copier = std::make_unique<cuda::Copier>(cuda->device, *device, *host, cuda->pinned, cuda->options);
  }
  new (self) Mover(device, host, disk, options, std::move(copier));
}

bool submit(Mover& self, Ticket ticket, const std::vector<Tier>& path, const Slots& slots, const Identities& identities,
            int priority, double deadline_s, std::uintptr_t stream, const std::vector<std::size_t>& cuts) {
  if (slots.shape(0) != path.size() || slots.shape(1) != identities.shape(0)) {
    throw std::invalid_argument("slots has shape [" + std::to_string(slots.shape(0)) + ", " +
                                std::to_string(slots.shape(1)) + "]: [" + std::to_string(path.size()) + ", " +
                                std::to_string(identities.shape(0)) + "] fits path and identities");
  }
  Order order;
  order.ticket = ticket;
  order.path = path;
  order.slots = slots.data();
  order.count = static_cast<std::uint32_t>(slots.shape(1));
  order.identities = reinterpret_cast<const std::byte*>(identities.data());
  order.identity_bytes = identities.shape(1);
  order.priority = priority_of(priority);
  order.deadline = deadline_of(deadline_s);
  order.cuts = cuts;
  const Submit result = self.submit(std::move(order), stream);
  if (result == Submit::kDuplicate) {
    throw std::invalid_argument("ticket = " + std::to_string(ticket) + ": still in use by an earlier transfer");
  }
  return result == Submit::kAccepted;
}

nb::list poll(Mover& self) {
  std::vector<Completion> completions;
  self.poll(&completions);
  nb::list out;
  for (Completion& completion : completions) out.append(nb::cast(std::move(completion)));
  return out;
}

ArrayOut<std::uint8_t> statuses(const Completion& c) {
  return array_of<std::uint8_t, 2>(reinterpret_cast<const std::uint8_t*>(c.status.data()),
                                   {static_cast<std::size_t>(c.hop_count), c.count});
}

nb::tuple told(const Completion& c) {
  nb::list hops;
  for (int h = 0; h < c.hop_count; ++h) {
    const HopReport& hop = c.hops[h];
    hops.append(nb::make_tuple(lane_name(hop.lane), hop.bytes, hop.queue_s, hop.busy_s, hop.started_s, hop.ended_s,
                               hop.carried));
  }
  return nb::make_tuple(c.ticket, c.final, hops, c.submitted_s, c.finished_s, c.whole());
}

nb::dict lane_stats(const LaneStats& lane) {
  nb::dict out, statuses;
  for (int s = 0; s < kPageStatuses; ++s) {
    if (lane.by_status[s] != 0) statuses[nb::cast(static_cast<PageStatus>(s))] = lane.by_status[s];
  }
  out["transfers"] = lane.transfers;
  out["pages"] = lane.pages;
  out["bytes"] = lane.bytes;
  out["queued_pages"] = lane.queued_pages;
  out["bytes_in_flight"] = lane.bytes_in_flight;
  out["busy_s"] = lane.busy_s;
  out["queue_s"] = lane.queue_s;
  out["by_status"] = statuses;
  return out;
}

nb::dict stats(const Mover& self) {
  const MoverStats stats = self.stats();
  nb::dict out, lanes, disk;
  for (int i = 0; i < kLanes; ++i) lanes[lane_name(static_cast<Lane>(i))] = lane_stats(stats.lanes[i]);
  disk["present"] = stats.has_disk;
  disk["offline"] = stats.offline;
  disk["warning"] = stats.io.warning;
  disk["engine"] = stats.io.engine;
  disk["note"] = stats.io.note;
  disk["operations"] = stats.io.operations;
  disk["merged_pages"] = stats.io.merged_pages;
  disk["hung"] = stats.io.hung;
  out["lanes"] = lanes;
  out["disk"] = disk;
  out["device_note"] = stats.device_note;
  out["pending"] = stats.pending;
  return out;
}

}  // namespace

void bind_mover(nb::module_& m) {
  nb::class_<Completion>(m, "Completion", "What became of a transfer: a status per hop and page.")
      .def("told", &told,
           nb::sig("def told(self) -> tuple[int, bool, list[tuple[str, int, float, float, float, float, int]], float, "
                   "float, bool]"),
           "All but the status: ticket, final, a kvtier.messages.HopReport for each hop, submitted, finished, whole.")
      .def_prop_ro("pages", [](const Completion& c) { return c.count; })
      .def_prop_ro("status", &statuses);
  nb::class_<Mover>(m, "Mover", "Moves pages between tiers on native threads. Use kvtier.mover.Mover.")
      .def("__init__", &construct, nb::arg("device").none(), nb::arg("host").none(), nb::arg("disk").none(),
           nb::arg("io") = "auto", nb::kw_only(), nb::arg("copy_threads") = 1, nb::arg("bytes_in_flight") = 8u << 20,
           nb::arg("queue_pages") = 1u << 15, nb::arg("verify_host") = false, nb::arg("verify") = true,
           nb::arg("io_threads") = 4, nb::arg("io_limit_s") = 5.0, nb::arg("close_limit_s") = 2.0,
           nb::arg("op_bytes") = 1u << 20, nb::arg("faults") = nb::none(), nb::arg("throttle") = nb::none(),
           nb::arg("cuda").none() = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 17>())
      .def("submit", &submit, nb::arg("ticket"), nb::arg("path"), nb::arg("slots"), nb::arg("identities"),
           nb::arg("priority") = 0, nb::arg("deadline_s") = 0.0, nb::arg("stream") = 0,
           nb::arg("cuts") = std::vector<std::size_t>{})
      .def("cancel", &Mover::cancel, nb::arg("ticket"))
      .def(
          "promote",
          [](Mover& self, Ticket ticket, int priority, double deadline_s) {
            return self.promote(ticket, priority_of(priority), deadline_of(deadline_s));
          },
          nb::arg("ticket"), nb::arg("priority"), nb::arg("deadline_s") = 0.0)
      .def("poll", &poll, nb::sig("def poll(self) -> list[Completion]"))
      .def(
          "wait",
          [](Mover& self, double timeout_s, std::int64_t seen) {
            return self.wait(seconds(timeout_s), seen < 0 ? self.reports() : static_cast<std::uint64_t>(seen));
          },
          nb::arg("timeout_s"), nb::arg("seen") = -1, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait_slices",
          [](Mover& self, Ticket ticket, int count, double timeout_s) {
            return self.wait_slices(ticket, count, seconds(timeout_s));
          },
          nb::arg("ticket"), nb::arg("count"), nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def("has_reports", [](Mover& self) { return self.has_reports(); })
      .def(
          "has_news", [](Mover& self) { return self.has_reports(false); },
          "The same, without what may be told later: see kvtier.orders.")
      .def("reports", &Mover::reports)
      .def("fileno", &Mover::fd)
      .def("arm", &Mover::arm, nb::arg("on") = true)
      .def("knows", &Mover::knows, nb::arg("ticket"))
      .def("pending", &Mover::pending)
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
      .def("close", &Mover::close, nb::call_guard<nb::gil_scoped_release>(),
           "False: an operation never returned; this object and its tiers must then live as long as the process.");
}

}  // namespace kvtier
