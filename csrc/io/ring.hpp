// An io_uring instance by raw system calls: set up once, submit in batches, wait with a time limit. Internal to
// csrc/io. The layout follows io_uring_setup(2) and io_uring_enter(2).
#pragma once

#include <linux/io_uring.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvtier {

class Ring {
 public:
  // Null and *error = errno where the kernel refuses. Tries the cheapest completion mode first and falls back for
  // older kernels. The ring belongs to the thread that opens it.
  static std::unique_ptr<Ring> open(unsigned entries, int* error);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Pins memory for READ_FIXED/WRITE_FIXED in pieces of kPiece bytes (the kernel's limit for one). 0 or -errno.
  static constexpr std::size_t kPiece = std::size_t{1} << 30;
  int register_buffers(std::byte* base, std::size_t bytes);

  io_uring_sqe* next();                      // a zeroed entry to fill, or null when the queue is full
  unsigned unsubmitted() const;              // filled and not yet taken by the kernel
  bool take_back(std::uint64_t* user_data);  // undoes the newest of those
  // Hands over what was filled and waits for `min_complete` completions, no longer than `timeout`. 0 or -errno;
  // running out of time is 0.
  int enter(unsigned min_complete, std::chrono::nanoseconds timeout);

  // The oldest completion that was not popped yet.
  bool pop(io_uring_cqe* cqe);

 private:
  Ring() = default;
  bool map(const io_uring_params& params);

  int fd_ = -1;
  void* sq_map_ = nullptr;
  void* cq_map_ = nullptr;
  std::size_t sq_map_bytes_ = 0;
  std::size_t cq_map_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  std::size_t sqes_bytes_ = 0;
  std::uint32_t* sq_head_ = nullptr;
  std::uint32_t* sq_tail_ = nullptr;
  std::uint32_t sq_mask_ = 0;
  std::uint32_t sq_entries_ = 0;
  std::uint32_t* cq_head_ = nullptr;
  std::uint32_t* cq_tail_ = nullptr;
  std::uint32_t cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  std::uint32_t tail_ = 0;  // ours; published to the kernel in enter()
};

}  // namespace kvtier
