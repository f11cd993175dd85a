#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "bindings/bindings.hpp"
#include "io/disk_store.hpp"
#include "io/faulty_engine.hpp"
#include "io/file_engine.hpp"
#include "io/file_trace.hpp"
#include "io/probe.hpp"
#include "io/raw_loop.hpp"
#include "io/throttled_engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dimensions>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<Dimensions>, nb::c_contig>;

void raise_os_error(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const std::system_error& failed) {
    const nb::object args = nb::make_tuple(failed.code().value(), failed.what());
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

template <typename T>
T choose(const char* field, const std::string& value, const char* a, const char* b, const char* c) {
  if (value == a) return static_cast<T>(0);
  if (value == b) return static_cast<T>(1);
  if (value == c) return static_cast<T>(2);
  throw std::invalid_argument(std::string("disk.") + field + ": \"" + value + "\"; expected \"" + a + "\", \"" + b +
                              "\" or \"" + c + "\"");
}

const std::uint8_t* digest_bytes(const char* field, const nb::bytes& value) {
  if (value.size() != 32) {
    throw std::invalid_argument(std::string("disk ") + field + ": " + std::to_string(value.size()) +
                                " bytes were given, 32 are needed");
  }
  return static_cast<const std::uint8_t*>(value.data());
}

const std::uint8_t* space_bytes(const std::optional<nb::bytes>& space) {
  return space ? digest_bytes("space", *space) : nullptr;
}

const PageIdentity* identity_of(const DiskStore& store, const ConstBytes& identity) {
  const std::size_t wanted = identity_bytes(store.label_bytes());
  if (identity.size() != wanted || reinterpret_cast<std::uintptr_t>(identity.data()) % alignof(PageIdentity) != 0) {
    throw std::invalid_argument("identity: " + std::to_string(identity.size()) + " bytes were given, " +
                                std::to_string(wanted) + " aligned to 8 are needed");
  }
  return reinterpret_cast<const PageIdentity*>(identity.data());
}

template <typename T, int Dimensions>
Array<T, Dimensions> to_numpy(std::vector<T>&& values, const std::array<std::size_t, Dimensions>& shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<T>*>(memory); });
  return Array<T, Dimensions>(kept->data(), Dimensions, shape.data(), owner);
}

std::unique_ptr<DiskStore> open_store(const std::string& dir, Slot slots, std::size_t payload_bytes,
                                      std::size_t label_bytes, const nb::bytes& geometry_tag, std::uint32_t rank,
                                      std::uint32_t world, const std::string& direct, std::uint32_t journal_entries,
                                      double sync_limit_s) {
  DiskOptions options;
  options.dir = dir;
  options.slots = slots;
  options.payload_bytes = payload_bytes;
  options.label_bytes = label_bytes;
  std::memcpy(options.geometry_tag, digest_bytes("geometry_tag", geometry_tag), sizeof(options.geometry_tag));
  options.rank = rank;
  options.world = world;
  options.journal_entries = journal_entries;
  options.sync_limit = seconds(sync_limit_s);
  options.direct = choose<DirectIo>("direct", direct, "auto", "on", "off");
  nb::gil_scoped_release release;
  return DiskStore::open(options);
}

std::pair<Array<Slot, 1>, Array<std::uint8_t, 2>> scan(const DiskStore& store) {
  DiskStore::Inventory found;
  {
    nb::gil_scoped_release release;
    found = store.scan();
  }
  const std::size_t count = found.slots.size();
  auto slots = to_numpy<Slot, 1>(std::move(found.slots), {count});
  auto identities =
      to_numpy<std::uint8_t, 2>(std::move(found.identities), {count, identity_bytes(store.label_bytes())});
  return {slots, identities};
}

