#include "io/probe.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "common/fault_plan.hpp"
#include "io/file_engine.hpp"
#include "io/files.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kTrial = 4096;  // bytes; also the alignment that every page has
constexpr std::chrono::seconds kTrialLimit{5};

enum class Kind { kStorage, kMemory, kNone };  // where the bytes of a file go

struct Known {
  unsigned long magic;
  const char* name;
  Kind kind = Kind::kStorage;
};
constexpr Known kFilesystems[] = {
    {EXT4_SUPER_MAGIC, "ext4"},
    {XFS_SUPER_MAGIC, "xfs"},
    {BTRFS_SUPER_MAGIC, "btrfs"},
    {OVERLAYFS_SUPER_MAGIC, "overlay"},
    {TMPFS_MAGIC, "tmpfs", Kind::kMemory},
    {RAMFS_MAGIC, "ramfs", Kind::kMemory},
    {HUGETLBFS_MAGIC, "hugetlbfs", Kind::kMemory},
    {PROC_SUPER_MAGIC, "proc", Kind::kNone},
    {SYSFS_MAGIC, "sysfs", Kind::kNone},
    {CGROUP_SUPER_MAGIC, "cgroup", Kind::kNone},
    {CGROUP2_SUPER_MAGIC, "cgroup2", Kind::kNone},
    {DEVPTS_SUPER_MAGIC, "devpts", Kind::kNone},
    {NFS_SUPER_MAGIC, "nfs"},
    {F2FS_SUPER_MAGIC, "f2fs"},
    {FUSE_SUPER_MAGIC, "fuse"},
    {0x2FC12FC1, "zfs"},
    {0x00C36400, "ceph"},
    {V9FS_MAGIC, "9p"},
    {0x0BD00BD0, "lustre"},
    {0xCA451A4E, "bcachefs"},
};

const Known* known_filesystem(unsigned long magic) {
  for (const Known& known : kFilesystems) {
    if (known.magic == magic) return &known;
  }
  return nullptr;
}

[[noreturn]] void refuse(const std::string& dir, const std::string& why) {
  throw std::invalid_argument("disk.path: " + dir + ": " + why);
}

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<std::byte, Free>;

Buffer trial_buffer(unsigned seed) {
  Buffer buffer(static_cast<std::byte*>(std::aligned_alloc(kTrial, kTrial)));
  if (!buffer) throw std::bad_alloc();
  for (std::size_t i = 0; i < kTrial; ++i) buffer.get()[i] = static_cast<std::byte>((i * 31 + seed) >> (i % 5));
  return buffer;
}

// A file without a name by the time this returns, so that nothing stays behind whatever happens next. Invalid when
// O_DIRECT is refused at open.
files::Fd trial_file(const std::string& dir, bool direct) {
  const std::string path = dir + "/probe." + std::to_string(::getpid()) + ".tmp";
  const int flags = O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
  ::unlink(path.c_str());  // of a crashed process that had our number
  int error = -fault_of(FaultPlan::On::kOther);
  files::Fd file(error == 0 ? ::open(path.c_str(), flags, 0600) : -1);
  if (error == 0 && !file.valid()) error = errno;
  ::unlink(path.c_str());  // some file systems create the file and then refuse the flag
  if (error == EINVAL && direct) return file;
  if (error == EROFS) refuse(dir, "is on a read-only file system; expected a writable directory");
  if (error == EACCES || error == EPERM) refuse(dir, "is not writable for this user; expected a writable directory");
  if (error != 0) throw std::system_error(error, std::generic_category(), "cannot create a file in " + dir);
  return file;
}

// 0, -errno, or -EBADMSG where other bytes came back than were written.
int trial_by_calls(int fd) {
  const Buffer out = trial_buffer(7);
  const Buffer in = trial_buffer(0);
  if (const int rc = files::write_all(fd, out.get(), kTrial, kTrial); rc < 0) return rc;
  const std::int64_t read = files::read_all(fd, in.get(), kTrial, kTrial);
  if (read < 0) return static_cast<int>(read);
  return read == kTrial && std::memcmp(in.get(), out.get(), kTrial) == 0 ? 0 : -EBADMSG;
}

int run_one(FileEngine& engine, const IoRequest& request) {
  if (!engine.submit(request)) return -EBUSY;
  IoResult result{};
  const auto limit = std::chrono::steady_clock::now() + kTrialLimit;
  while (engine.reap(&result, 1, std::chrono::milliseconds(100)) == 0) {
    if (std::chrono::steady_clock::now() > limit) return -ETIMEDOUT;
  }
  if (result.result < 0) return static_cast<int>(result.result);
  return result.result == static_cast<std::int64_t>(request.length) ? 0 : -EBADMSG;
}

// Empty, or why io_uring will not do.
std::string trial_by_uring(int fd) {
  std::string note;
  Buffer out = trial_buffer(11);
  Buffer in = trial_buffer(0);
  const std::unique_ptr<FileEngine> engine = make_uring_engine(2, nullptr, 0, &note);
  if (!engine) return note;
  int rc = run_one(*engine, {1, fd, true, 2 * kTrial, out.get(), kTrial});
  if (rc == 0) rc = run_one(*engine, {2, fd, false, 2 * kTrial, in.get(), kTrial});
  if (rc == -ETIMEDOUT) {  // the kernel may still write there
    (void)out.release();
    (void)in.release();
  } else if (rc == 0 && std::memcmp(in.get(), out.get(), kTrial) != 0) {
    rc = -EBADMSG;
  }
  return rc == 0 ? "" : std::string("io_uring fails here (") + std::strerror(-rc) + ")";
}

}  // namespace

std::string check_directory(const std::string& dir) {
  struct stat info{};
  if (::stat(dir.c_str(), &info) != 0) {
    const char* expected = "; expected an existing directory on a disk";
    refuse(dir, (errno == ENOENT ? "does not exist" : std::strerror(errno)) + std::string(expected));
  }
  if (!S_ISDIR(info.st_mode)) refuse(dir, "is not a directory; expected an existing directory on a disk");
  struct statfs fs{};
  if (::statfs(dir.c_str(), &fs) != 0) refuse(dir, std::strerror(errno));
  const unsigned long magic = static_cast<unsigned long>(fs.f_type) & 0xFFFFFFFFul;
  if (const Known* known = known_filesystem(magic)) {
    const std::string name = known->name;
    if (known->kind == Kind::kMemory) {
      refuse(dir, "is on " + name +
                      ", which is memory: a disk tier there would only take RAM; expected a directory "
                      "on a disk");
    }
    if (known->kind == Kind::kNone) {
      refuse(dir, "is on " + name + ", which stores no files; expected a directory on a disk");
    }
    return name;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "type 0x%lx", magic);
  return text;
}

IoProbe probe(const std::string& dir) {
  IoProbe found;
  found.filesystem = check_directory(dir);
  files::Fd file = trial_file(dir, true);
  int error = file.valid() ? trial_by_calls(file.get()) : -EINVAL;
  found.direct = error == 0;
  found.why = found.filesystem + ": ";
  if (found.direct) {
    found.why += "direct I/O";
  } else {
    found.why += std::string("buffered I/O, because direct I/O is refused (") + std::strerror(-error) + ")";
    file = trial_file(dir, false);
    error = trial_by_calls(file.get());
    if (error < 0) throw std::system_error(-error, std::generic_category(), "cannot write and read back in " + dir);
  }
  const std::string refused = trial_by_uring(file.get());
  found.uring = refused.empty();
  found.why += found.uring ? " through io_uring" : " through a pool of threads, because " + refused;
  return found;
}

}  // namespace kvtier
