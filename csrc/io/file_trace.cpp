#include "io/file_trace.hpp"

#include <sys/stat.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace kvtier::trace {
namespace {

std::atomic<bool> on{false};
std::mutex mutex;
std::vector<Event> events;

bool tracing() { return on.load(std::memory_order_relaxed); }

void add(Event event) {
  const std::lock_guard lock(mutex);
  if (tracing()) events.push_back(std::move(event));
}

struct stat info_of(int fd) {
  struct stat info{};
  ::fstat(fd, &info);
  return info;
}

}  // namespace

void start() {
  const std::lock_guard lock(mutex);
  events.clear();
  on = true;
}

std::vector<Event> stop() {
  const std::lock_guard lock(mutex);
  on = false;
  return std::exchange(events, {});
}

std::size_t length() {
  const std::lock_guard lock(mutex);
  return events.size();
}

void opened(int fd, const std::string& path) {
  if (!tracing()) return;
  const struct stat info = info_of(fd);
  add({Kind::kOpen, info.st_ino, info.st_size == 0 ? 1u : 0u, path, {}, {}});
}

void writes(int fd, std::uint64_t offset, const std::byte* data, std::size_t bytes) {
  if (!tracing()) return;
  add({Kind::kWrite, info_of(fd).st_ino, offset, {}, {}, std::string(reinterpret_cast<const char*>(data), bytes)});
}

void resizes(int fd, std::uint64_t bytes) {
  if (tracing()) add({Kind::kResize, info_of(fd).st_ino, bytes, {}, {}, {}});
}

void renames(const std::string& from, const std::string& to) {
  if (tracing()) add({Kind::kRename, 0, 0, from, to, {}});
}

void removes(const std::string& path) {
  if (tracing()) add({Kind::kRemove, 0, 0, path, {}, {}});
}

void synced(int fd) {
  if (tracing()) add({Kind::kSync, info_of(fd).st_ino, 0, {}, {}, {}});
}

void synced_directory(const std::string& path) {
  if (tracing()) add({Kind::kSyncDirectory, 0, 0, path, {}, {}});
}

}  // namespace kvtier::trace
