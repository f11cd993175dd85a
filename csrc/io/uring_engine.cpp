// FileEngine over io_uring. All memory is allocated at construction; an operation is named in the ring by its index in
// `tags_`, so that a caller's tag may have any value.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "io/file_engine.hpp"
#include "io/ring.hpp"

namespace kvtier {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr unsigned kMaxDepth = 4096;

class UringEngine final : public FileEngine {
 public:
  UringEngine(std::unique_ptr<Ring> ring, unsigned depth, int wake_fd)
      : ring_(std::move(ring)), depth_(depth), wake_fd_(wake_fd), tags_(depth), free_(depth) {
    failed_.reserve(depth);
    for (unsigned i = 0; i < depth; ++i) free_[i] = depth - 1 - i;
  }

  ~UringEngine() override {
    // What the device does not finish in time is cancelled by the kernel, where it can be, when the ring is closed.
    const auto limit = steady_clock::now() + kCloseLimit;
    IoResult ignored[16];
    while (in_flight() > 0 && steady_clock::now() < limit) reap(ignored, 16, std::chrono::milliseconds(50));
    ring_.reset();
    ::close(wake_fd_);
  }

  int register_buffers(std::byte* base, std::size_t bytes) {
    const int rc = ring_->register_buffers(base, bytes);
    if (rc == 0) {
      base_ = base;
      bytes_ = bytes;
    }
    return rc;
  }

  bool submit(const IoRequest& request) override {
    if (free_.empty()) return false;
    const unsigned index = free_.back();
    if (request.length > kMaxTransfer) {
      free_.pop_back();
      tags_[index] = request.tag;
      fail(index, -EINVAL);
      return true;
    }
    io_uring_sqe* sqe = ring_->next();
    if (!sqe) {
      flush();
      sqe = ring_->next();
      if (!sqe) return false;
    }
    free_.pop_back();
    tags_[index] = request.tag;
    fill(sqe, request, index);
    return true;
  }

  void flush() override {
    if (ring_->unsubmitted() > 0) enter(0, nanoseconds(0));
  }

  std::size_t reap(IoResult* results, std::size_t max, nanoseconds timeout) override {
    if (max == 0 || in_flight() == 0) return 0;
    if (!wake_armed_) arm_wake();
    std::size_t count = drain(results, max);
    // One entry even where something is there already: it submits what is queued, and a ring with deferred completions
    // posts nothing outside of it.
    const bool wait = count == 0 && !woken_ && failed_.empty() && timeout > nanoseconds(0);
    if (count < max) {
      enter(wait ? 1 : 0, timeout);
      count += drain(results + count, max - count);
    }
    woken_ = false;
    return count;
  }

  std::size_t in_flight() const override { return depth_ - free_.size(); }

  void wake() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written =
        ::write(wake_fd_, &one, sizeof(one));  // cannot fail but by overflow: set then
  }

  const char* name() const override { return bytes_ > 0 ? "io_uring" : "io_uring, unregistered buffers"; }

 private:
  // Registered files were measured to gain nothing at these transfer sizes and would tie the engine to one store.
  void fill(io_uring_sqe* sqe, const IoRequest& request, unsigned index) const {
    const std::size_t at = static_cast<std::size_t>(request.buffer - base_);
    const bool inside = base_ != nullptr && request.buffer >= base_ && at < bytes_ && request.length <= bytes_ - at &&
                        request.length > 0 && at / Ring::kPiece == (at + request.length - 1) / Ring::kPiece;
    sqe->opcode = inside ? (request.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED)
                         : (request.write ? IORING_OP_WRITE : IORING_OP_READ);
    sqe->buf_index = inside ? static_cast<std::uint16_t>(at / Ring::kPiece) : 0;
    sqe->fd = request.fd;
    sqe->off = request.offset;
    sqe->addr = reinterpret_cast<std::uint64_t>(request.buffer);
    sqe->len = static_cast<std::uint32_t>(request.length);
    sqe->user_data = index;
  }

  void arm_wake() {
    io_uring_sqe* sqe = ring_->next();
    if (!sqe) return;  // the next reap tries again
    sqe->opcode = IORING_OP_POLL_ADD;
    sqe->fd = wake_fd_;
    sqe->poll32_events = POLLIN;
    sqe->user_data = depth_;
    wake_armed_ = true;
  }

  void enter(unsigned min_complete, nanoseconds timeout) {
    const int rc = ring_->enter(min_complete, timeout);
    if (rc == 0 || rc == -EINTR || rc == -EAGAIN || rc == -EBUSY) return;  // the next reap tries again
    std::uint64_t index = 0;
    while (ring_->take_back(&index)) {
      if (index == depth_) {
        wake_armed_ = false;
      } else {
        fail(static_cast<unsigned>(index), rc);
      }
    }
  }

  void fail(unsigned index, std::int64_t error) { failed_.push_back({index, error}); }

  std::size_t drain(IoResult* results, std::size_t max) {
    std::size_t count = 0;
    while (count < max && !failed_.empty()) {
      results[count++] = finish(failed_.back().index, failed_.back().error);
      failed_.pop_back();
    }
    io_uring_cqe cqe{};
    while (count < max && ring_->pop(&cqe)) {
      if (cqe.user_data == depth_) {
        std::uint64_t ignored = 0;
        [[maybe_unused]] const auto read = ::read(wake_fd_, &ignored, sizeof(ignored));
        woken_ = true;
        wake_armed_ = false;
      } else {
        results[count++] = finish(static_cast<unsigned>(cqe.user_data), cqe.res);
      }
    }
    return count;
  }

  IoResult finish(unsigned index, std::int64_t result) {
    free_.push_back(index);
    return {tags_[index], result};
  }

  struct Failed {
    unsigned index;
    std::int64_t error;
  };

  std::unique_ptr<Ring> ring_;
  const unsigned depth_;
  const int wake_fd_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  bool wake_armed_ = false;
  bool woken_ = false;
  std::vector<std::uint64_t> tags_;
  std::vector<unsigned> free_;  // indexes into tags_; its capacity is fixed from the start
  std::vector<Failed> failed_;  // ended before the kernel saw them
};

std::string unregistered_note(int error) {
  std::string note = std::string("buffers are not registered (") + std::strerror(-error);
  rlimit limit{};
  if (error == -ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    note += "; RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur >> 10) + " KiB";
  }
  return note + ")";
}

}  // namespace

std::unique_ptr<FileEngine> make_uring_engine(unsigned depth, std::byte* registered_base, std::size_t registered_bytes,
                                              std::string* note) {
  std::string ignored;
  std::string& why = note ? *note : ignored;
  why.clear();
  depth = std::clamp(depth, 1u, kMaxDepth);
  int error = 0;
  std::unique_ptr<Ring> ring = Ring::open(depth + 1, &error);  // one more for wake()
  if (!ring) {
    why = std::string("io_uring is refused here (") + std::strerror(error) + ")";
    return nullptr;
  }
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    why = std::string("no eventfd for io_uring (") + std::strerror(errno) + ")";
    return nullptr;
  }
  auto engine = std::make_unique<UringEngine>(std::move(ring), depth, wake_fd);
  if (registered_base && registered_bytes > 0) {
    const int rc = engine->register_buffers(registered_base, registered_bytes);
    if (rc < 0) why = unregistered_note(rc);
  }
  return engine;
}

}  // namespace kvtier
