// FileEngine over preadv/pwritev on a few threads, for machines where io_uring is refused.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/file_engine.hpp"

namespace kvtier {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr unsigned kMaxThreads = 64;
constexpr unsigned kMaxDepth = 4096;

std::int64_t transfer(const IoRequest& request) {
  if (request.length > kMaxTransfer) return -EINVAL;
  iovec piece{request.buffer, request.length};
  for (;;) {
    const ssize_t moved = request.write ? ::pwritev(request.fd, &piece, 1, static_cast<off_t>(request.offset))
                                        : ::preadv(request.fd, &piece, 1, static_cast<off_t>(request.offset));
    if (moved >= 0) return moved;
    if (errno != EINTR) return -errno;
  }
}

// A first-in-first-out buffer whose memory is allocated once.
template <typename T>
class Fifo {
 public:
  explicit Fifo(std::size_t capacity) : items_(capacity) {}
  bool empty() const { return count_ == 0; }
  void push(const T& item) { items_[(first_ + count_++) % items_.size()] = item; }
  T pop() {
    const T item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

// Shared with the threads, so that one that hangs in the kernel can outlive the engine.
struct Shared {
  explicit Shared(unsigned depth) : queue(depth), done(depth) {}

  std::mutex mutex;
  std::condition_variable work;      // queue not empty, or stopping
  std::condition_variable progress;  // done not empty, woken, or a thread ended
  Fifo<IoRequest> queue;
  Fifo<IoResult> done;
  unsigned running_threads = 0;
  bool woken = false;
  bool stopping = false;

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [this] { return stopping || !queue.empty(); });
      if (stopping) break;
      const IoRequest request = queue.pop();
      lock.unlock();
      const IoResult result{request.tag, transfer(request)};
      lock.lock();
      done.push(result);
      progress.notify_one();
    }
    --running_threads;
    progress.notify_all();
  }
};

class ThreadEngine final : public FileEngine {
 public:
  ThreadEngine(unsigned threads, unsigned depth) : depth_(depth), shared_(std::make_shared<Shared>(depth)) {
    threads_.reserve(threads);
    for (unsigned i = 0; i < threads; ++i) start_thread();
    label_ = "threads (" + std::to_string(threads_.size()) + ")";
  }

  // What is queued is dropped; what runs is awaited.
  ~ThreadEngine() override {
    std::unique_lock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->work.notify_all();
    const bool ended = shared_->progress.wait_for(lock, kCloseLimit, [this] { return shared_->running_threads == 0; });
    lock.unlock();
    for (std::thread& thread : threads_) ended ? thread.join() : thread.detach();
  }

  bool submit(const IoRequest& request) override {
    if (in_flight_ == depth_) return false;
    ++in_flight_;
    std::lock_guard lock(shared_->mutex);
    shared_->queue.push(request);
    shared_->work.notify_one();
    return true;
  }

  void flush() override {}  // submit() has started it

  std::size_t reap(IoResult* results, std::size_t max, nanoseconds timeout) override {
    if (max == 0 || in_flight_ == 0) return 0;
    std::unique_lock lock(shared_->mutex);
    if (timeout > nanoseconds(0)) {
      shared_->progress.wait_for(lock, timeout, [this] { return shared_->woken || !shared_->done.empty(); });
    }
    shared_->woken = false;
    std::size_t count = 0;
    while (count < max && !shared_->done.empty()) results[count++] = shared_->done.pop();
    in_flight_ -= count;
    return count;
  }

  std::size_t in_flight() const override { return in_flight_; }

  void wake() override {
    std::lock_guard lock(shared_->mutex);
    shared_->woken = true;
    shared_->progress.notify_one();
  }

  const char* name() const override { return label_.c_str(); }

 private:
  void start_thread() {
    {
      std::lock_guard lock(shared_->mutex);
      ++shared_->running_threads;
    }
    try {
      threads_.emplace_back([shared = shared_] { shared->serve(); });
    } catch (const std::exception&) {  // a limit on threads, or on memory: fewer will do, none will not
      std::lock_guard lock(shared_->mutex);
      --shared_->running_threads;
      if (threads_.empty()) throw;
    }
  }

  const std::size_t depth_;
  std::size_t in_flight_ = 0;
  std::string label_;
  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<FileEngine> make_thread_engine(unsigned threads, unsigned depth) {
  return std::make_unique<ThreadEngine>(std::clamp(threads, 1u, kMaxThreads), std::clamp(depth, 1u, kMaxDepth));
}

std::unique_ptr<FileEngine> make_engine(IoPath path, unsigned depth, unsigned threads, std::byte* registered_base,
                                        std::size_t registered_bytes, std::string* note) {
  if (path != IoPath::kThreads) {
    auto engine = make_uring_engine(depth, registered_base, registered_bytes, note);
    if (engine || path == IoPath::kUring) return engine;
  } else if (note) {
    note->clear();
  }
  return make_thread_engine(threads, depth);
}

}  // namespace kvtier
