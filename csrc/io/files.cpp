#include "io/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <vector>

namespace kvtier::files {
namespace {

std::atomic<std::int64_t> fault_at{0};
std::atomic<std::int64_t> operations{0};
std::atomic<Fault> fault_kind{Fault::kError};
std::atomic<int> fault_error{0};

constexpr int kTear = 1;  // "do half of it, then end": no errno is positive here

// 0, a negative errno for the caller to return, or kTear.
int injected() {
  const std::int64_t at = fault_at.load(std::memory_order_relaxed);
  if (at == 0 || operations.fetch_add(1) + 1 != at) return 0;
  switch (fault_kind.load()) {
    case Fault::kError:
      return -fault_error.load();
    case Fault::kTornCrash:
      return kTear;
    case Fault::kCrash:
      break;
  }
  ::_exit(137);
}

// For operations that have no middle.
int injected_whole() {
  const int rc = injected();
  if (rc == kTear) ::_exit(137);
  return rc;
}

int result(int rc) { return rc < 0 ? -errno : 0; }

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

int write_zeros(int fd, std::uint64_t from, std::uint64_t to) {
  const std::vector<std::byte> zeros(1 << 20);
  while (from < to) {
    const std::size_t piece = static_cast<std::size_t>(std::min<std::uint64_t>(zeros.size(), to - from));
    if (const int rc = write_all(fd, zeros.data(), piece, from); rc < 0) return rc;
    from += piece;
  }
  return 0;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Fd open_existing(const std::string& path, int flags) {
  int rc = injected_whole();
  int fd = -1;
  if (rc == 0) {
    // O_NONBLOCK: a FIFO put in the file's place must not hold us; it means nothing for regular files.
    fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    rc = fd < 0 ? -errno : 0;
  }
  if (rc == -ENOENT && !(flags & O_CREAT)) return Fd();
  if (rc == -ELOOP) raise(ELOOP, path + " is a symbolic link, a regular file is needed");
  if (rc < 0) raise(-rc, "cannot open " + path);
  Fd file(fd);
  struct stat info{};
  if (::fstat(fd, &info) != 0) raise(errno, "cannot examine " + path);
  if (!S_ISREG(info.st_mode)) raise(EINVAL, path + " is not a regular file");
  return file;
}

Fd open(const std::string& path, int flags) {
  Fd file = open_existing(path, flags);
  if (!file.valid()) raise(ENOENT, "cannot open " + path);
  return file;
}

std::uint64_t size(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) raise(errno, "cannot examine an open file");
  return static_cast<std::uint64_t>(info.st_size);
}

std::uint64_t allocated(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) raise(errno, "cannot examine an open file");
  return static_cast<std::uint64_t>(info.st_blocks) * 512;
}

int write_all(int fd, const void* data, std::size_t bytes, std::uint64_t offset) {
  const int fault = injected();
  if (fault < 0) return fault;
  const std::byte* from = static_cast<const std::byte*>(data);
  std::size_t left = fault == kTear ? bytes / 2 : bytes;
  while (left > 0) {
    const ssize_t moved = ::pwrite(fd, from, left, static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    if (moved == 0) return -EIO;
    from += moved;
    offset += static_cast<std::uint64_t>(moved);
    left -= static_cast<std::size_t>(moved);
  }
  if (fault == kTear) ::_exit(137);
  return 0;
}

std::int64_t read_all(int fd, void* data, std::size_t bytes, std::uint64_t offset) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  std::byte* to = static_cast<std::byte*>(data);
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t moved = ::pread(fd, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    if (moved == 0) break;
    done += static_cast<std::size_t>(moved);
  }
  return static_cast<std::int64_t>(done);
}

int sync_data(int fd) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  return result(::fdatasync(fd));
}

int sync_directory(const std::string& dir) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  const Fd fd(::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return fd.valid() ? result(::fsync(fd.get())) : -errno;
}

int rename_over(const std::string& from, const std::string& to) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  return result(::rename(from.c_str(), to.c_str()));
}

int truncate(int fd, std::uint64_t bytes) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  return result(::ftruncate(fd, static_cast<off_t>(bytes)));
}

int remove(const std::string& path) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  return ::unlink(path.c_str()) == 0 || errno == ENOENT ? 0 : -errno;
}

int preallocate(int fd, std::uint64_t bytes) {
  if (const int rc = injected_whole(); rc < 0) return rc;
  const std::uint64_t before = size(fd);
  if (before > bytes) {
    if (const int rc = truncate(fd, bytes); rc < 0) return rc;
  }
  int rc = 0;
  do {
    rc = result(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
  } while (rc == -EINTR);
  // Where the file system cannot reserve, zeros are the only way to be sure that the space is ours.
  if (rc == -EOPNOTSUPP || rc == -ENOSYS) return write_zeros(fd, std::min(before, bytes), bytes);
  return rc;
}

void check(int rc, const std::string& what) {
  if (rc < 0) raise(-rc, what);
}

void arm_fault(std::int64_t nth, Fault fault, int error) {
  operations = 0;
  fault_kind = fault;
  fault_error = error;
  fault_at = nth;
}

std::int64_t disarm_fault() {
  fault_at = 0;
  return operations.load();
}

}  // namespace kvtier::files
