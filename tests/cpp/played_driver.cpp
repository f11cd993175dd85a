// The driver's functions, each by what PlayedDriver makes of it.
#include "played_driver.hpp"

namespace kvtier::test {

api::Functions PlayedDriver::functions() {
  api::Functions call;
  call.device_get = [](api::Device*, int) { return one()->enter("cuDeviceGet", kFact); };
  call.device_name = [](char* name, int, api::Device) {
    name[0] = 'P';
    return one()->enter("cuDeviceGetName", kFact);
  };
  call.device_attribute = [](int* value, int which, api::Device) {
    *value = which == api::kProcessors ? 132 : which == api::kHostPointerForRegistered ? 1 : 0;
    return one()->enter("cuDeviceGetAttribute", kFact);
  };
  call.retain = [](api::Context*, api::Device) {
    const api::Result result = one()->enter("cuDevicePrimaryCtxRetain", kUnsafe);
    one()->contexts_ += result == api::kSuccess;
    return result;
  };
  call.release = [](api::Device) {
    return one()->free("cuDevicePrimaryCtxRelease", [](Emulated&) { --one()->contexts_; });
  };
  call.push = [](api::Context) {
    const api::Result result = one()->enter("cuCtxPushCurrent", kFact);
    pushed() += result == api::kSuccess;
    return result;
  };
  call.pop = [](api::Context*) {
    --pushed();
    return api::kSuccess;
  };
  call.exchange_mode = [](int* mode_of_thread) {
    // What a thread gets back is not refused: nobody could do anything about it.
    const bool back = mode() == api::kModeRelaxed;
    const api::Result result = back ? api::kSuccess : one()->enter("cuThreadExchangeStreamCaptureMode", kFact);
    if (result == api::kSuccess) std::swap(*mode_of_thread, mode());
    return result;
  };
  call.stream_range = [](int*, int*) { return one()->enter("cuCtxGetStreamPriorityRange", kFact); };
  call.stream_create = [](Stream* stream, unsigned, int) {
    return one()->make("cuStreamCreateWithPriority", [&](Emulated& device) { *stream = device.make_stream(); });
  };
  call.stream_destroy = [](Stream stream) {
    return one()->free("cuStreamDestroy", [&](Emulated& device) { device.free_stream(stream); });
  };
  call.stream_wait = [](Stream stream, Event event, unsigned) { return one()->wait(stream, event); };
  call.stream_finish = [](Stream stream) { return one()->finish(stream); };
  call.stream_capturing = [](Stream stream, int* status) { return one()->capturing(stream, status); };
  call.event_create = [](Event* event, unsigned) {
    return one()->make("cuEventCreate", [&](Emulated& device) { *event = device.make_event(); });
  };
  call.event_destroy = [](Event event) {
    return one()->free("cuEventDestroy", [&](Emulated& device) { device.free_event(event); });
  };
  call.event_record = [](Event event, Stream stream) { return one()->record(event, stream); };
  call.event_query = [](Event event) { return one()->query(event); };
  call.copy = [](api::Pointer to, api::Pointer from, std::size_t bytes, Stream stream) {
    return one()->queue("cuMemcpyAsync", stream,
                        [&](Emulated& device) { device.copy(memory(to), memory(from), bytes, stream); });
  };
  call.launch_host = [](Stream stream, void (*function)(void*), void* context) {
    return one()->queue("cuLaunchHostFunc", stream, [&](Emulated& device) { device.call(stream, function, context); });
  };
  call.module_load = [](api::Module* module, const void*) {
    return one()->make("cuModuleLoadData", [&](Emulated&) {
      ++one()->modules_;
      *module = reinterpret_cast<api::Module>(one());
    });
  };
  call.module_unload = [](api::Module) { return one()->free("cuModuleUnload", [](Emulated&) { --one()->modules_; }); };
  call.module_function = [](api::Function* function, api::Module, const char* name) {
    for (int k = 0; k < kKernels; ++k) {
      if (name == std::string(kernel_name(static_cast<Kernel>(k)))) *function = reinterpret_cast<api::Function>(k + 1L);
    }
    return one()->enter("cuModuleGetFunction", kFact);
  };
  call.launch = [](api::Function function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   Stream stream, void** arguments, void**) {
    return one()->queue("cuLaunchKernel", stream, [&](Emulated& device) {
      const auto kernel = static_cast<Kernel>(reinterpret_cast<std::intptr_t>(function) - 1);
      device.launch(kernel, *static_cast<const PageLaunch*>(arguments[0]), blocks, stream);
    });
  };
  call.device_alloc = [](api::Pointer* out, std::size_t bytes) {
    return one()->make("cuMemAlloc", [&](Emulated& device) { *out = pointer(device.device_memory(bytes)); });
  };
  call.device_free = [](api::Pointer old) {
    return one()->free("cuMemFree", [&](Emulated& device) { device.free_device(memory(old)); });
  };
  call.host_alloc = [](void** out, std::size_t bytes, unsigned) {
    return one()->make("cuMemHostAlloc", [&](Emulated& device) { *out = device.pinned_memory(bytes); });
  };
  call.host_free = [](void* old) {
    return one()->free("cuMemFreeHost", [&](Emulated& device) { device.free_pinned(old); });
  };
  call.host_register = [](void* memory, std::size_t bytes, unsigned) {
    return one()->make("cuMemHostRegister", [&](Emulated& device) { device.pin(memory, bytes); });
  };
  call.host_unregister = [](void* memory) {
    return one()->free("cuMemHostUnregister", [&](Emulated& device) { device.unpin(memory); });
  };
  call.pointer_attribute = [](void* value, int which, api::Pointer) {
    *static_cast<int*>(value) = which == api::kPointerMemoryType ? static_cast<int>(api::kMemoryDevice) : 0;
    return one()->enter("cuPointerGetAttribute", kFact);
  };
  call.copy_batch = [](api::Pointer* to, api::Pointer* from, std::size_t* bytes, std::size_t count,
                       api::CopyAttributes*, std::size_t*, std::size_t,
                       Stream stream) { return one()->copy_batch(to, from, bytes, count, stream); };
  return call;
}

}  // namespace kvtier::test
