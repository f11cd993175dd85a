#include "io/raw_loop.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

#include "io/ring.hpp"

namespace kvtier {

double raw_loop(int fd, bool write, std::byte* buffer, std::size_t buffer_bytes, std::size_t page_bytes,
                std::span<const std::uint32_t> order, unsigned in_flight) {
  const std::size_t places = page_bytes > 0 ? buffer_bytes / page_bytes : 0;
  if (places == 0 || in_flight == 0) throw std::invalid_argument("raw_loop: the buffer holds no page");
  in_flight = std::min<unsigned>(in_flight, static_cast<unsigned>(std::min<std::size_t>(places, 1024)));
  int error = 0;
  const std::unique_ptr<Ring> ring = Ring::open(in_flight, &error);
  if (!ring) throw std::system_error(error, std::generic_category(), "raw_loop: io_uring is refused");
  const bool fixed = ring->register_buffers(buffer, buffer_bytes) == 0;

  const auto start = std::chrono::steady_clock::now();
  const auto limit = start + std::chrono::seconds(120);
  std::size_t submitted = 0;
  std::size_t ended = 0;
  int failed = 0;  // the errno of the first transfer that did; those under way still use the buffer
  while (ended < (failed == 0 ? order.size() : submitted)) {
    for (; failed == 0 && submitted < order.size() && submitted - ended < in_flight; ++submitted) {
      io_uring_sqe* sqe = ring->next();
      if (!sqe) break;
      const std::size_t at = submitted % places * page_bytes;
      const bool inside = fixed && at / Ring::kPiece == (at + page_bytes - 1) / Ring::kPiece;
      sqe->opcode =
          inside ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED) : (write ? IORING_OP_WRITE : IORING_OP_READ);
      sqe->buf_index = inside ? static_cast<std::uint16_t>(at / Ring::kPiece) : 0;
      sqe->fd = fd;
      sqe->addr = reinterpret_cast<std::uint64_t>(buffer + at);
      sqe->len = static_cast<std::uint32_t>(page_bytes);
      sqe->off = order[submitted] * std::uint64_t{page_bytes};
    }
    if (const int rc = ring->enter(1, std::chrono::seconds(1)); rc < 0 && rc != -EINTR && rc != -EAGAIN) {
      throw std::system_error(-rc, std::generic_category(), "raw_loop");
    }
    for (io_uring_cqe cqe{}; ring->pop(&cqe); ++ended) {
      if (failed == 0 && cqe.res != static_cast<std::int64_t>(page_bytes)) failed = cqe.res < 0 ? -cqe.res : EIO;
    }
    if (std::chrono::steady_clock::now() > limit) throw std::runtime_error("raw_loop: the device hangs");
  }
  if (failed != 0) throw std::system_error(failed, std::generic_category(), "raw_loop: a transfer failed");
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace kvtier
