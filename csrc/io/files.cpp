#include "io/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <vector>

#include "common/fault_plan.hpp"
#include "io/file_trace.hpp"
#include "io/spoil.hpp"

namespace kvtier::files {
namespace {

// For operations that move no bytes.
int injected() { return fault_of(FaultPlan::On::kOther); }

int result(int rc) { return rc < 0 ? -errno : 0; }

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

int write_zeros(int fd, std::uint64_t from, std::uint64_t to) {
  // Through the page cache: direct I/O would need the file's present end to be aligned.
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags & ~O_DIRECT) < 0) return -errno;
  const std::vector<std::byte> zeros(1 << 20);
  int rc = 0;
  while (from < to && rc == 0) {
    const std::size_t piece = static_cast<std::size_t>(std::min<std::uint64_t>(zeros.size(), to - from));
    rc = write_all(fd, zeros.data(), piece, from);
    from += piece;
  }
  return ::fcntl(fd, F_SETFL, flags) < 0 && rc == 0 ? -errno : rc;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Fd open_existing(const std::string& path, int flags) {
  int rc = injected();
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
  trace::opened(fd, path);
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
  spoil::Write write(fd, data, bytes, offset);
  if (write.error < 0) return write.error;
  trace::writes(fd, write.offset, write.data, write.bytes);
  for (std::size_t left = write.bytes; left > 0;) {
    const ssize_t moved = ::pwrite(fd, write.data, std::min(left, write.first), static_cast<off_t>(write.offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    if (moved == 0) return -EIO;
    write.data += moved;
    write.offset += static_cast<std::uint64_t>(moved);
    left -= static_cast<std::size_t>(moved);
  }
  if (write.crashes) crash_now();
  return 0;
}

std::int64_t read_all(int fd, void* data, std::size_t bytes, std::uint64_t offset) {
  const spoil::Read read(fd, bytes, offset);
  if (read.error < 0) return read.error;
  std::byte* to = static_cast<std::byte*>(data);
  std::size_t done = 0;
  while (done < read.bytes) {
    const ssize_t moved = ::pread(fd, to + done, read.bytes - done, static_cast<off_t>(read.offset + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    if (moved == 0) break;
    done += static_cast<std::size_t>(moved);
  }
  read.arrived(fd, to, done);
  return static_cast<std::int64_t>(done);
}

int sync_data(int fd) {
  if (const int rc = injected(); rc < 0) return rc;
  const int rc = result(::fdatasync(fd));
  if (rc == 0) trace::synced(fd);
  return rc;
}

int sync_directory(const std::string& dir) {
  if (const int rc = injected(); rc < 0) return rc;
  const Fd fd(::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int rc = fd.valid() ? result(::fsync(fd.get())) : -errno;
  if (rc == 0) trace::synced_directory(dir);
  return rc;
}

int rename_over(const std::string& from, const std::string& to) {
  if (const int rc = injected(); rc < 0) return rc;
  trace::renames(from, to);
  return result(::rename(from.c_str(), to.c_str()));
}

int truncate(int fd, std::uint64_t bytes) {
  if (const int rc = injected(); rc < 0) return rc;
  trace::resizes(fd, bytes);
  return result(::ftruncate(fd, static_cast<off_t>(bytes)));
}

int remove(const std::string& path) {
  if (const int rc = injected(); rc < 0) return rc;
  trace::removes(path);
  return ::unlink(path.c_str()) == 0 || errno == ENOENT ? 0 : -errno;
}

int preallocate(int fd, std::uint64_t bytes) {
  const std::uint64_t before = size(fd);
  if (before > bytes) {
    if (const int rc = truncate(fd, bytes); rc < 0) return rc;
  }
  int rc = injected();
  if (rc == 0) trace::resizes(fd, bytes);
  while (rc == 0) {
    rc = result(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
    if (rc != -EINTR) break;
    rc = 0;
  }
  // Where the file system cannot reserve, zeros are the only way to be sure that the space is ours.
  if (rc == -EOPNOTSUPP || rc == -ENOSYS) return write_zeros(fd, std::min(before, bytes), bytes);
  return rc;
}

void check(int rc, const std::string& what) {
  if (rc < 0) raise(-rc, what);
}

}  // namespace kvtier::files
