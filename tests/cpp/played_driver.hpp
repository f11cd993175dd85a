// The driver's own functions over an emulated device, with what NVIDIA's documentation of cuStreamBeginCapture and
// cuThreadExchangeStreamCaptureMode says of graph capture:
//
//   - what is queued on a captured stream is recorded and does not run; a stream that waits for an event recorded there
//     is captured from then on, and has to be joined before the end
//   - a thread may make no potentially unsafe call while it captures itself, or while any thread captures in global
//     mode; in thread-local mode only the first counts, in relaxed mode neither
//   - a stream of one capture may not wait for an event of another
//   - to look at a captured event, to wait on the CPU for a captured stream, and to use the default stream while one
//     that it waits for is captured, are refused in every mode
//   - whatever is refused spoils the capture: its end gives no graph
//
// Which calls are potentially unsafe is said of some only. Here all are but those that queue work or ask for facts.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"
#include "cuda/emulated.hpp"
// after runtime.hpp, whose names it uses
#include "cuda/driver_api.hpp"

namespace kvtier::test {

using namespace kvtier::cuda;

class PlayedDriver {
 public:
  // One at a time: the driver's functions know no object.
  explicit PlayedDriver(std::shared_ptr<Emulated> device) : device_(std::move(device)) {
    REQUIRE(one() == nullptr);
    one() = this;
  }
  ~PlayedDriver() { one() = nullptr; }
  PlayedDriver(const PlayedDriver&) = delete;
  PlayedDriver& operator=(const PlayedDriver&) = delete;

  static const api::Functions& raw() {
    static const api::Functions call = functions();
    return call;
  }
  std::shared_ptr<Runtime> open() const {
    static const std::vector<std::byte> image(1);
    return open_device(raw(), 13000, 0, image);
  }

  // ---- the engine's side

  // `blocking`: the default stream waits for this one.
  void begin_capture(Stream stream, int mode = api::kModeGlobal, bool blocking = false) {
    const std::lock_guard lock(mutex_);
    captures_.push_back({mode, std::this_thread::get_id(), blocking, stream, {stream}, {}});
  }
  // What cuStreamEndCapture answers.
  api::Result end_capture(Stream stream) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(captures_.begin(), captures_.end(), [&](auto& c) { return c.origin == stream; });
    REQUIRE(found != captures_.end());
    const api::Result result = found->spoilt               ? api::kCaptureInvalidated
                               : found->streams.size() > 1 ? api::kCaptureUnjoined
                                                           : api::kSuccess;
    captures_.erase(found);
    return result;
  }
  // Of the calling thread.
  static int& mode() {
    thread_local int mode = api::kModeGlobal;
    return mode;
  }
  static int& pushed() {
    thread_local int contexts = 0;
    return contexts;
  }

  // ---- faults

