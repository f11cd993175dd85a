// What csrc/cuda/driver_api.hpp says of the driver's interface is what NVIDIA's header says, where that can be found.
#if __has_include(<cuda.h>)
#include <cuda.h>

#include "cuda/runtime.hpp"
// after runtime.hpp, whose names it uses
#include "cuda/driver_api.hpp"

namespace {

namespace api = kvtier::cuda::api;

static_assert(sizeof(api::Pointer) == sizeof(CUdeviceptr) && sizeof(api::Result) == sizeof(CUresult));
static_assert(api::kSuccess == CUDA_SUCCESS && api::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(api::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && api::kUnknown == CUDA_ERROR_UNKNOWN);
static_assert(api::kCaptureUnsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(api::kCaptureInvalidated == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
static_assert(api::kCaptureMerge == CUDA_ERROR_STREAM_CAPTURE_MERGE);
static_assert(api::kCaptureUnjoined == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
static_assert(api::kCaptureIsolation == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
static_assert(api::kCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(api::kCapturedEvent == CUDA_ERROR_CAPTURED_EVENT);
static_assert(api::kCaptureWrongThread == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
static_assert(api::is_broken(CUDA_ERROR_DEINITIALIZED) && api::is_broken(CUDA_ERROR_ILLEGAL_ADDRESS));
static_assert(api::is_broken(CUDA_ERROR_LAUNCH_TIMEOUT) && api::is_broken(CUDA_ERROR_CONTEXT_IS_DESTROYED));
static_assert(api::is_broken(CUDA_ERROR_ASSERT) && api::is_broken(CUDA_ERROR_HARDWARE_STACK_ERROR));
static_assert(api::is_broken(CUDA_ERROR_ILLEGAL_INSTRUCTION) && api::is_broken(CUDA_ERROR_MISALIGNED_ADDRESS));
static_assert(api::is_broken(CUDA_ERROR_INVALID_ADDRESS_SPACE) && api::is_broken(CUDA_ERROR_INVALID_PC));
static_assert(api::is_broken(CUDA_ERROR_LAUNCH_FAILED) && api::is_broken(CUDA_ERROR_MPS_CLIENT_TERMINATED));
static_assert(api::is_broken(CUDA_ERROR_EXTERNAL_DEVICE));
static_assert(api::is_broken(CUDA_ERROR_ECC_UNCORRECTABLE) && api::is_broken(CUDA_ERROR_NVLINK_UNCORRECTABLE));
static_assert(!api::is_broken(CUDA_ERROR_NOT_READY) && !api::is_broken(CUDA_ERROR_UNKNOWN));
static_assert(sizeof(CUstreamCaptureMode) == sizeof(int) && api::kModeGlobal == CU_STREAM_CAPTURE_MODE_GLOBAL);
static_assert(api::kModeThreadLocal == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(api::kModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(api::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(api::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(api::kHostPortable == CU_MEMHOSTALLOC_PORTABLE && api::kHostDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(api::kHostPortable == CU_MEMHOSTREGISTER_PORTABLE && api::kHostDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(api::kProcessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(api::kPciBus == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID && api::kPciDevice == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
static_assert(api::kPciDomain == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
static_assert(api::kMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(api::kMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(api::kHostPointerForRegistered == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
static_assert(api::kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(api::kPointerOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(api::kMemoryHost == CU_MEMORYTYPE_HOST && api::kMemoryDevice == CU_MEMORYTYPE_DEVICE);
#if CUDA_VERSION >= 13000
static_assert(api::is_broken(CUDA_ERROR_CONTAINED) && api::is_broken(CUDA_ERROR_TENSOR_MEMORY_LEAK));
#endif
#if CUDA_VERSION >= 12080
static_assert(sizeof(api::CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(api::CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(api::kSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(api::kPreferOverlapWithCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif

}  // namespace
#endif
