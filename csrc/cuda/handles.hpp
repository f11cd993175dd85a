// What a runtime has made, each with one owner: it is given back also where what follows is refused.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <thread>

#include "cuda/runtime.hpp"

namespace kvtier::cuda {

// What was queued on the stream has ended before it goes: then nothing touches the memory of its copies any more. A
// refusal does not tell that, so the driver is asked again; not for ever, since a stream that it no longer knows (the
// process may have reset the device) is refused each time.
struct FreeStream {
  static constexpr int kTries = 2000;  // a millisecond apart
  void operator()(Stream stream) const noexcept {
    for (int tries = 0; tries < kTries && !finished(stream); ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    runtime->free_stream(stream);
  }
  bool finished(Stream stream) const noexcept {
    try {
      runtime->finish(stream);
      return true;
    } catch (const Broken&) {  // it runs nothing any more
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  Runtime* runtime = nullptr;
};
struct FreeEvent {
  void operator()(Event event) const noexcept { runtime->free_event(event); }
  Runtime* runtime = nullptr;
};
struct FreeDevice {
  void operator()(void* memory) const noexcept { runtime->free_device(memory); }
  Runtime* runtime = nullptr;
};
struct FreePinned {
  void operator()(void* memory) const noexcept { runtime->free_pinned(memory); }
  Runtime* runtime = nullptr;
};

using OwnedStream = std::unique_ptr<StreamTag, FreeStream>;
using OwnedEvent = std::unique_ptr<EventTag, FreeEvent>;
template <class T>
using DeviceArray = std::unique_ptr<T[], FreeDevice>;
template <class T>
using PinnedArray = std::unique_ptr<T[], FreePinned>;

inline OwnedStream make_stream(Runtime& runtime) { return {runtime.make_stream(), {&runtime}}; }
inline OwnedEvent make_event(Runtime& runtime) { return {runtime.make_event(), {&runtime}}; }
template <class T>
DeviceArray<T> device_array(Runtime& runtime, std::size_t count) {
  return {static_cast<T*>(runtime.device_memory(count * sizeof(T))), {&runtime}};
}
template <class T>
PinnedArray<T> pinned_array(Runtime& runtime, std::size_t count) {
  return {static_cast<T*>(runtime.pinned_memory(count * sizeof(T))), {&runtime}};
}

}  // namespace kvtier::cuda