void bind_store(nb::module_& m) {
  nb::class_<IoProbe>(m, "IoProbe", "What I/O a directory allows, found out by doing it.")
      .def_ro("direct", &IoProbe::direct)
      .def_ro("uring", &IoProbe::uring)
      .def_ro("filesystem", &IoProbe::filesystem)
      .def_ro("why", &IoProbe::why);
  m.def("probe_io", &probe, "dir"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<DiskFootprint>(m, "DiskFootprint", "Bytes on disk: slots x (page_bytes + record_bytes) + fixed_bytes.")
      .def(nb::new_(&DiskFootprint::of), "payload_bytes"_a, "label_bytes"_a,
           "journal_entries"_a = DiskOptions{}.journal_entries)
      .def_ro("page_bytes", &DiskFootprint::page_bytes)
      .def_ro("record_bytes", &DiskFootprint::record_bytes)
      .def_ro("fixed_bytes", &DiskFootprint::fixed_bytes)
      .def("bytes", &DiskFootprint::bytes, "slots"_a)
      .def("slots_in", &DiskFootprint::slots_in, "bytes"_a);

  nb::class_<DiskStore>(m, "DiskStore", "The disk tier's files. Use kvtier.tiers.disk.DiskStore.")
      .def(nb::new_(&open_store), "dir"_a, "slots"_a, "payload_bytes"_a, "label_bytes"_a, "geometry_tag"_a,
           "rank"_a = 0, "world"_a = 1, "direct"_a = "auto", "journal_entries"_a = DiskOptions{}.journal_entries,
           "sync_limit_s"_a = 10.0)
      // What works on files waits for a device, and one may hang: without the GIL.
      .def("close", &DiskStore::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("fd", &DiskStore::fd)
      .def_prop_ro("slots", &DiskStore::slots)
      .def_prop_ro("page_bytes", &DiskStore::page_bytes)
      .def_prop_ro("payload_bytes", &DiskStore::payload_bytes)
      .def_prop_ro("label_bytes", &DiskStore::label_bytes)
      .def_prop_ro("footprint", &DiskStore::footprint)
      .def_prop_ro("allocated_bytes", &DiskStore::allocated_bytes, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("direct", &DiskStore::direct)
      .def_prop_ro("io", &DiskStore::io)
      .def_prop_ro("adopted", &DiskStore::adopted)
      .def_prop_ro("notes", &DiskStore::notes)
      .def("offset", &DiskStore::offset, "slot"_a)
      .def("clear_record", &DiskStore::clear_record, "slot"_a, nb::call_guard<nb::gil_scoped_release>(), "0 or -errno.")
      .def(
          "write_record",
          [](DiskStore& store, Slot slot, const ConstBytes& identity, std::uint64_t checksum) {
            const PageIdentity* const named = identity_of(store, identity);
            nb::gil_scoped_release release;
            return store.write_record(slot, named, checksum);
          },
          "slot"_a, "identity"_a.noconvert(), "checksum"_a, "0 or -errno; -ESTALE for an old generation.")
      .def(
          "checksum_for",
          [](const DiskStore& store, Slot slot, const ConstBytes& identity) {
            return store.checksum_for(slot, identity_of(store, identity));
          },
          "slot"_a, "identity"_a.noconvert(), "The page's checksum; 0: the slot holds nothing or another page.")
      .def(
          "generation",
          [](const DiskStore& store, const nb::bytes& space) { return store.generation(digest_bytes("space", space)); },
          "space"_a)
      .def(
          "invalidate",
          [](DiskStore& store, const std::optional<nb::bytes>& space) {
            const std::uint8_t* bytes = space_bytes(space);
            nb::gil_scoped_release release;
            return store.invalidate(bytes);
          },
          "space"_a.none(), "The new generation, durable. OSError: in force, but not durable.")
      .def("scan", &scan, "(slots uint32[n], identities uint8[n, bytes]), oldest first.");
}

std::unique_ptr<FileEngine> new_engine(const std::string& io, unsigned depth, unsigned threads,
                                       const std::optional<Bytes>& registered, std::shared_ptr<FaultPlan> faults) {
  std::string note;
  std::byte* base = registered ? reinterpret_cast<std::byte*>(registered->data()) : nullptr;
  auto engine = make_engine(choose<IoPath>("io", io, "auto", "io_uring", "threads"), depth, threads, base,
                            registered ? registered->size() : 0, &note);
  if (!engine) throw std::invalid_argument("disk.io: \"" + io + "\": " + note + "; expected \"auto\" or \"threads\"");
  return faults ? make_faulty_engine(std::move(engine), std::move(faults)) : std::move(engine);
}

std::vector<std::pair<std::uint64_t, std::int64_t>> reap(FileEngine& engine, std::size_t max, double timeout_s) {
  std::vector<IoResult> results(std::min<std::size_t>(max, 4096));
  results.resize(engine.reap(results.data(), results.size(), seconds(timeout_s)));
  std::vector<std::pair<std::uint64_t, std::int64_t>> pairs;
  for (const IoResult& result : results) pairs.emplace_back(result.tag, result.result);
  return pairs;
}

void bind_engine(nb::module_& m) {
  nb::class_<FileEngine>(m, "FileEngine", "Asynchronous file I/O, for tests and benchmarks. Belongs to one thread.")
      .def(nb::new_(&new_engine), "io"_a = "auto", "depth"_a = 64, "threads"_a = 4,
           "registered"_a.noconvert() = nb::none(), "faults"_a = nb::none(), nb::keep_alive<0, 5>())
      .def(
          "submit",
          [](FileEngine& engine, std::uint64_t tag, int fd, bool write, std::uint64_t offset, const Bytes& buffer) {
            return engine.submit({tag, fd, write, offset, reinterpret_cast<std::byte*>(buffer.data()), buffer.size()});
          },
          "tag"_a, "fd"_a, "write"_a, "offset"_a, "buffer"_a.noconvert(), nb::keep_alive<1, 6>(),
          "False: as many as depth are in flight.")
      .def("flush", &FileEngine::flush, nb::call_guard<nb::gil_scoped_release>())
      .def("reap", &reap, "max"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>(), "[(tag, bytes or -errno)]")
      .def("wake", &FileEngine::wake)
      .def_prop_ro("in_flight", &FileEngine::in_flight)
      .def_prop_ro("name", &FileEngine::name);

  m.def(
      "raw_loop",
      [](int fd, bool write, const Bytes& buffer, std::size_t page_bytes, const Order& order, unsigned in_flight) {
        nb::gil_scoped_release release;
        return raw_loop(fd, write, reinterpret_cast<std::byte*>(buffer.data()), buffer.size(), page_bytes,
                        {order.data(), order.size()}, in_flight);
      },
      "fd"_a, "write"_a, "buffer"_a.noconvert(), "page_bytes"_a, "order"_a.noconvert(), "in_flight"_a,
      "Seconds; the limit of a benchmark.");
}

void bind_faults(nb::module_& m) {
  nb::class_<FaultPlan> plan(m, "FaultPlan", "Which operations go wrong, and how, for tests.");
  nb::enum_<FaultPlan::Kind>(plan, "Kind")
      .value("ERROR", FaultPlan::Kind::kError)
      .value("SHORT", FaultPlan::Kind::kShort)
      .value("FLIP", FaultPlan::Kind::kFlip)
      .value("DELAY", FaultPlan::Kind::kDelay)
      .value("TORN", FaultPlan::Kind::kTorn)
      .value("LOST", FaultPlan::Kind::kLost)
      .value("MISDIRECTED", FaultPlan::Kind::kMisdirected)
      .value("STALE", FaultPlan::Kind::kStale)
      .value("CRASH", FaultPlan::Kind::kCrash)
      .value("TORN_CRASH", FaultPlan::Kind::kTornCrash);
  nb::enum_<FaultPlan::On>(plan, "On")
      .value("ANY", FaultPlan::On::kAny)
      .value("READ", FaultPlan::On::kRead)
      .value("WRITE", FaultPlan::On::kWrite)
      .value("OTHER", FaultPlan::On::kOther)
      .value("MEMORY", FaultPlan::On::kMemory);
  plan.attr("FOREVER") = FaultPlan::kForever;
  plan.def(nb::init<>())
      .def(
          "add",
          [](FaultPlan& self, FaultPlan::Kind kind, std::uint64_t first, std::uint64_t value, std::uint64_t count,
             FaultPlan::On on) { self.add({kind, on, first, count, value}); },
          "kind"_a, "first"_a, "value"_a = 0, "count"_a = 1, "on"_a = FaultPlan::On::kAny)
      .def("clear", &FaultPlan::clear)
      .def("release", &FaultPlan::release)
      .def("count", &FaultPlan::count, "on"_a, "Operations of that sort so far.")
      .def_prop_ro("operations", &FaultPlan::operations)
      .def_prop_ro("fired", &FaultPlan::fired);
  m.def("use_faults", &use_faults, "plan"_a.none(),
        "Spoils the file operations of disk stores and the memory operations of host arenas in this process; "
        "None: no more.");

  nb::class_<Throttle>(m, "Throttle", "The drive that a mover's disk pretends to be, for benchmarks and tests.")
      .def(nb::init<>())
      .def("set", &Throttle::set, "bytes_per_s"_a, "latency_s"_a = 0.0, "0 bytes per second: no limit. From now on.")
      .def_prop_ro("bytes_per_s", &Throttle::bytes_per_s)
      .def_prop_ro("latency_s", &Throttle::latency_s);
}

nb::list stop_trace() {
  static constexpr const char* kNames[] = {"open", "write", "resize", "sync", "sync_directory", "rename", "remove"};
  nb::list out;
  for (const trace::Event& event : trace::stop()) {
    out.append(nb::make_tuple(kNames[static_cast<int>(event.kind)], event.file, event.number, event.path, event.to,
                              nb::bytes(event.bytes.data(), event.bytes.size())));
  }
  return out;
}

void bind_trace(nb::module_& m) {
  m.def("start_file_trace", &trace::start, "Log what changes the files of disk stores in this process, for tests.");
  m.def("file_trace_length", &trace::length);
  m.def("stop_file_trace", &stop_trace, nb::sig("def stop_file_trace() -> list[tuple[str, int, int, str, str, bytes]]"),
        "The log: (what, inode, offset or size or 1 for a new file, path, new path, bytes written).");
}

}  // namespace

void bind_io(nb::module_& m) {
  nb::register_exception_translator(&raise_os_error);
  bind_store(m);
  bind_engine(m);
  bind_faults(m);
  bind_trace(m);
}

}  // namespace kvtier
