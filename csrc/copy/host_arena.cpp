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
#include <system_error>
#include <thread>

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
    if (madvise(base + from, to - from, MADV_POPULATE_WRITE) == 0) return;
    if (errno != EINVAL) {  // EINVAL: a kernel before 5.14
      errors[w] = errno;
      return;
    }
#endif
    for (std::size_t at = from; at < to; at += kPageAlignment) *reinterpret_cast<volatile char*>(base + at) = 0;
  };
  std::vector<std::thread> threads;
  for (std::size_t w = 1; w < workers; ++w) {
    try {
      threads.emplace_back(work, w);
    } catch (const std::system_error&) {  // no thread to be had: slower, not wrong
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

HostArena::HostArena(Slot slots, std::size_t payload_bytes)
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

  const std::size_t reach = mapped_bytes_ + kHuge;  // enough to hold an aligned mapping
  void* got = mmap(nullptr, reach, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) refuse(mapped_bytes_, std::string("mmap: ") + std::strerror(errno));
  auto* start = static_cast<std::byte*>(got);
  const std::size_t skip = (kHuge - reinterpret_cast<std::uintptr_t>(start) % kHuge) % kHuge;
  base_ = start + skip;
  if (skip != 0) munmap(start, skip);
  if (skip != kHuge) munmap(base_ + mapped_bytes_, kHuge - skip);
  madvise(base_, mapped_bytes_, MADV_HUGEPAGE);  // may be refused: then huge_pages() says so
  madvise(base_, mapped_bytes_, MADV_DONTFORK);
  madvise(base_, mapped_bytes_, MADV_DONTDUMP);
  if (const int error = touch(base_, mapped_bytes_); error != 0) {
    munmap(base_, mapped_bytes_);
    refuse(mapped_bytes_, std::string("touching it: ") + std::strerror(error));
  }
  huge_bytes_ = huge_bytes_of(base_, mapped_bytes_);
}

HostArena::~HostArena() { munmap(base_, mapped_bytes_); }

}  // namespace kvtier
