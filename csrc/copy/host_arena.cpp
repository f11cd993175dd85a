#include "copy/host_arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "copy/memory.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;

class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

std::string in_gib(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  return text;
}

[[noreturn]] void refuse(std::size_t bytes, const std::string& why) {
  throw NoMemory("the host tier needs " + in_gib(bytes) + " (" + std::to_string(bytes) + " bytes): " + why);
}

// What the kernel would still give without swapping or killing: the least of the machine's and the control group's
// room. Asked first, because memory is overcommitted: the mapping would succeed and the first touch kill the process.
std::size_t available_bytes() {
  std::size_t least = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    std::size_t kib = 0;
    if (key == "MemAvailable:" && meminfo >> kib) least = kib * 1024;
    std::getline(meminfo, unit);
  }
  std::size_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit && std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    least = std::min(least, limit - std::min(limit, used));
  }
  return least;
}

// Faults `bytes` in by a few threads: clearing pages is limited by one core's stores. Returns 0 or an errno.
int touch(std::byte* base, std::size_t bytes) {
  const std::size_t workers = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
  const std::size_t part = (bytes / kHuge + workers - 1) / workers * kHuge;
  std::vector<int> errors(workers, 0);
  const auto work = [&](std::size_t w) {
    const std::size_t from = std::min(bytes, w * part), to = std::min(bytes, from + part);
    if (from == to) return;
#ifdef MADV_POPULATE_WRITE
    const int rc = memory::advise(base + from, to - from, MADV_POPULATE_WRITE);
    if (rc == 0) return;
    if (rc != -EINVAL) {  // -EINVAL: a kernel before 5.14
      errors[w] = -rc;
      return;
    }
#endif
    for (std::size_t at = from; at < to; at += kPageAlignment) *reinterpret_cast<volatile char*>(base + at) = 0;
  };
  std::vector<std::thread> threads;
  threads.reserve(workers);
  for (std::size_t w = 1; w < workers; ++w) {
    try {
      threads.emplace_back(work, w);
    } catch (const std::exception&) {  // no thread to be had: slower, not wrong
      work(w);
    }
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(errors.begin(), errors.end());
}

// What /proc says of the mappings within [base, base + bytes).
std::size_t huge_bytes_of(const std::byte* base, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(base), end = first + bytes;
  std::ifstream smaps("/proc/self/smaps");
  std::size_t huge = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long from = 0, to = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
      inside = from < end && to > first;
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) {
      huge += kib * 1024;
    }
  }
  return std::min(huge, bytes);
}

}  // namespace

HostArena::HostArena(Slot slots, std::size_t payload_bytes, int numa_node)
    : slots_(slots), payload_bytes_(payload_bytes), page_bytes_(padded(payload_bytes)) {
  if (slots == 0 || slots == kNoSlot) {
    throw std::invalid_argument("slots is " + std::to_string(slots) + "; accepted are 1 to 4294967294");
  }
  if (payload_bytes == 0 || payload_bytes > (std::size_t{1} << 31)) {
    throw std::invalid_argument("payload_bytes is " + std::to_string(payload_bytes) + "; accepted are 1 to 2 GiB");
  }
  mapped_bytes_ = (bytes() + kHuge - 1) / kHuge * kHuge;
  const std::size_t room = available_bytes();
  if (mapped_bytes_ > room) refuse(mapped_bytes_, "only " + in_gib(room) + " are available here");
  checksums_.assign(slots, 0);

  if (const int rc = mapping_.map(mapped_bytes_, kHuge); rc < 0) {
    refuse(mapped_bytes_, std::string("mmap: ") + std::strerror(-rc));
  }
  base_ = mapping_.base();
  if (numa_node >= 0) numa_error_ = -memory::prefer_node(base_, mapped_bytes_, numa_node);  // slower without, not wrong
  memory::advise(base_, mapped_bytes_, MADV_HUGEPAGE);  // may be refused: then huge_pages() says so
  memory::advise(base_, mapped_bytes_, MADV_DONTDUMP);  // may be refused: a core dump is larger then
  // May not: after a fork() the kernel would move pages away from under I/O, and the I/O would go to the wrong ones.
  if (const int rc = memory::advise(base_, mapped_bytes_, MADV_DONTFORK); rc < 0) {
    refuse(mapped_bytes_, std::string("keeping it from child processes: ") + std::strerror(-rc));
  }
  if (const int error = touch(base_, mapped_bytes_); error != 0) {
    refuse(mapped_bytes_, std::string("touching it: ") + std::strerror(error));
  }
  huge_bytes_ = huge_bytes_of(base_, mapped_bytes_);
}

}  // namespace kvtier
