#include "cuda/single_page.hpp"

#include "cuda/handles.hpp"

namespace kvtier::cuda {

void copy_page(Runtime& runtime, const DevicePool& pool, Slot slot, std::byte* page, bool up, std::uintptr_t engine) {
  const OwnedEvent behind = make_event(runtime);
  const OwnedStream stream = make_stream(runtime);
  if (!runtime.record_behind(behind.get(), reinterpret_cast<Stream>(engine))) {
    throw Capturing("the engine's stream is being captured into a graph: copy pages before or after it");
  }
  runtime.wait(stream.get(), behind.get());
  for (const Segment& segment : pool.segments()) {
    std::byte* const device = segment.at(slot);
    runtime.copy(up ? device : page, up ? page : device, segment.length, stream.get());
    page += segment.length;
  }
  runtime.finish(stream.get());
}

}  // namespace kvtier::cuda
