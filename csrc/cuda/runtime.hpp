// The little of CUDA that the copier needs: streams, events, copies, launches, pinned memory. Two things implement it:
// the NVIDIA driver (driver.hpp) and, for tests and dry runs, an emulation in host memory (emulated.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/kernels.hpp"

namespace kvtier::cuda {

// What the driver said, with the call that it said it of. It tells nothing of what was queued before: that may still
// run.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// The context is broken or gone for good, and with it all that was queued: nothing of that runs any more.
class Broken final : public Error {
 public:
  using Error::Error;
};
// Refused because somebody's work is being captured into a graph: the same may pass once that has ended.
class Capturing final : public Error {
 public:
  using Error::Error;
};

using Stream = struct StreamTag*;  // the driver's CUstream, also the engine's own; null is its default stream
using Event = struct EventTag*;

// Copies of one kind, as the driver takes them; they must stay until the copies have ended.
struct CopyList {
  std::vector<std::uintptr_t> to, from;
  std::vector<std::size_t> bytes;

  std::size_t size() const { return to.size(); }
  void add(void* destination, const void* source, std::size_t size) {
    to.push_back(reinterpret_cast<std::uintptr_t>(destination));
    from.push_back(reinterpret_cast<std::uintptr_t>(source));
    bytes.push_back(size);
  }
  void reserve(std::size_t copies) {
    to.reserve(copies);
    from.reserve(copies);
    bytes.reserve(copies);
  }
  void clear() {
    to.clear();
    from.clear();
    bytes.clear();
  }
};

struct DeviceFacts {
  std::string name;
  int ordinal = 0;
  unsigned processors = 1;  // streaming multiprocessors
  int major = 0, minor = 0;
  int driver = 0;        // the CUDA version it supports, 13000 for 13.0
  int numa_node = -1;    // of the host memory nearest to it; -1: not known
  bool batches = false;  // copies can be given in lists
  bool emulated = false;
};

// Every method throws Error when the driver refuses, std::bad_alloc where there is no memory, and may be called from
// any thread; none breaks what the engine captures into a graph meanwhile, on this thread or another.
class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual const DeviceFacts& facts() const = 0;

  virtual Stream make_stream() = 0;  // of low priority, and not tied to the default stream
  virtual void free_stream(Stream stream) noexcept = 0;
  virtual Event make_event() = 0;
  virtual void free_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;  // for what the event was recorded after last
  // Records behind the work of a stream of the engine's. False: that is being captured into a graph, in which no stream
  // of ours may have a part; the event is not to be waited for.
  virtual bool record_behind(Event event, Stream engine) = 0;
  virtual bool done(Event event) = 0;  // false: not yet, as far as the driver can tell now

  virtual void copy(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  virtual void copy_list(const CopyList& list, Stream stream) = 0;  // where facts().batches
  virtual void launch(Kernel kernel, const PageLaunch& launch, unsigned blocks, Stream stream) = 0;
  virtual void call(Stream stream, void (*function)(void*), void* context) = 0;  // on a thread of the driver's
  virtual void finish(Stream stream) = 0;                                        // the only method that waits

  virtual void* device_memory(std::size_t bytes) = 0;
  virtual void free_device(void* memory) noexcept = 0;
  virtual void* pinned_memory(std::size_t bytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;
  // Pins memory that is there, for copies at full speed and for kernels that read and write it at its own address.
  virtual void pin(void* memory, std::size_t bytes) = 0;
  virtual void unpin(void* memory) noexcept = 0;
  // Whether this is memory of this device. If not, *why says what it is.
  virtual bool owns(const void* memory, std::string* why) = 0;

  // A check that the emulation makes: host memory that was given to a stream is used by the CPU from here on.
  virtual void host_uses(const void* memory, std::size_t bytes, bool writes) noexcept {
    static_cast<void>(memory), static_cast<void>(bytes), static_cast<void>(writes);
  }
};

}  // namespace kvtier::cuda
