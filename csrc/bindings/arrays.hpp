// NumPy arrays in and out of small, frequent calls, by Python's buffer protocol. nanobind's nb::ndarray goes by DLPack
// and NumPy's own Python code, which takes several microseconds for each array. A list of ids does as well: where an
// engine's pass has left NumPy's code cold, making one array takes longer than all else that a call does.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/tokens.hpp"

namespace kvtier {

template <class T>
struct ArrayType;
template <>
struct ArrayType<bool> {
  static constexpr const char* kName = "bool";
  static constexpr char kFormat = '?';
};
template <>
struct ArrayType<std::uint8_t> {
  static constexpr const char* kName = "uint8";
  static constexpr char kFormat = 'B';
};
template <>
struct ArrayType<std::uint32_t> {
  static constexpr const char* kName = "uint32";
  static constexpr char kFormat = 'I';
};
template <>
struct ArrayType<std::uint64_t> {
  static constexpr const char* kName = "uint64";
  static constexpr char kFormat = 'L';
};

// A C-contiguous array of exactly this type and number of dimensions, borrowed for a call.
template <class T, int D>
class ArrayIn {
 public:
  ArrayIn() = default;
  ArrayIn(ArrayIn&& other) noexcept { *this = std::move(other); }
  ArrayIn& operator=(ArrayIn&& other) noexcept {
    std::swap(view_, other.view_);
    std::swap(shape_, other.shape_);
    std::swap(copied_, other.copied_);
    return *this;
  }
  ~ArrayIn() { PyBuffer_Release(&view_); }  // of nothing, too

  bool borrow(PyObject* source) {
    PyBuffer_Release(&view_);
    if constexpr (std::is_same_v<T, std::uint32_t> && D == 1) {
      if (PyList_CheckExact(source)) return copy(source);
    }
    if (PyObject_GetBuffer(source, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      view_ = Py_buffer{};
      return false;
    }
    const char* format = view_.format == nullptr ? "B" : view_.format;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    if (view_.ndim != D || view_.itemsize != sizeof(T) || format[0] != ArrayType<T>::kFormat || format[1] != 0) {
      return false;
    }
    for (int i = 0; i < D; ++i) shape_[static_cast<std::size_t>(i)] = static_cast<std::size_t>(view_.shape[i]);
    return true;
  }

  const T* data() const { return view_.buf == nullptr ? copied_.data() : static_cast<const T*>(view_.buf); }
  std::size_t size() const {
    std::size_t size = 1;
    for (const std::size_t n : shape_) size *= n;
    return size;
  }
  std::size_t shape(std::size_t i) const { return shape_[i]; }
  std::span<const T> span() const { return {data(), size()}; }

 private:
  bool copy(PyObject* list) {
    copied_.clear();
    shape_[0] = static_cast<std::size_t>(PyList_GET_SIZE(list));
    return plain_ids(list, &copied_);
  }

  Py_buffer view_{};
  std::array<std::size_t, D> shape_{};
  std::vector<T> copied_;
};

// A NumPy array of T on its way to Python.
template <class T>
struct ArrayOut {
  nanobind::object array;
};

// A new one with a copy of `data`, which has as many elements as `shape` says.
template <class T, std::size_t D>
ArrayOut<T> array_of(const T* data, const std::array<std::size_t, D>& shape) {
  namespace nb = nanobind;
  // No initializer that runs Python: it may let another thread have the GIL, which would then wait for it for ever.
  static PyObject* make = nullptr;
  static PyObject* type = nullptr;
  if (type == nullptr) {
    const nb::module_ numpy = nb::module_::import_("numpy");
    make = numpy.attr("ndarray").inc_ref().ptr();
    type = numpy.attr("dtype")(ArrayType<T>::kName).inc_ref().ptr();
  }
  std::size_t count = 1;
  nb::object sizes = nb::steal(PyTuple_New(D));
  for (std::size_t i = 0; i < D; ++i) {
    count *= shape[i];
    PyTuple_SET_ITEM(sizes.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromSize_t(shape[i]));
  }
  const nb::object bytes =
      nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * sizeof(T))));
  if (!bytes.is_valid()) throw nb::python_error();
  if (count != 0) std::memcpy(PyByteArray_AS_STRING(bytes.ptr()), data, count * sizeof(T));
  nb::object out = nb::steal(PyObject_CallFunctionObjArgs(make, sizes.ptr(), type, bytes.ptr(), nullptr));
  if (!out.is_valid()) throw nb::python_error();
  return {std::move(out)};
}

}  // namespace kvtier

namespace nanobind::detail {

template <class T>
constexpr auto array_name() {
  if constexpr (std::is_same_v<T, bool>) {
    return const_name("numpy.typing.NDArray[numpy.bool]");
  } else if constexpr (std::is_same_v<T, std::uint8_t>) {
    return const_name("numpy.typing.NDArray[numpy.uint8]");
  } else if constexpr (std::is_same_v<T, std::uint32_t>) {
    return const_name("numpy.typing.NDArray[numpy.uint32]");
  } else {
    return const_name("numpy.typing.NDArray[numpy.uint64]");
  }
}

template <class T>
struct type_caster<kvtier::ArrayOut<T>> {
  static constexpr auto Name = array_name<T>();
  static handle from_cpp(kvtier::ArrayOut<T> out, rv_policy, cleanup_list*) noexcept { return out.array.release(); }
};

template <class T, int D>
struct type_caster<kvtier::ArrayIn<T, D>> {
  using Value = kvtier::ArrayIn<T, D>;
  static constexpr bool kLists = std::is_same_v<T, std::uint32_t> && D == 1;
  static constexpr auto Name = array_name<T>() + const_name<kLists>(" | list[int]", "");
  template <class U>
  using Cast = movable_cast_t<U>;
  template <class U>
  static constexpr bool can_cast() {
    return true;
  }

  // Nothing may be thrown from here. A list for which there is no memory is refused where it is handed over.
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    try {
      return value_.borrow(source.ptr());
    } catch (const std::bad_alloc&) {
      return lacks_memory_ = true;
    }
  }
  explicit operator Value&() { return whole(); }
  explicit operator Value&&() { return std::move(whole()); }

 private:
  Value& whole() {
    if (lacks_memory_) throw std::bad_alloc();
    return value_;
  }

  Value value_;
  bool lacks_memory_ = false;
};

}  // namespace nanobind::detail
