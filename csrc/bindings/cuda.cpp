#include "bindings/cuda.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "common/forks.hpp"
#include "cuda/driver.hpp"
#include "cuda/emulated.hpp"
#include "cuda/measure.hpp"
#include "cuda/single_page.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using namespace cuda;
using Bytes = nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SlotArray = nb::ndarray<const Slot, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The same object, but others run while it ends: to unpin memory or to unload a device takes long. In a forked child,
// where its threads and locks are the parent's, it is let lie.
template <class T>
std::shared_ptr<T> ends_without_gil(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return {raw, [object = std::move(object), process = fork_generation()](T*) mutable {
            if (process != fork_generation()) {
              static_cast<void>(new std::shared_ptr<T>(std::move(object)));
              return;
            }
            if (PyGILState_Check() == 0) return object.reset();
            nb::gil_scoped_release free;
            object.reset();
          }};
}

Stream stream_of(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

Path path_of(const std::string& name) {
  for (int i = 0; i < kPaths; ++i) {
    if (name == path_name(static_cast<Path>(i))) return static_cast<Path>(i);
  }
  throw nb::value_error(("path \"" + name + "\": pieces, batch, direct or staged").c_str());
}

std::shared_ptr<Emulated> emulated(const std::shared_ptr<Runtime>& device) {
  auto found = std::dynamic_pointer_cast<Emulated>(device);
  if (!found) throw nb::value_error("this is a real device: only an emulated one can be asked for that");
  return found;
}

void check_page(const DevicePool& pool, Slot slot, std::size_t bytes) {
  if (slot >= pool.slots()) throw nb::value_error("slot must be less than the pool's slots");
  if (bytes < pool.payload_bytes()) throw nb::value_error("page must hold payload_bytes");
}

// A copy, so that nobody changes what was found right: others run during a measurement.
std::vector<Slot> copied(const SlotArray& array, Slot limit, const char* wrong) {
  std::vector<Slot> slots(array.data(), array.data() + array.size());
  for (const Slot slot : slots) {
    if (slot >= limit) throw nb::value_error(wrong);
  }
  return slots;
}

double measure_path(const CudaCopies& copies, const DevicePool& pool, HostArena& arena, bool offload,
                    const SlotArray& slots, const SlotArray& pages, unsigned rounds) {
  if (slots.size() != pages.size()) throw nb::value_error("slots and pages must have equal length");
  const std::vector<Slot> from = copied(slots, pool.slots(), "slots must be less than the pool's slots");
  const std::vector<Slot> to = copied(pages, arena.slots(), "pages must be less than the arena's slots");
  nb::gil_scoped_release free;
  Copier copier(copies.device, pool, arena, copies.pinned, copies.options);
  return measure(copier, offload ? Lane::kOffload : Lane::kOnboard, from, to, rounds, arena.payload_bytes());
}

// A PinnedArena of Python's, which outlives whatever else has it.
struct Pinned {
  Pinned(std::shared_ptr<Runtime> device, const HostArena& host, std::size_t chunk_bytes)
      : arena(ends_without_gil(std::make_shared<PinnedArena>(std::move(device), host, chunk_bytes))) {}
  std::shared_ptr<PinnedArena> arena;
};

nb::dict facts_of(const Runtime& device) {
  const DeviceFacts& facts = device.facts();
  nb::dict out;
  out["name"] = facts.name;
  out["ordinal"] = facts.ordinal;
  out["processors"] = facts.processors;
  out["capability"] = nb::make_tuple(facts.major, facts.minor);
  out["driver"] = facts.driver;
  out["numa_node"] = facts.numa_node;
  out["batches"] = facts.batches;
  out["emulated"] = facts.emulated;
  return out;
}

void bind_device(nb::module_& m) {
  nb::class_<Runtime>(m, "CudaDevice", "A CUDA device with the page kernels loaded, or an emulation in host memory.")
      .def_static(
          "open",
          [](int ordinal, const nb::bytes& image) {
            const auto code = image.size() != 0
                                  ? std::as_bytes(std::span(static_cast<const char*>(image.data()), image.size()))
                                  : built_image();
            nb::gil_scoped_release free;  // the driver may take seconds to start
            return ends_without_gil(open_device(ordinal, code));
          },
          nb::arg("ordinal"), nb::arg("image") = nb::bytes("", 0),
          "`image`: machine code of the page kernels, or PTX ending in a zero; empty: what was built in.")
      .def_static(
          "emulated",
          [](std::uint64_t seed, bool watch) {
            return ends_without_gil(std::static_pointer_cast<Runtime>(std::make_shared<Emulated>(seed, watch)));
          },
          nb::arg("seed") = 0, nb::arg("watch") = true)
      .def("facts", &facts_of, nb::sig("def facts(self) -> dict[str, typing.Any]"))
      // The driver lets a call wait for another one, and that may be pinning or loading: without the GIL.
      .def(
          "make_stream", [](Runtime& self) { return reinterpret_cast<std::uintptr_t>(self.make_stream()); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "free_stream", [](Runtime& self, std::uintptr_t stream) { self.free_stream(stream_of(stream)); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "finish", [](Runtime& self, std::uintptr_t stream) { self.finish(stream_of(stream)); }, nb::arg("stream"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read_page",
          [](Runtime& self, const DevicePool& pool, Slot slot, WritableBytes page, std::uintptr_t stream) {
            check_page(pool, slot, page.size());
            nb::gil_scoped_release free;
            copy_page(self, pool, slot, reinterpret_cast<std::byte*>(page.data()), false, stream);
          },
          nb::arg("pool"), nb::arg("slot"), nb::arg("page").noconvert(), nb::arg("stream") = 0)
      .def(
          "write_page",
          [](Runtime& self, const DevicePool& pool, Slot slot, Bytes page, std::uintptr_t stream) {
            check_page(pool, slot, page.size());
            nb::gil_scoped_release free;
            copy_page(self, pool, slot, reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(page.data())), true,
                      stream);
          },
          nb::arg("pool"), nb::arg("slot"), nb::arg("page").noconvert(), nb::arg("stream") = 0)
      .def(
          "owns",
          [](Runtime& self, std::uintptr_t address) {
            std::string why;
            return self.owns(reinterpret_cast<const void*>(address), &why) ? std::string() : why;
          },
          nb::arg("address"), nb::call_guard<nb::gil_scoped_release>(),
          "\"\", or what is there in place of this device's memory.")
      .def(
          "hold",
          [](const std::shared_ptr<Runtime>& self, std::uintptr_t stream, bool held) {
            emulated(self)->hold(stream_of(stream), held);
          },
          nb::arg("stream"), nb::arg("held") = true, "Emulated only: nothing of a held stream runs.")
      .def(
          "stall", [](const std::shared_ptr<Runtime>& self, bool stalls) { emulated(self)->stall(stalls); },
          nb::arg("stalls") = true, "Emulated only: no call returns, but those that free.")
      .def_prop_ro(
          "stalled", [](const std::shared_ptr<Runtime>& self) { return emulated(self)->stalled(); },
          "Emulated only: how many calls wait for that to end.")
      .def(
          "races", [](const std::shared_ptr<Runtime>& self) { return emulated(self)->races(); },
          "Emulated only: uses of the same bytes that nothing ordered.");
}

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::exception<Error>(m, "CudaError", PyExc_RuntimeError);
  bind_device(m);
  nb::class_<Pinned>(m, "PinnedArena", "A HostArena, being pinned for a device by a thread of its own.")
      .def(nb::init<std::shared_ptr<Runtime>, const HostArena&, std::size_t>(), nb::arg("device"), nb::arg("arena"),
           nb::arg("chunk_bytes") = PinnedArena::kChunkBytes, nb::keep_alive<1, 3>())
      .def_prop_ro(
          "pinned", [](const Pinned& self) { return self.arena->pinned(); }, "Pages below this slot are pinned.")
      .def_prop_ro("finished", [](const Pinned& self) { return self.arena->finished(); })
      .def("note", [](const Pinned& self) { return self.arena->note(); })
      .def("wait", [](const Pinned& self) { self.arena->wait(); }, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<CudaCopies>(m, "CudaCopies", "How a mover copies on a CUDA device.")
      .def(
          "__init__",
          [](CudaCopies* self, std::shared_ptr<Runtime> device, const Pinned& pinned, const std::string& offload,
             const std::string& onboard, double processor_share, unsigned places, std::size_t batch_bytes,
             bool host_calls) {
            const CopierOptions options{path_of(offload), path_of(onboard), processor_share,
                                        places,           batch_bytes,      host_calls};
            new (self) CudaCopies{std::move(device), pinned.arena, options};
          },
          nb::arg("device"), nb::arg("pinned"), nb::kw_only(), nb::arg("offload") = "direct",
          nb::arg("onboard") = "direct", nb::arg("processor_share") = 0.08, nb::arg("places") = 4,
          nb::arg("batch_bytes") = 4u << 20, nb::arg("host_calls") = false, nb::keep_alive<1, 3>());
  m.def("measure_path", &measure_path, nb::arg("copies"), nb::arg("pool"), nb::arg("arena"), nb::arg("offload"),
        nb::arg("slots").noconvert(), nb::arg("pages").noconvert(), nb::arg("rounds"),
        "Seconds for `rounds` times slots[i] of the pool to (offload) or from pages[i] of the arena.");
  m.def(
      "cuda_status",
      [] {
        const DriverStatus status = [] {
          nb::gil_scoped_release free;
          return driver_status();
        }();
        nb::dict out;
        out["devices"] = status.devices;
        out["driver"] = status.version;
        out["note"] = status.note;
        out["built_for"] = built_for();
        return out;
      },
      nb::sig("def cuda_status() -> dict[str, typing.Any]"), "What the NVIDIA driver says, and what nvcc built.");
  m.def("cuda_capability", &capability, nb::arg("ordinal"), nb::call_guard<nb::gil_scoped_release>());
  m.def("kernel_source", &kernel_source);
  m.def("kernel_header", &kernel_header);
  m.def(
      "kernel_image", [] { return nb::bytes(built_image().data(), built_image().size()); },
      "The page kernels' machine code as nvcc built it in; empty: it did not.");
}

}  // namespace kvtier
