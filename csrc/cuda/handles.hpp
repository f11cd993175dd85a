// What a runtime has made, each with one owner: it is given back also where what follows is refused.
#pragma once

#include <cstddef>
#include <memory>

#include "cuda/runtime.hpp"

namespace kvtier::cuda {

// What was queued on the stream has ended before it goes: then nothing touches the memory of its copies any more.
struct FreeStream {
  void operator()(Stream stream) const noexcept {
    try {
      runtime->finish(stream);
    } catch (...) {  // a context that refuses this is broken, and runs nothing any more
    }
    runtime->free_stream(stream);
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
