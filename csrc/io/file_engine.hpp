// Asynchronous file I/O, as the mover sees it: io_uring where the kernel allows it, a pool of threads where not.
//
// Protocol: one thread makes an engine, submits, flushes and reaps; only wake() may be called from another one.
// submit() queues, flush() hands the queue to the kernel (reap() does so too), reap() returns what ended. A buffer and
// a file descriptor belong to the engine from submit() until their tag was reaped. An engine may be destroyed with
// operations in flight (a device that hangs): it waits kCloseLimit for them and then lets go; from then on the kernel
// may still write into their buffers, which therefore must never be used again by the owner (in_flight() before
// destruction says so).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace kvtier {

struct IoRequest {
  std::uint64_t tag;     // returned with the result; any value
  int fd;                // open for as long as the request is in flight
  bool write;            // buffer -> file, else file -> buffer
  std::uint64_t offset;  // bytes from the start of the file
  std::byte* buffer;
  std::size_t length;  // bytes; at most kMaxTransfer
};

struct IoResult {
  std::uint64_t tag;
  std::int64_t result;  // bytes moved (fewer than asked for is a short transfer, reported as it is) or -errno
};

inline constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;
inline constexpr std::chrono::seconds kCloseLimit{5};

class FileEngine {
 public:
  virtual ~FileEngine() = default;

  // False: as many operations are in flight as the engine was made for; reap first. Nothing was queued then.
  virtual bool submit(const IoRequest& request) = 0;
  virtual void flush() = 0;

  // Up to `max` results. Waits until there is one, until `timeout` has passed (so that a hung operation never holds the
  // thread for ever) or until wake(); returns 0 at once when nothing is in flight.
  virtual std::size_t reap(IoResult* results, std::size_t max, std::chrono::nanoseconds timeout) = 0;

  // Submitted and not yet reaped.
  virtual std::size_t in_flight() const = 0;

  // From any thread: the reap() that is waiting, or else the next one that would wait, returns at once.
  virtual void wake() = 0;

  virtual const char* name() const = 0;
};

// io_uring through raw system calls. `registered_base`/`registered_bytes` (may be null/0) is memory that most buffers
// come from; it is pinned once, and where the kernel refuses that (RLIMIT_MEMLOCK) the engine works unpinned. `note`
// (may be null) receives one line: why there is no engine (null is returned), or what the engine has to do without;
// empty when all is well.
std::unique_ptr<FileEngine> make_uring_engine(unsigned depth, std::byte* registered_base, std::size_t registered_bytes,
                                              std::string* note);

// preadv/pwritev on `threads` threads.
std::unique_ptr<FileEngine> make_thread_engine(unsigned threads, unsigned depth);

enum class IoPath : std::uint8_t { kAuto = 0, kUring = 1, kThreads = 2 };

// kAuto: io_uring, else threads with the reason in `note`. kUring: null where io_uring is refused.
std::unique_ptr<FileEngine> make_engine(IoPath path, unsigned depth, unsigned threads, std::byte* registered_base,
                                        std::size_t registered_bytes, std::string* note);

}  // namespace kvtier
