// Token ids as they nearly always come: Python's own whole numbers, alone or in a list.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvtier {

// One of Python's own whole numbers that is a token id; false for anything else, which somebody else will look at.
inline bool plain_id(PyObject* item, std::uint32_t* out) {
  if (!PyLong_CheckExact(item)) return false;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
  if (overflow != 0 || value < 0 || value > 0xFFFFFFFFll) return false;
  *out = static_cast<std::uint32_t>(value);
  return true;
}

// A list of them, behind what is in `out`.
inline bool plain_ids(nanobind::handle tokens, std::vector<std::uint32_t>* out) {
  if (!PyList_CheckExact(tokens.ptr())) return false;
  const Py_ssize_t count = PyList_GET_SIZE(tokens.ptr());
  out->reserve(out->size() + static_cast<std::size_t>(count));
  // Each id is an object of its own somewhere in memory: they are fetched side by side, not one after the other.
  constexpr Py_ssize_t kAhead = 16;
  for (Py_ssize_t i = 0; i < std::min(count, kAhead); ++i) __builtin_prefetch(PyList_GET_ITEM(tokens.ptr(), i));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(PyList_GET_ITEM(tokens.ptr(), i + kAhead));
    std::uint32_t id = 0;
    if (!plain_id(PyList_GET_ITEM(tokens.ptr(), i), &id)) return false;
    out->push_back(id);
  }
  return true;
}

}  // namespace kvtier
