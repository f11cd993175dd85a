// A zeroed array whose size never changes: its memory is all there, and all touched once it is constructed.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace kvtier {

template <class T>
class Array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Array() = default;
  explicit Array(std::size_t size) : size_(size) {
    if (size == 0) return;
    void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(memory);
#ifdef MADV_HUGEPAGE
    if (bytes() >= (2u << 20)) madvise(memory, bytes(), MADV_HUGEPAGE);  // a hint; nothing depends on it
#endif
    touch();
  }
  Array(Array&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (data_ != nullptr) munmap(data_, bytes());
  }

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  void touch() {
    auto* byte = reinterpret_cast<volatile char*>(data_);
    for (std::size_t at = 0; at < bytes(); at += 4096) byte[at] = 0;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvtier
