// The one thread that serves the lanes between host and disk, and owns the file engine.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/host_arena.hpp"
#include "io/disk_store.hpp"
#include "io/file_engine.hpp"
#include "mover/disk_health.hpp"
#include "mover/scheduler.hpp"

namespace kvtier {

// Called in the I/O thread. Null with a reason in `note`: the disk is out of service from the start.
using EngineFactory = std::function<std::unique_ptr<FileEngine>(std::string* note)>;

struct IoOptions {
  EngineFactory make_engine;
  bool verify = true;               // recompute the checksum of what was read
  std::size_t op_bytes = 1u << 20;  // neighbouring pages are merged into one operation up to this size
  unsigned depth = 128;             // operations in flight; the engine must take as many
  std::chrono::nanoseconds io_limit = std::chrono::seconds(5);     // an operation older than this hangs
  std::chrono::nanoseconds close_limit = std::chrono::seconds(2);  // at the end, for what is in flight
};

struct IoStats {
  std::string engine = "none";
  std::string note;     // what the engine has to do without
  std::string warning;  // that the disk is out of service, and why; empty while it serves
  std::uint64_t operations = 0;
  std::uint64_t merged_pages = 0;  // pages that shared an operation with others
  std::uint64_t hung = 0;          // operations that passed io_limit
};

class IoExecutor {
 public:
  IoExecutor(Scheduler& scheduler, HostArena& host, DiskStore& store, IoOptions options);
  ~IoExecutor() { join(); }
  // After the scheduler was closed. Comes back also when the thread does not (blocked()).
  void join();
  // After join(): an operation never returned, so the arena and the file must stay for as long as the process does.
  bool stuck() const { return stuck_.load(); }
  // After join(): the thread hangs in a file operation of the store, and may use this object when it comes back.
  bool blocked() const { return blocked_; }
  // From any thread: takes the disk out of service if the I/O thread hangs, since it cannot see that itself. A page's
  // I/O is asynchronous and watched by that thread, but a record's is not.
  void look(Time now);
  IoStats stats() const;

 private:
  // One operation: neighbouring pages of one hop, one after another in the arena and in the slab.
  struct Op {
    Transfer* transfer = nullptr;
    int hop = 0;
    Lane lane = Lane::kStage;
    std::uint32_t count = 0;
    std::uint32_t pages[Chunk::kMaxPages];
    std::uint64_t expected[Chunk::kMaxPages];  // stage: the record's checksum
    PageStatus status[Chunk::kMaxPages];
    bool in_use = false;
    bool queued = false;    // the engine was full: not submitted yet
    bool landed = false;    // has ended, and waits to be dealt with
    bool released = false;  // no longer counted as in flight
    bool hung = false;
    bool single = false;  // failed as a whole: page `at` goes alone, so that one bad page does not take the others
    std::uint32_t at = 0;
    Time started{};
  };

  // Marks a file operation of the store, which holds the thread for as long as it takes.
  class Blocking {
   public:
    explicit Blocking(IoExecutor& executor) : executor_(executor) {
      executor_.blocking_since_ = Clock::now().time_since_epoch().count();
    }
    ~Blocking() { executor_.blocking_since_ = 0; }

   private:
    IoExecutor& executor_;
  };

  void run();
  void begin();
  void serve();
  bool fill();
  bool reap(bool wants_work);
  void start(const Chunk& chunk);
  PageStatus prepare(const Chunk& chunk, std::uint32_t page, std::uint64_t* expected);
  Op& new_op(const Chunk& chunk);
  void submit(Op& op);
  void drop_queued();
  void handle_landed(std::size_t most);
  void handle(const IoResult& result);
  bool complete(const Op& op, std::int64_t result) const;
  bool handle_single(Op& op, std::int64_t result);
  bool may_go_on(Op& op);
  PageStatus conclude(Op& op, std::uint32_t i, std::int64_t result);
  PageStatus conclude_read(const Op& op, std::uint32_t i, std::int64_t result);
  PageStatus conclude_write(const Op& op, std::uint32_t i, std::int64_t result);
  void finish(Op& op);
  void check_hung(Time now);
  void abandon();
  void note_health(bool ok, const char* what, Slot slot, std::int64_t result);
  bool hangs(Time now) const;
  template <class Why>
  bool go_offline(const Why& why);

  Slot host_slot(const Op& op, std::uint32_t i) const;
  Slot disk_slot(const Op& op, std::uint32_t i) const;

  Scheduler& scheduler_;
  HostArena& host_;
  DiskStore& store_;
  const IoOptions options_;
  std::unique_ptr<FileEngine> engine_;
  std::vector<Op> ops_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> queued_;
  std::vector<IoResult> landed_;  // the first first
  DiskHealth health_;
  std::atomic<bool> offline_{false};
  std::atomic<bool> stuck_{false};
  std::atomic<Clock::rep> blocking_since_{0};  // 0: it does not
  bool blocked_ = false;
  std::mutex end_mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  mutable std::mutex stats_mutex_;
  IoStats stats_;
  bool unexplained_ = false;  // there was no memory for stats_.warning
  std::thread thread_;
};

}  // namespace kvtier
