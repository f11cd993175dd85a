// The few file operations that the disk store is made of, each in one place so that a test can make the n-th of them
// fail or end the process there (common/fault_plan.hpp), or have a log of them (io/file_trace.hpp). Functions that
// return int give 0 or -errno; the others throw std::system_error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace kvtier::files {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Never follows a symbolic link at `path` and takes regular files only; creates with mode 0600.
Fd open(const std::string& path, int flags);
// Like open(), but an absent file is an invalid Fd.
Fd open_existing(const std::string& path, int flags);

std::uint64_t size(int fd);
// Bytes that the file system has set aside for the file.
std::uint64_t allocated(int fd);

int write_all(int fd, const void* data, std::size_t bytes, std::uint64_t offset);
// Bytes read (fewer only at the end of the file) or -errno.
std::int64_t read_all(int fd, void* data, std::size_t bytes, std::uint64_t offset);
int sync_data(int fd);
int sync_directory(const std::string& dir);
int rename_over(const std::string& from, const std::string& to);
int truncate(int fd, std::uint64_t bytes);
int remove(const std::string& path);  // an absent file is a success
// The file has exactly `bytes`, all backed by storage; what lay below is kept and what is new reads as zeros.
int preallocate(int fd, std::uint64_t bytes);

void check(int rc, const std::string& what);  // throws what: <errno's text> for rc < 0

}  // namespace kvtier::files
