// A CUDA device played by host memory: streams are queues, kernels run through the shim, and every order that the real
// driver's rules allow can come about. For tests and for dry runs on machines without a GPU.
//
// It also watches. Each stream and the host have a vector clock, as in a race detector: recording, waiting and looking
// at events are all that carries order from one to another. Two uses of the same bytes, one of them a write, with
// nothing that orders them are reported, whether or not they did harm in this run. Uses by the engine are told to
// compute(), uses by the CPU to host_uses(). Host threads count as one, since locks order them. Told is also what a
// real device would refuse: a kernel that touches a page of the host which is not pinned, a copy that begins in one
// registration and ends outside of it, and to unpin what queued work has yet to use.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/runtime.hpp"
#include "cuda/use_watch.hpp"

namespace kvtier::cuda {

// What goes wrong on purpose; counted from 1, 0 is never.
struct EmulatedFaults {
  std::uint64_t skip_wait = 0;    // this wait of a stream for an event does not happen
  std::uint64_t early_done = 0;   // this look at an event finds it passed when it is not
  std::uint64_t refuse = 0;       // this copy, list or launch is refused
  std::uint64_t refuse_pin = 0;   // this and all later pins are
  std::uint64_t refuse_call = 0;  // this of all calls that can be refused is
};

class Emulated final : public Runtime {
 public:
  using Use = MemoryUse;
  using Faults = EmulatedFaults;

  // `seed` chooses among the orders in which queued work may run; `watch`: look for uses that nothing orders.
  explicit Emulated(std::uint64_t seed = 0, bool watch = true, const Faults& faults = {});
  ~Emulated() override;

  const DeviceFacts& facts() const override { return facts_; }
  Stream make_stream() override;
  void free_stream(Stream stream) noexcept override;
  Event make_event() override;
  void free_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool record_behind(Event event, Stream engine) override;
  bool done(Event event) override;
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
  void copy_list(const CopyList& list, Stream stream) override;
  void launch(Kernel kernel, const PageLaunch& launch, unsigned blocks, Stream stream) override;
  void call(Stream stream, void (*function)(void*), void* context) override;
  void finish(Stream stream) override;
  void* device_memory(std::size_t bytes) override;
  void free_device(void* memory) noexcept override;
  void* pinned_memory(std::size_t bytes) override { return device_memory(bytes); }
  void free_pinned(void* memory) noexcept override { free_device(memory); }
  void pin(void* memory, std::size_t bytes) override;
  void unpin(void* memory) noexcept override;
  bool owns(const void* memory, std::string* why) override;
  void host_uses(const void* memory, std::size_t bytes, bool writes) noexcept override;

  // The engine's side: a step that uses memory as told, and does `work` when it runs.
  void compute(Stream stream, std::vector<Use> uses, std::function<void()> work);
  // Nothing of a held stream runs until it is let go.
  void hold(Stream stream, bool held = true);
  void capture(Stream stream, bool on);
  // No call returns until it is let go, but those that free.
  void stall(bool on = true);
  unsigned stalled() const;             // calls that wait for that
  void run_out();                       // until nothing is queued anywhere, also on streams that were freed
  std::vector<Stream> streams() const;  // that were made and not freed, oldest first

  std::vector<std::string> races() const;  // all that was told
  std::uint64_t waits() const;             // of streams for events
  std::uint64_t looks() const;             // at events that had not passed
  std::uint64_t orders() const;            // copies, lists and launches
  std::uint64_t calls() const;             // that can be refused
  std::size_t pinned_bytes() const;
  std::size_t allocated() const;  // pieces of memory, streams and events that were not freed

 private:
  struct Mark {  // one recording of an event
    bool passed = false;
    VectorClock clock;
  };
  struct Work {
    std::string name;
    std::function<void()> run;
    std::vector<Use> uses;
    std::shared_ptr<Mark> waits_for, records;
    VectorClock host;      // when it was queued
    bool is_call = false;  // runs without the lock
  };
  struct Queue {
    std::deque<Work> work;
    VectorClock clock;
    std::size_t agent = 0;
    bool held = false, busy = false, captured = false, freed = false;
    bool has_run_out() const { return freed && work.empty() && !busy; }
  };
  void run();
  void push(Stream stream, Work work);
  Queue* choose();
  void perform(Queue& queue, std::unique_lock<std::mutex>& lock);
  void check_reached(const std::string& name, const Use& page);
  void check_registrations(const Work& work);
  std::unique_lock<std::mutex> entered();
  void count_order();
  const std::shared_ptr<Queue>& queue_of(Stream stream);

  const bool watch_;
  const Faults faults_;
  const std::uint32_t process_;  // by fork_generation(): a forked child has not the thread
  DeviceFacts facts_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::map<Stream, std::shared_ptr<Queue>> queues_;  // null is the default stream
  std::map<Event, std::shared_ptr<Mark>> events_;
  Regions memory_, pins_;
  VectorClock host_;
  std::size_t agents_ = 1;  // 0 the host, then the streams in order of creation
  std::uintptr_t next_name_ = 0x1000;
  UseWatch uses_;
  std::uint64_t waits_ = 0, looks_ = 0, orders_ = 0, pin_calls_ = 0, calls_ = 0;
  unsigned stalled_ = 0;
  bool stop_ = false, stalls_ = false;
  std::thread thread_;
};

}  // namespace kvtier::cuda
