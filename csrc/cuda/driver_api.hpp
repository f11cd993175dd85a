// The driver's functions that are used, by the names, types and numbers of its stable binary interface (cuda.h).
// Written out here so that building needs no CUDA; tests/cpp/cuda_api_test.cpp compares them with cuda.h where there is
// one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::cuda::api {

using Result = int;
using Device = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Pointer = unsigned long long;

inline constexpr Result kSuccess = 0, kOutOfMemory = 2, kNotReady = 600, kUnknown = 999;
// Refusals that have to do with a capture into a graph, from the first to the last.
inline constexpr Result kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureMerge = 902,
                        kCaptureUnjoined = 904, kCaptureIsolation = 905, kCaptureImplicit = 906, kCapturedEvent = 907,
                        kCaptureWrongThread = 908;
constexpr bool is_of_capture(Result result) { return result >= kCaptureUnsupported && result <= kCaptureWrongThread; }
// After these nothing runs in the context any more: cuda.h says so of each, or that the driver or context is gone; of
// the uncorrectable errors of memory (214) and links (220), what NVIDIA says of memory errors: all that the process has
// on the device is ended, and its bytes are not to be trusted.
inline constexpr Result kBroken[] = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
constexpr bool is_broken(Result result) {
  for (const Result each : kBroken) {
    if (result == each) return true;
  }
  return false;
}
// What a thread may do while something is being captured: in relaxed mode all but what has to do with it.
inline constexpr int kModeGlobal = 0, kModeThreadLocal = 1, kModeRelaxed = 2;
inline constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1, kHostDeviceMap = 2;
inline constexpr int kProcessors = 16, kPciBus = 33, kPciDevice = 34, kPciDomain = 50, kMajor = 75, kMinor = 76,
                     kHostPointerForRegistered = 91;
inline constexpr int kPointerMemoryType = 2, kPointerOrdinal = 9;
inline constexpr unsigned kMemoryHost = 1, kMemoryDevice = 2;
inline constexpr int kSourceInStreamOrder = 1;
inline constexpr unsigned kPreferOverlapWithCompute = 1;

struct Location {
  int type, id;
};
struct CopyAttributes {
  int source_order;
  Location source_hint, destination_hint;
  unsigned flags;
};

// name, as the library exports it; result and arguments
#define KVTIER_CUDA_FUNCTIONS(X)                                                                              \
  X(init, "cuInit", (unsigned))                                                                               \
  X(version, "cuDriverGetVersion", (int*))                                                                    \
  X(error_name, "cuGetErrorName", (Result, const char**))                                                     \
  X(error_text, "cuGetErrorString", (Result, const char**))                                                   \
  X(device_count, "cuDeviceGetCount", (int*))                                                                 \
  X(device_get, "cuDeviceGet", (Device*, int))                                                                \
  X(device_name, "cuDeviceGetName", (char*, int, Device))                                                     \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, Device))                                            \
  X(retain, "cuDevicePrimaryCtxRetain", (Context*, Device))                                                   \
  X(release, "cuDevicePrimaryCtxRelease_v2", (Device))                                                        \
  X(push, "cuCtxPushCurrent_v2", (Context))                                                                   \
  X(pop, "cuCtxPopCurrent_v2", (Context*))                                                                    \
  X(stream_range, "cuCtxGetStreamPriorityRange", (int*, int*))                                                \
  X(stream_create, "cuStreamCreateWithPriority", (Stream*, unsigned, int))                                    \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                                           \
  X(stream_wait, "cuStreamWaitEvent", (Stream, Event, unsigned))                                              \
  X(stream_finish, "cuStreamSynchronize", (Stream))                                                           \
  X(stream_capturing, "cuStreamIsCapturing", (Stream, int*))                                                  \
  X(exchange_mode, "cuThreadExchangeStreamCaptureMode", (int*))                                               \
  X(event_create, "cuEventCreate", (Event*, unsigned))                                                        \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                                              \
  X(event_record, "cuEventRecord", (Event, Stream))                                                           \
  X(event_query, "cuEventQuery", (Event))                                                                     \
  X(copy, "cuMemcpyAsync", (Pointer, Pointer, std::size_t, Stream))                                           \
  X(launch_host, "cuLaunchHostFunc", (Stream, void (*)(void*), void*))                                        \
  X(module_load, "cuModuleLoadData", (Module*, const void*))                                                  \
  X(module_unload, "cuModuleUnload", (Module))                                                                \
  X(module_function, "cuModuleGetFunction", (Function*, Module, const char*))                                 \
  X(launch, "cuLaunchKernel",                                                                                 \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**)) \
  X(device_alloc, "cuMemAlloc_v2", (Pointer*, std::size_t))                                                   \
  X(device_free, "cuMemFree_v2", (Pointer))                                                                   \
  X(host_alloc, "cuMemHostAlloc", (void**, std::size_t, unsigned))                                            \
  X(host_free, "cuMemFreeHost", (void*))                                                                      \
  X(host_register, "cuMemHostRegister_v2", (void*, std::size_t, unsigned))                                    \
  X(host_unregister, "cuMemHostUnregister", (void*))                                                          \
  X(pointer_attribute, "cuPointerGetAttribute", (void*, int, Pointer))                                        \
  X(entry_point, "cuGetProcAddress_v2", (const char*, void**, int, std::uint64_t, int*))

struct Functions {
#define KVTIER_CUDA_MEMBER(member, symbol, arguments) Result(*member) arguments = nullptr;
  KVTIER_CUDA_FUNCTIONS(KVTIER_CUDA_MEMBER)
#undef KVTIER_CUDA_MEMBER
  // Since 12.8 with a place for the index of a failed copy, since 13.0 without; null where the driver has neither.
  Result (*copy_batch)(Pointer*, Pointer*, std::size_t*, std::size_t, CopyAttributes*, std::size_t*, std::size_t,
                       Stream) = nullptr;
  Result (*copy_batch_12)(Pointer*, Pointer*, std::size_t*, std::size_t, CopyAttributes*, std::size_t*, std::size_t,
                          std::size_t*, Stream) = nullptr;
};

}  // namespace kvtier::cuda::api