  static constexpr api::Result kThrows = -1;  // no answer: the memory for it is not there
  static constexpr std::uint64_t kForEver = std::numeric_limits<std::uint64_t>::max();
  // Has `symbol` answer `result` from its next call but `after` on, `times` times, and do nothing. "": any function.
  void refuse(const std::string& symbol, api::Result result, std::uint64_t after = 0, std::uint64_t times = kForEver) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t first = calls_[symbol] + 1 + after;
    refusals_[symbol] = {result, first, times == kForEver ? kForEver : first + times};
  }
  void relent() {
    const std::lock_guard lock(mutex_);
    refusals_.clear();
  }
  // Runs `once` at the next call of `symbol`, before it.
  void before(const std::string& symbol, std::function<void()> once) {
    const std::lock_guard lock(mutex_);
    before_[symbol] = std::move(once);
  }
  std::uint64_t calls(const std::string& symbol = "") const {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(symbol);
    return found == calls_.end() ? 0 : found->second;
  }
  int contexts() const { return contexts_; }
  int modules() const { return modules_; }

 private:
  struct Capture {
    int mode;
    std::thread::id thread;
    bool blocking;
    Stream origin;
    std::set<Stream> streams;
    std::set<Event> events;
    bool spoilt = false;
  };
  struct Refusal {
    api::Result result;
    std::uint64_t first, end;  // of its calls
  };
  enum Kind { kFact, kQueues, kUnsafe, kFrees };  // kFrees: unsafe, and nobody would hear that it is refused

  static PlayedDriver*& one() {
    static PlayedDriver* driver = nullptr;
    return driver;
  }

  // What a call is refused with before it is looked at.
  api::Result enter(const char* symbol, Kind kind) {
    std::function<void()> once;
    {
      const std::lock_guard lock(mutex_);
      once = std::exchange(before_[symbol], {});
    }
    if (once) once();
    const std::lock_guard lock(mutex_);
    const std::uint64_t any = ++calls_[""], call = ++calls_[symbol];
    if (kind == kUnsafe || kind == kFrees) {
      if (const api::Result result = unsafe(); result != api::kSuccess) return result;
    }
    if (kind == kFrees) return api::kSuccess;
    for (const auto& [name, number] : {std::pair{std::string(), any}, std::pair{std::string(symbol), call}}) {
      const auto found = refusals_.find(name);
      if (found == refusals_.end() || number < found->second.first || number >= found->second.end) continue;
      if (found->second.result == kThrows) throw std::bad_alloc();
      return found->second.result;
    }
    return api::kSuccess;
  }
  api::Result unsafe() {
    if (mode() == api::kModeRelaxed) return api::kSuccess;
    bool refused = false;
    for (Capture& capture : captures_) {
      const bool own = capture.thread == std::this_thread::get_id() && capture.mode != api::kModeRelaxed;
      const bool others = mode() == api::kModeGlobal && capture.mode == api::kModeGlobal;
      if (own || others) capture.spoilt = refused = true;
    }
    return refused ? api::kCaptureUnsupported : api::kSuccess;
  }
  Capture* capture_of(Stream stream) {
    for (Capture& capture : captures_) {
      if (capture.streams.count(stream) != 0) return &capture;
    }
    return nullptr;
  }
  Capture* capture_of(Event event) {
    for (Capture& capture : captures_) {
      if (capture.events.count(event) != 0) return &capture;
    }
    return nullptr;
  }
  // Which capture the default stream would have a part in.
  Capture* implicit(Stream stream) {
    if (stream != nullptr) return nullptr;
    for (Capture& capture : captures_) {
      if (capture.blocking) return &capture;
    }
    return nullptr;
  }
  static api::Result spoil(Capture* capture, api::Result result) {
    capture->spoilt = true;
    return result;
  }

  // Queues on a stream what runs there, unless that is captured.
  template <class F>
  api::Result queue(const char* symbol, Stream stream, F&& work) {
    if (const api::Result result = enter(symbol, kQueues); result != api::kSuccess) return result;
    {
      const std::lock_guard lock(mutex_);
      if (Capture* const capture = implicit(stream)) return spoil(capture, api::kCaptureImplicit);
      if (capture_of(stream) != nullptr) return api::kSuccess;
    }
    return told([&] { work(*device_); });
  }
  template <class F>
  api::Result make(const char* symbol, F&& work) {
    if (const api::Result result = enter(symbol, kUnsafe); result != api::kSuccess) return result;
    return told([&] { work(*device_); });
  }
  template <class F>
  api::Result free(const char* symbol, F&& work) {
    if (const api::Result result = enter(symbol, kFrees); result != api::kSuccess) return result;
    work(*device_);
    return api::kSuccess;
  }
  template <class F>
  static api::Result told(F&& work) {
    try {
      work();
      return api::kSuccess;
    } catch (const Error&) {
      return api::kUnknown;
    }
  }

  api::Result record(Event event, Stream stream) {
    if (const api::Result result = enter("cuEventRecord", kQueues); result != api::kSuccess) return result;
    {
      const std::lock_guard lock(mutex_);
      if (Capture* const capture = implicit(stream)) return spoil(capture, api::kCaptureImplicit);
      for (Capture& capture : captures_) capture.events.erase(event);
      if (Capture* const capture = capture_of(stream)) {
        capture->events.insert(event);
        return api::kSuccess;
      }
    }
    return told([&] { device_->record(event, stream); });
  }
  api::Result wait(Stream stream, Event event) {
    if (const api::Result result = enter("cuStreamWaitEvent", kQueues); result != api::kSuccess) return result;
    {
      const std::lock_guard lock(mutex_);
      if (Capture* const capture = implicit(stream)) return spoil(capture, api::kCaptureImplicit);
      Capture* const capture = capture_of(stream);
      if (Capture* const recorded = capture_of(event)) {
        if (capture != nullptr && capture != recorded) {
          spoil(recorded, api::kCaptureMerge);
          return spoil(capture, api::kCaptureMerge);
        }
        recorded->streams.insert(stream);
        return api::kSuccess;
      }
      if (capture != nullptr) return spoil(capture, api::kCaptureIsolation);
    }
    return told([&] { device_->wait(stream, event); });
  }
  api::Result query(Event event) {
    if (const api::Result result = enter("cuEventQuery", kUnsafe); result != api::kSuccess) return result;
    {
      const std::lock_guard lock(mutex_);
      if (Capture* const capture = capture_of(event)) return spoil(capture, api::kCapturedEvent);
    }
    bool done = false;
    const api::Result result = told([&] { done = device_->done(event); });
    return result != api::kSuccess ? result : done ? api::kSuccess : api::kNotReady;
  }
  api::Result finish(Stream stream) {
    if (const api::Result result = enter("cuStreamSynchronize", kUnsafe); result != api::kSuccess) return result;
    {
      const std::lock_guard lock(mutex_);
      if (Capture* const capture = implicit(stream)) return spoil(capture, api::kCaptureImplicit);
      if (Capture* const capture = capture_of(stream)) return spoil(capture, api::kCaptureUnsupported);
    }
    return told([&] { device_->finish(stream); });
  }
  api::Result capturing(Stream stream, int* status) {
    if (const api::Result result = enter("cuStreamIsCapturing", kFact); result != api::kSuccess) return result;
    const std::lock_guard lock(mutex_);
    if (implicit(stream) != nullptr) return api::kCaptureImplicit;  // which spoils nothing
    const Capture* const capture = capture_of(stream);
    *status = capture == nullptr ? 0 : capture->spoilt ? 2 : 1;
    return api::kSuccess;
  }
  api::Result copy_batch(api::Pointer* to, api::Pointer* from, std::size_t* bytes, std::size_t count, Stream stream) {
    return queue("cuMemcpyBatchAsync", stream, [&](Emulated& device) {
      CopyList list;
      for (std::size_t i = 0; i < count; ++i) list.add(memory(to[i]), memory(from[i]), bytes[i]);
      device.copy_list(keep(std::move(list)), stream);
    });
  }

  const CopyList& keep(CopyList list) {
    const std::lock_guard lock(mutex_);
    return lists_.emplace_back(std::move(list));
  }
  static void* memory(api::Pointer pointer) { return reinterpret_cast<void*>(pointer); }
  static api::Pointer pointer(void* memory) { return reinterpret_cast<api::Pointer>(memory); }
  static api::Functions functions();

  const std::shared_ptr<Emulated> device_;
  mutable std::mutex mutex_;
  std::list<Capture> captures_;
  std::map<std::string, Refusal> refusals_;
  std::map<std::string, std::function<void()>> before_;
  std::map<std::string, std::uint64_t> calls_;  // "": of all
  std::deque<CopyList> lists_;                  // that the emulated device reads late
  std::atomic<int> contexts_{0}, modules_{0};
};

}  // namespace kvtier::test
