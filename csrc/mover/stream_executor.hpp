// The thread that serves the lanes between host and a device with queues of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mover/device_copier.hpp"
#include "mover/page_batch.hpp"
#include "mover/scheduler.hpp"

namespace kvtier {

// One thread suffices: it queues batches and looks for their ends, and moves no byte itself. The batches of a lane end
// in the order in which they were queued.
class StreamExecutor {
 public:
  StreamExecutor(Scheduler& scheduler, HostArena& host, std::unique_ptr<StreamCopier> copier, bool verify_host,
                 std::chrono::nanoseconds close_limit);
  ~StreamExecutor();
  void join();  // after the scheduler was closed
  // A batch never ended: the device may still touch its memory, for as long as the process lives.
  bool stuck() const { return stuck_.load(); }
  // A fence behind what is queued on the engine's stream. False: the device refused, and note() says why.
  bool put_behind(std::uintptr_t stream, std::shared_ptr<DeviceFence>* fence);
  std::string note() const;

 private:
  struct Lanes {
    Lane lane;
    std::vector<PageBatch> batches;  // one for each place
    // Places; there is room for all in both, so that the thread which serves them needs no memory.
    std::vector<unsigned> under_way;  // oldest first
    std::vector<unsigned> free;
  };

  // What note() says of transfers, until the next one is taken.
  void refuse(const char* why) noexcept;
  void accept() noexcept;
  void run();
  bool reap(Lanes& lanes);
  bool fill();
  void abandon();
  bool under_way() const;
  Time look_again() const;

  Scheduler& scheduler_;
  HostArena& host_;
  std::unique_ptr<StreamCopier> copier_;
  const bool verify_host_;
  const std::chrono::nanoseconds close_limit_;
  const bool woken_;  // the copier tells of ends
  Lanes lanes_[2];
  std::atomic<bool> stuck_{false};
  std::atomic<bool> refused_{false};  // the last transfer was
  mutable std::mutex note_mutex_;
  std::string note_;
  std::thread thread_;
};

}  // namespace kvtier
