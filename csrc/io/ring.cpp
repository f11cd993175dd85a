#include "io/ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <vector>

#include "common/fault_plan.hpp"

namespace kvtier {
namespace {

// The layout of struct io_uring_getevents_arg and __kernel_timespec is fixed by the kernel's ABI.
struct Timespec {
  std::int64_t seconds;
  std::int64_t nanoseconds;
};

std::uint32_t load_acquire(std::uint32_t* value) {
  return std::atomic_ref<std::uint32_t>(*value).load(std::memory_order_acquire);
}

void store_release(std::uint32_t* value, std::uint32_t to) {
  std::atomic_ref<std::uint32_t>(*value).store(to, std::memory_order_release);
}

template <typename T>
T* at(void* base, std::uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset);
}

void* map_ring(int fd, std::size_t bytes, off_t what) {
  void* where = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
  return where == MAP_FAILED ? nullptr : where;
}

}  // namespace

std::unique_ptr<Ring> Ring::open(unsigned entries, int* error) {
  // DEFER_TASKRUN (6.1) runs completions only inside our own enter(); COOP_TASKRUN (5.19) at least without interrupts.
  static constexpr unsigned kModes[] = {
      IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
      IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
      IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN,
      IORING_SETUP_CLAMP,
  };
  *error = 0;
  for (unsigned mode : kModes) {
    io_uring_params params{};
    params.flags = mode;
    const int fd = static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
    if (fd < 0) {
      *error = errno;
      if (errno == EINVAL) continue;  // a flag that this kernel does not know
      return nullptr;
    }
    std::unique_ptr<Ring> ring(new Ring);
    ring->fd_ = fd;
    // Waiting with a limit needs EXT_ARG (5.11); without it a hung operation would hold the thread.
    if (!(params.features & IORING_FEAT_EXT_ARG) || !(params.features & IORING_FEAT_NODROP)) {
      *error = ENOSYS;
      return nullptr;
    }
    if (!ring->map(params)) {
      *error = errno;
      return nullptr;
    }
    *error = 0;
    return ring;
  }
  return nullptr;
}

bool Ring::map(const io_uring_params& params) {
  sq_map_bytes_ = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
  cq_map_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const bool single = params.features & IORING_FEAT_SINGLE_MMAP;
  if (single) sq_map_bytes_ = cq_map_bytes_ = std::max(sq_map_bytes_, cq_map_bytes_);
  sq_map_ = map_ring(fd_, sq_map_bytes_, IORING_OFF_SQ_RING);
  if (!sq_map_) return false;
  cq_map_ = single ? sq_map_ : map_ring(fd_, cq_map_bytes_, IORING_OFF_CQ_RING);
  if (!cq_map_) return false;
  sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  sqes_ = static_cast<io_uring_sqe*>(map_ring(fd_, sqes_bytes_, IORING_OFF_SQES));
  if (!sqes_) return false;

  sq_head_ = at<std::uint32_t>(sq_map_, params.sq_off.head);
  sq_tail_ = at<std::uint32_t>(sq_map_, params.sq_off.tail);
  sq_mask_ = *at<std::uint32_t>(sq_map_, params.sq_off.ring_mask);
  sq_entries_ = params.sq_entries;
  std::uint32_t* array = at<std::uint32_t>(sq_map_, params.sq_off.array);
  for (std::uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
  cq_head_ = at<std::uint32_t>(cq_map_, params.cq_off.head);
  cq_tail_ = at<std::uint32_t>(cq_map_, params.cq_off.tail);
  cq_mask_ = *at<std::uint32_t>(cq_map_, params.cq_off.ring_mask);
  cqes_ = at<io_uring_cqe>(cq_map_, params.cq_off.cqes);
  tail_ = *sq_tail_;
  return true;
}

Ring::~Ring() {
  if (sqes_) ::munmap(sqes_, sqes_bytes_);
  if (cq_map_ && cq_map_ != sq_map_) ::munmap(cq_map_, cq_map_bytes_);
  if (sq_map_) ::munmap(sq_map_, sq_map_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

int Ring::register_buffers(std::byte* base, std::size_t bytes) {
  if (const int rc = fault_of(FaultPlan::On::kMemory); rc < 0) return rc;  // it pins them
  std::vector<iovec> pieces;
  for (std::size_t done = 0; done < bytes; done += kPiece) {
    pieces.push_back({base + done, std::min(kPiece, bytes - done)});
  }
  const long rc = ::syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, pieces.data(),
                            static_cast<unsigned>(pieces.size()));
  return rc < 0 ? -errno : 0;
}

io_uring_sqe* Ring::next() {
  if (unsubmitted() >= sq_entries_) return nullptr;
  io_uring_sqe* sqe = &sqes_[tail_ & sq_mask_];
  std::memset(sqe, 0, sizeof(*sqe));
  ++tail_;
  return sqe;
}

unsigned Ring::unsubmitted() const { return tail_ - load_acquire(sq_head_); }

bool Ring::take_back(std::uint64_t* user_data) {
  if (unsubmitted() == 0) return false;
  --tail_;
  *user_data = sqes_[tail_ & sq_mask_].user_data;
  store_release(sq_tail_, tail_);
  return true;
}

int Ring::enter(unsigned min_complete, std::chrono::nanoseconds timeout) {
  store_release(sq_tail_, tail_);
  Timespec limit{timeout.count() / 1000000000, timeout.count() % 1000000000};
  io_uring_getevents_arg arg{};
  arg.sigmask_sz = _NSIG / 8;
  arg.ts = reinterpret_cast<std::uint64_t>(&limit);
  const long rc = ::syscall(__NR_io_uring_enter, fd_, unsubmitted(), min_complete,
                            IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &arg, sizeof(arg));
  if (rc >= 0) return 0;
  return errno == ETIME ? 0 : -errno;
}

bool Ring::pop(io_uring_cqe* cqe) {
  const std::uint32_t head = *cq_head_;  // only we move it
  if (head == load_acquire(cq_tail_)) return false;
  *cqe = cqes_[head & cq_mask_];
  store_release(cq_head_, head + 1);
  return true;
}

}  // namespace kvtier
