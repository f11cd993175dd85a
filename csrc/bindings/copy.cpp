#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/bindings.hpp"
#include "copy/checksum.hpp"
#include "copy/host_arena.hpp"
#include "copy/lanes.hpp"
#include "copy/page_copy.hpp"
#include "copy/segments.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SlotArray = nb::ndarray<const Slot, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const std::byte* data_of(const Bytes& a) { return reinterpret_cast<const std::byte*>(a.data()); }

void require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

std::uint64_t named_checksum(const Bytes& page, std::uint64_t lo, std::uint64_t hi, const std::string& kernels) {
  const lanes::Kernels* set = lanes::named(kernels.c_str());
  require(set != nullptr, "kernels must be 'scalar', or 'avx2' or 'avx512' where the processor has them");
  nb::gil_scoped_release free;
  return lanes::checksum_by(*set, data_of(page), page.size(), {lo, hi});
}

// Whole batches, for benchmarks and the lab: pages[i] of the arena and slots[i] of the pool.
void check_batch(const DevicePool& pool, HostArena& arena, const SlotArray& slots, const SlotArray& pages) {
  require(slots.size() == pages.size(), "slots and pages must have equal length");
  require(arena.payload_bytes() == pool.payload_bytes(), "the arena's payload_bytes is not the pool's");
  for (std::size_t i = 0; i < slots.size(); ++i) {
    require(slots.data()[i] < pool.slots(), "slots must be less than the pool's slots");
    require(pages.data()[i] < arena.slots(), "pages must be less than the arena's slots");
  }
}

}  // namespace

void bind_copy(nb::module_& m) {
  nb::class_<DevicePool>(m, "DevicePool", "A device tier's pages as segments of memory that `owner` keeps.")
      .def(
          "__init__",
          [](DevicePool* self, const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& segments,
             Slot slots, nb::handle) {
            std::vector<Segment> list;
            for (const auto& [base, stride, length] : segments) {
              list.push_back({reinterpret_cast<std::byte*>(base), stride, length});
            }
            new (self) DevicePool(std::move(list), slots);
          },
          nb::arg("segments"), nb::arg("slots"), nb::arg("owner").none() = nb::none(), nb::keep_alive<1, 4>(),
          "segments: (address, stride per slot, length), all in bytes. `owner` lives as long as this does, and so as "
          "whatever copies to and from it.")
      .def_prop_ro("slots", &DevicePool::slots)
      .def_prop_ro("payload_bytes", &DevicePool::payload_bytes)
      .def_prop_ro("segment_count", [](const DevicePool& self) { return self.segments().size(); })
      .def(
          "gather",
          [](const DevicePool& self, Slot slot, WritableBytes page, std::uint64_t lo, std::uint64_t hi) {
            require(slot < self.slots(), "slot must be less than the pool's slots");
            require(page.size() >= self.payload_bytes(), "page must hold payload_bytes");
            nb::gil_scoped_release free;
            return gather(self, slot, reinterpret_cast<std::byte*>(page.data()), page.size(), {lo, hi});
          },
          nb::arg("slot"), nb::arg("page").noconvert(), nb::arg("lo") = 0, nb::arg("hi") = 0,
          "Copy a slot's segments into `page`, zero the rest of it, and return the checksum.")
      .def(
          "scatter",
          [](const DevicePool& self, Slot slot, Bytes page) {
            require(slot < self.slots(), "slot must be less than the pool's slots");
            require(page.size() >= self.payload_bytes(), "page must hold payload_bytes");
            nb::gil_scoped_release free;
            scatter(data_of(page), self, slot);
          },
          nb::arg("slot"), nb::arg("page").noconvert(), "Copy `page` into a slot's segments.")
      .def(
          "scatter_verified",
          [](const DevicePool& self, Slot slot, Bytes page, std::uint64_t lo, std::uint64_t hi,
             std::uint64_t expected) {
            require(slot < self.slots(), "slot must be less than the pool's slots");
            require(page.size() >= self.payload_bytes(), "page must hold payload_bytes");
            nb::gil_scoped_release free;
            return scatter_verified(data_of(page), self, slot, {lo, hi}, expected);
          },
          nb::arg("slot"), nb::arg("page").noconvert(), nb::arg("lo"), nb::arg("hi"), nb::arg("expected"),
          "Copy `page` into a slot's segments; False when its checksum is not `expected`.");

  nb::class_<HostArena>(m, "HostArena", "Host memory for pages: one resident mapping.")
      .def(nb::init<Slot, std::size_t, int>(), nb::arg("slots"), nb::arg("payload_bytes"), nb::arg("numa_node") = -1,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("slots", &HostArena::slots)
      .def_prop_ro("payload_bytes", &HostArena::payload_bytes)
      .def_prop_ro("page_bytes", &HostArena::page_bytes)
      .def_prop_ro("bytes", &HostArena::bytes)
      .def_prop_ro("mapped_bytes", &HostArena::mapped_bytes)
      .def_prop_ro("huge_bytes", &HostArena::huge_bytes)
      .def_prop_ro("huge_pages", &HostArena::huge_pages)
      .def_prop_ro("numa_error", &HostArena::numa_error)
      .def_prop_ro("base", [](const HostArena& self) { return reinterpret_cast<std::uintptr_t>(self.base()); })
      .def(
          "page",
          [](nb::handle_t<HostArena> handle, Slot slot) {
            HostArena& self = nb::cast<HostArena&>(handle);
            require(slot < self.slots(), "slot must be less than the arena's slots");
            return WritableBytes(self.page(slot), {self.page_bytes()}, handle);
          },
          nb::arg("slot"), "The page's bytes, writable; the view keeps the arena alive.")
      .def(
          "checksum",
          [](HostArena& self, Slot slot) {
            require(slot < self.slots(), "slot must be less than the arena's slots");
            return self.checksum(slot);
          },
          nb::arg("slot"))
      .def(
          "set_checksum",
          [](HostArena& self, Slot slot, std::uint64_t value) {
            require(slot < self.slots(), "slot must be less than the arena's slots");
            self.checksum(slot) = value;
          },
          nb::arg("slot"), nb::arg("value"));

  m.def(
      "checksum",
      [](const Bytes& page, std::uint64_t lo, std::uint64_t hi) {
        nb::gil_scoped_release free;
        return checksum(data_of(page), page.size(), {lo, hi});
      },
      nb::arg("page").noconvert(), nb::arg("lo"), nb::arg("hi"),
      "The checksum of a payload under the key (lo, hi); never 0.");
  m.def("checksum_by", &named_checksum, nb::arg("page").noconvert(), nb::arg("lo"), nb::arg("hi"), nb::arg("kernels"),
        "The same by a named set of kernels, for tests.");
  m.def("copy_kernels", [] { return std::string(lanes::best().name); }, "The kernels that this process copies with.");
  m.def(
      "gather_pages",
      [](const DevicePool& pool, HostArena& arena, const SlotArray& slots, const SlotArray& pages) {
        check_batch(pool, arena, slots, pages);
        nb::gil_scoped_release free;
        for (std::size_t i = 0; i < slots.size(); ++i) {
          const Slot page = pages.data()[i];
          const Slot next = i + 1 < slots.size() ? slots.data()[i + 1] : kNoSlot;
          arena.checksum(page) = gather(pool, slots.data()[i], arena.page(page), arena.page_bytes(), {page, 0}, next);
        }
      },
      nb::arg("pool"), nb::arg("arena"), nb::arg("slots").noconvert(), nb::arg("pages").noconvert(),
      "Gather slots[i] of the pool into pages[i] of the arena under the key (pages[i], 0), for benchmarks.");
  m.def(
      "scatter_pages",
      [](const DevicePool& pool, HostArena& arena, const SlotArray& slots, const SlotArray& pages) {
        check_batch(pool, arena, slots, pages);
        nb::gil_scoped_release free;
        for (std::size_t i = 0; i < slots.size(); ++i) {
          const std::byte* next = i + 1 < slots.size() ? arena.page(pages.data()[i + 1]) : nullptr;
          scatter(arena.page(pages.data()[i]), pool, slots.data()[i], next);
        }
      },
      nb::arg("pool"), nb::arg("arena"), nb::arg("slots").noconvert(), nb::arg("pages").noconvert(),
      "Scatter pages[i] of the arena to slots[i] of the pool, for benchmarks.");
  m.def(
      "checksum_pages",
      [](HostArena& arena, const SlotArray& pages) {
        for (std::size_t i = 0; i < pages.size(); ++i) {
          require(pages.data()[i] < arena.slots(), "pages must be less than the arena's slots");
        }
        nb::gil_scoped_release free;
        std::size_t good = 0;
        for (std::size_t i = 0; i < pages.size(); ++i) {
          const Slot page = pages.data()[i];
          good += checksum(arena.page(page), arena.payload_bytes(), {page, 0}) == arena.checksum(page);
        }
        return good;
      },
      nb::arg("arena"), nb::arg("pages").noconvert(),
      "How many of the pages have their checksum (as gather_pages wrote it).");
  m.def(
      "memcpy_pages",
      [](const DevicePool& pool, HostArena& arena, const SlotArray& slots, const SlotArray& pages) {
        check_batch(pool, arena, slots, pages);
        nb::gil_scoped_release free;
        for (std::size_t i = 0; i < slots.size(); ++i) {
          std::byte* to = arena.page(pages.data()[i]);
          for (const Segment& s : pool.segments()) {
            std::memcpy(to, s.at(slots.data()[i]), s.length);
            to += s.length;
          }
        }
      },
      nb::arg("pool"), nb::arg("arena"), nb::arg("slots").noconvert(), nb::arg("pages").noconvert(),
      "The same bytes as gather_pages by plain memcpy: what the benchmark compares with.");
  m.def(
      "dlpack_layout",
      [](const nb::ndarray<>& array) {
        std::vector<std::size_t> shape;
        std::vector<std::int64_t> strides;
        for (std::size_t i = 0; i < array.ndim(); ++i) {
          shape.push_back(array.shape(i));
          strides.push_back(array.stride(i));
        }
        return std::tuple(reinterpret_cast<std::uintptr_t>(array.data()), shape, strides,
                          static_cast<int>(array.dtype().code), static_cast<int>(array.dtype().bits),
                          static_cast<int>(array.dtype().lanes));
      },
      nb::arg("array"), nb::sig("def dlpack_layout(array: object) -> tuple[int, list[int], list[int], int, int, int]"),
      "(address, shape, strides in elements, DLPack type code, bits, lanes) of an array, on whatever device.");
}

}  // namespace kvtier
