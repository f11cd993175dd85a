#include "cuda/driver.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <new>

#include "common/forks.hpp"
#include "cuda/driver_api.hpp"

namespace kvtier::cuda {
namespace {

// What dlopen found, once for the process. The library is never closed: the driver's threads live in it.
struct Library {
  api::Functions call;
  std::string fault;  // why there is none
  int version = 0;
  int devices = 0;
};

std::string describe(const api::Functions& call, api::Result result) {
  const char *name = nullptr, *text = nullptr;
  if (call.error_name != nullptr) call.error_name(result, &name);
  if (call.error_text != nullptr) call.error_text(result, &text);
  return (name != nullptr ? std::string(name) : "error " + std::to_string(result)) +
         (text != nullptr ? std::string(": ") + text : "");
}

void find_batch(api::Functions& call) {
  void* found = nullptr;
  if (call.entry_point("cuMemcpyBatchAsync", &found, 13000, 0, nullptr) == api::kSuccess && found != nullptr) {
    call.copy_batch = reinterpret_cast<decltype(call.copy_batch)>(found);
    return;
  }
  found = nullptr;
  if (call.entry_point("cuMemcpyBatchAsync", &found, 12080, 0, nullptr) == api::kSuccess && found != nullptr) {
    call.copy_batch_12 = reinterpret_cast<decltype(call.copy_batch_12)>(found);
  }
}

Library open_library() {
  Library library;
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.fault = "no NVIDIA driver (libcuda.so.1 cannot be opened)";
    return library;
  }
#define KVTIER_CUDA_FIND(member, symbol, arguments)                                             \
  library.call.member = reinterpret_cast<decltype(library.call.member)>(dlsym(handle, symbol)); \
  if (library.call.member == nullptr) library.fault = "the NVIDIA driver is too old: it has no " symbol;
  KVTIER_CUDA_FUNCTIONS(KVTIER_CUDA_FIND)
#undef KVTIER_CUDA_FIND
  if (!library.fault.empty()) return library;
  api::Result result = library.call.init(0);
  if (result == api::kSuccess) result = library.call.version(&library.version);
  if (result == api::kSuccess) result = library.call.device_count(&library.devices);
  if (result != api::kSuccess) {
    library.fault = "the NVIDIA driver does not start: " + describe(library.call, result);
    return library;
  }
  if (library.devices == 0) library.fault = "the NVIDIA driver sees no device";
  find_batch(library.call);
  return library;
}

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

const Library& usable(int ordinal) {
  const Library& found = library();
  if (!found.fault.empty()) throw Error(found.fault);
  if (ordinal < 0 || ordinal >= found.devices) {
    throw Error("CUDA device " + std::to_string(ordinal) + ": the driver sees " + std::to_string(found.devices));
  }
  return found;
}

int numa_node(int domain, int bus, int device) {
  char path[96];
  std::snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/numa_node", static_cast<unsigned>(domain),
                static_cast<unsigned>(bus), static_cast<unsigned>(device));
  int node = -1;
  std::ifstream(path) >> node;
  return std::max(node, -1);
}

void check(const api::Functions& call, api::Result result, const char* what) {
  if (result == api::kSuccess) return;
  std::string text;
  try {
    text = std::string(what) + ": " + describe(call, result);
  } catch (const std::bad_alloc&) {  // what it is has to be told also where there is no memory to say it
  }
  if (api::is_broken(result)) throw Broken(text);
  if (api::is_of_capture(result)) throw Capturing(text);
  throw Error(text);
}

// While it lives, the calling thread may do what an engine that captures a graph, on this thread or another, would not
// have it do by default: look at events, pin memory, load code. None of that is of what is captured. Without this the
// driver refuses the call and spoils the engine's graph.
struct Relaxed {
  explicit Relaxed(const api::Functions& call) : call(call), result(call.exchange_mode(&mode)) {}
  ~Relaxed() {
    if (result == api::kSuccess) call.exchange_mode(&mode);
  }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

  const api::Functions& call;
  int mode = api::kModeRelaxed;  // then the thread's own
  const api::Result result;
};

// The primary context of a device, and the code that was loaded into it; both go where what follows is refused.
class Primary {
 public:
  Primary(const api::Functions& call, int ordinal) : call_(call), process_(fork_generation()) {
    const Relaxed relaxed(call_);
    check(call_, relaxed.result, "cuThreadExchangeStreamCaptureMode");
    check(call_, call_.device_get(&device_, ordinal), "cuDeviceGet");
    check(call_, call_.retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  }
  ~Primary() {
    if (process_ != fork_generation()) return;  // the parent's
    if (module_ != nullptr) {
      quietly([this] { call_.module_unload(module_); });
    }
    const Relaxed relaxed(call_);
    call_.release(device_);
  }
  Primary(const Primary&) = delete;
  Primary& operator=(const Primary&) = delete;

  // The calling thread may be the engine's, with a context and a mode of its own: it gets both back.
  class Current {
   public:
    explicit Current(const Primary& primary) : relaxed_(primary.in_its_process()) {
      check(primary.call_, relaxed_.result, "cuThreadExchangeStreamCaptureMode");
      check(primary.call_, primary.call_.push(primary.context_), "cuCtxPush");
    }
    ~Current() {
      api::Context popped;
      relaxed_.call.pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Relaxed relaxed_;
  };
  // A context that is broken refuses this: nothing is left to be done about it.
  template <class F>
  void quietly(F&& work) const noexcept {
    if (process_ != fork_generation()) return;
    const Relaxed relaxed(call_);
    if (relaxed.result != api::kSuccess || call_.push(context_) != api::kSuccess) return;
    work();
    api::Context popped;
    call_.pop(&popped);
  }
  void load(const void* image) { check(call_, call_.module_load(&module_, image), "cuModuleLoadData"); }
  api::Device device() const { return device_; }
  api::Module module() const { return module_; }

 private:
  const api::Functions& in_its_process() const {
    if (process_ == fork_generation()) return call_;
    throw Error("a CUDA device works only in the process that opened it, not after fork()");
  }

  const api::Functions& call_;
  const std::uint32_t process_;  // by fork_generation(): a forked child has no use of a context
  api::Device device_ = 0;
  api::Context context_ = nullptr;
  api::Module module_ = nullptr;
};

class Driver final : public Runtime {
 public:
  Driver(const api::Functions& call, int ordinal, int version, std::span<const std::byte> image)
      : call_(call), primary_(call, ordinal) {
    const Current current(primary_);
    read_facts(ordinal, version);
    int least = 0, greatest = 0;
    check(call_.stream_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
    low_priority_ = least;
    primary_.load(image.data());
    for (int k = 0; k < kKernels; ++k) {
      check(call_.module_function(&functions_[k], primary_.module(), kernel_name(static_cast<Kernel>(k))),
            "cuModuleGetFunction");
    }
  }

  const DeviceFacts& facts() const override { return facts_; }

  Stream make_stream() override {
    const Current current(primary_);
    Stream stream = nullptr;
    check(call_.stream_create(&stream, api::kStreamNonBlocking, low_priority_), "cuStreamCreateWithPriority");
    return stream;
  }
  void free_stream(Stream stream) noexcept override {
    primary_.quietly([&] { call_.stream_destroy(stream); });
  }
  Event make_event() override {
    const Current current(primary_);
    Event event = nullptr;
    check(call_.event_create(&event, api::kEventDisableTiming), "cuEventCreate");
    return event;
  }
  void free_event(Event event) noexcept override {
    primary_.quietly([&] { call_.event_destroy(event); });
  }
  void record(Event event, Stream stream) override {
    const Current current(primary_);
    check(call_.event_record(event, stream), "cuEventRecord");
  }
  void wait(Stream stream, Event event) override {
    const Current current(primary_);
    check(call_.stream_wait(stream, event, 0), "cuStreamWaitEvent");
  }
  bool record_behind(Event event, Stream engine) override {
    const Current current(primary_);
    if (captures(engine)) return false;
    check(call_.event_record(event, engine), "cuEventRecord");
    return !captures(engine);  // it may have begun on another thread meanwhile
  }
  bool done(Event event) override {
    const Current current(primary_);
    const api::Result result = call_.event_query(event);
    if (result == api::kNotReady || api::is_of_capture(result)) return false;
    check(result, "cuEventQuery");
    return true;
  }

  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    const Current current(primary_);
    check(call_.copy(pointer(to), pointer(from), bytes, stream), "cuMemcpyAsync");
  }
  void copy_list(const CopyList& list, Stream stream) override {
    const Current current(primary_);
    api::CopyAttributes attributes{};
    attributes.source_order = api::kSourceInStreamOrder;
    attributes.flags = api::kPreferOverlapWithCompute;
    std::size_t first = 0, failed = 0;
    // The driver's types have no const; it writes to none of these.
    auto* to = reinterpret_cast<api::Pointer*>(const_cast<std::uintptr_t*>(list.to.data()));
    auto* from = reinterpret_cast<api::Pointer*>(const_cast<std::uintptr_t*>(list.from.data()));
    auto* bytes = const_cast<std::size_t*>(list.bytes.data());
    const api::Result result =
        call_.copy_batch != nullptr
            ? call_.copy_batch(to, from, bytes, list.size(), &attributes, &first, 1, stream)
            : call_.copy_batch_12(to, from, bytes, list.size(), &attributes, &first, 1, &failed, stream);
    check(result, "cuMemcpyBatchAsync");
  }
  void launch(Kernel kernel, const PageLaunch& launch, unsigned blocks, Stream stream) override {
    const Current current(primary_);
    void* arguments[] = {const_cast<PageLaunch*>(&launch)};  // copied before the call returns
    check(
        call_.launch(functions_[static_cast<int>(kernel)], blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel");
  }
  void call(Stream stream, void (*function)(void*), void* context) override {
    const Current current(primary_);
    check(call_.launch_host(stream, function, context), "cuLaunchHostFunc");
  }
  void finish(Stream stream) override {
    const Current current(primary_);
    check(call_.stream_finish(stream), "cuStreamSynchronize");
  }

  void* device_memory(std::size_t bytes) override {
    const Current current(primary_);
    api::Pointer memory = 0;
    check(call_.device_alloc(&memory, bytes), "cuMemAlloc");
    return reinterpret_cast<void*>(memory);
  }
  void free_device(void* memory) noexcept override {
    primary_.quietly([&] { call_.device_free(pointer(memory)); });
  }
  void* pinned_memory(std::size_t bytes) override {
    const Current current(primary_);
    void* memory = nullptr;
    check(call_.host_alloc(&memory, bytes, api::kHostPortable | api::kHostDeviceMap), "cuMemHostAlloc");
    return memory;
  }
  void free_pinned(void* memory) noexcept override {
    primary_.quietly([&] { call_.host_free(memory); });
  }
  void pin(void* memory, std::size_t bytes) override {
    const Current current(primary_);
    int same_address = 0;
    check(call_.device_attribute(&same_address, api::kHostPointerForRegistered, primary_.device()),
          "cuDeviceGetAttribute");
    if (same_address == 0) throw Error("this device cannot use registered host memory at its own address");
    check(call_.host_register(memory, bytes, api::kHostPortable | api::kHostDeviceMap), "cuMemHostRegister");
  }
  void unpin(void* memory) noexcept override {
    primary_.quietly([&] { call_.host_unregister(memory); });
  }

  bool owns(const void* memory, std::string* why) override {
    const Current current(primary_);
    unsigned type = 0;
    int ordinal = -1;
    if (call_.pointer_attribute(&type, api::kPointerMemoryType, pointer(memory)) != api::kSuccess) {
      *why = "memory that CUDA does not know";
    } else if (type != api::kMemoryDevice) {
      *why = type == api::kMemoryHost ? "pinned host memory" : "memory of type " + std::to_string(type);
    } else if (call_.pointer_attribute(&ordinal, api::kPointerOrdinal, pointer(memory)) != api::kSuccess ||
               ordinal != facts_.ordinal) {
      *why = "memory of CUDA device " + std::to_string(ordinal);
    } else {
      return true;
    }
    return false;
  }

 private:
  using Current = Primary::Current;

  static api::Pointer pointer(const void* memory) { return reinterpret_cast<api::Pointer>(memory); }
  void check(api::Result result, const char* what) const { cuda::check(call_, result, what); }
  bool captures(Stream stream) const {
    int status = 0;
    const api::Result result = call_.stream_capturing(stream, &status);
    if (result == api::kCaptureImplicit) return true;  // the default stream, which would have a part in another's
    check(result, "cuStreamIsCapturing");
    return status != 0;
  }
  int attribute(int which) const {
    int value = 0;
    check(call_.device_attribute(&value, which, primary_.device()), "cuDeviceGetAttribute");
    return value;
  }
  void read_facts(int ordinal, int version) {
    char name[256] = {};
    check(call_.device_name(name, sizeof name - 1, primary_.device()), "cuDeviceGetName");
    facts_.name = name;
    facts_.ordinal = ordinal;
    facts_.driver = version;
    facts_.processors = static_cast<unsigned>(std::max(1, attribute(api::kProcessors)));
    facts_.major = attribute(api::kMajor);
    facts_.minor = attribute(api::kMinor);
    facts_.numa_node = numa_node(attribute(api::kPciDomain), attribute(api::kPciBus), attribute(api::kPciDevice));
    facts_.batches = call_.copy_batch != nullptr || call_.copy_batch_12 != nullptr;
  }

  const api::Functions& call_;
  Primary primary_;
  api::Function functions_[kKernels] = {};
  int low_priority_ = 0;
  DeviceFacts facts_;
};

}  // namespace

DriverStatus driver_status() {
  const Library& found = library();
  return {found.devices, found.version, found.fault};
}

std::pair<int, int> capability(int ordinal) {
  const Library& found = usable(ordinal);
  api::Device device = 0;
  int major = 0, minor = 0;
  if (found.call.device_get(&device, ordinal) != api::kSuccess ||
      found.call.device_attribute(&major, api::kMajor, device) != api::kSuccess ||
      found.call.device_attribute(&minor, api::kMinor, device) != api::kSuccess) {
    throw Error("CUDA device " + std::to_string(ordinal) + " does not tell its compute capability");
  }
  return {major, minor};
}

std::shared_ptr<Runtime> open_device(int ordinal, std::span<const std::byte> image) {
  const Library& found = usable(ordinal);
  return open_device(found.call, found.version, ordinal, image);
}

std::shared_ptr<Runtime> open_device(const api::Functions& call, int version, int ordinal,
                                     std::span<const std::byte> image) {
  if (image.empty()) throw Error("no machine code of the page kernels was given");
  return std::make_shared<Driver>(call, ordinal, version, image);
}

}  // namespace kvtier::cuda
