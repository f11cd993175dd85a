// The data plane's front: takes transfers, moves their pages on its own threads, reports each once (see Completion).
// Every method may be called from any thread; only wait() and close() take time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy/host_arena.hpp"
#include "copy/segments.hpp"
#include "io/disk_store.hpp"
#include "mover/copy_executor.hpp"
#include "mover/io_executor.hpp"
#include "mover/scheduler.hpp"
#include "mover/stream_executor.hpp"

namespace kvtier {

struct MoverOptions {
  unsigned copy_threads = 1;
  std::size_t bytes_in_flight = 8u << 20;  // per lane
  std::uint32_t queue_pages = 1u << 15;    // per lane
  bool verify = true;                      // checksum of what the disk gave
  bool verify_host = false;                // checksum of a host page before the device gets it
  std::size_t op_bytes = 1u << 20;         // of merged I/O
  std::chrono::nanoseconds io_limit = std::chrono::seconds(5);
  std::chrono::nanoseconds close_limit = std::chrono::seconds(2);
  EngineFactory make_engine;  // needed with a disk
};

struct MoverStats {
  LaneStats lanes[kLanes];
  IoStats io;
  bool has_disk = false;
  bool offline = false;
  std::uint64_t pending = 0;
  std::string device_note;  // what works worse on the device than it could
};

class Mover {
 public:
  // Each tier may be null (a disk needs a host): paths through it are refused then. All must outlive the mover.
  // `copier` reaches a device with queues of its own; without it the CPU copies, and the device is memory that it can
  // address. Throws std::invalid_argument.
  Mover(const DevicePool* device, HostArena* host, DiskStore* disk, const MoverOptions& options,
        std::unique_ptr<StreamCopier> copier = nullptr);
  ~Mover();

  // Throws std::invalid_argument for an order that makes no sense; nothing was taken then. Anything but kAccepted and
  // kDuplicate means "not now": the caller recomputes, or drops the store. The copies on a device with queues come
  // after all that the engine has queued on `stream` by now.
  Submit submit(Order order, std::uintptr_t stream = 0);
  bool cancel(Ticket ticket) { return parts().scheduler.cancel(ticket); }
  bool promote(Ticket ticket, Priority priority, Time deadline) {
    return parts().scheduler.promote(ticket, priority, deadline);
  }
  std::size_t poll(std::vector<Completion>* out);
  // Whether poll would tell of anything; without `routine` of anything but stores in the background that went well,
  // unless the first of these has ended Ledger::kPatience ago.
  bool has_reports(bool routine = true);
  bool wait(std::chrono::nanoseconds timeout, std::uint64_t seen);
  std::uint64_t reports() const { return parts().scheduler.reports(); }
  // Waits until the first `count` slices of a transfer are there; see Scheduler::wait_slices.
  bool wait_slices(Ticket ticket, int count, std::chrono::nanoseconds timeout) {
    return parts().scheduler.wait_slices(ticket, count, Clock::now() + timeout);
  }
  int fd() const { return parts().scheduler.fd(); }
  void arm(bool on) { parts().scheduler.arm(on); }
  std::size_t pending() const { return parts().scheduler.pending(); }          // not yet polled to their end
  bool knows(Ticket ticket) const { return parts().scheduler.knows(ticket); }  // among the pending
  MoverStats stats() const;

  // Cancels everything, ends the threads, settles what is left; poll() then tells the rest. False: an operation never
  // returned, and the pools, the arena and the disk's file must stay as they are for as long as the process lives.
  bool close();

 private:
  struct Parts {
    explicit Parts(const LedgerOptions& options) : scheduler(options) {}
    ~Parts() { scheduler.close(); }  // or those that were made when another could not be would wait for ever
    Scheduler scheduler;
    std::unique_ptr<CopyExecutor> copies;     // of a device that the CPU copies,
    std::unique_ptr<StreamExecutor> streams;  // or of one with queues
    std::unique_ptr<IoExecutor> io;
    std::mutex closing;  // a thread can be joined once only
    Parts* left_before = nullptr;
  };
  Parts& parts() const;
  void leave();  // them to what may still use them, for as long as the process lives
  void check(const MoverOptions& options) const;
  void check(const Order& order) const;
  void check_cuts(const Order& order) const;
  Slot slots_of(Tier tier) const;

  const DevicePool* device_;
  HostArena* host_;
  DiskStore* disk_;
  const std::uint32_t process_;  // by fork_generation(): a forked child has none of the threads
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvtier
