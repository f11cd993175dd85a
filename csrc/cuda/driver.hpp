// The NVIDIA driver, opened when it is first asked for. Nothing of CUDA is needed to build, to link or to import this.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "cuda/runtime.hpp"

namespace kvtier::cuda {

struct DriverStatus {
  int devices = 0;
  int version = 0;   // 13000 for CUDA 13.0
  std::string note;  // why there are none
};
DriverStatus driver_status();

// (major, minor) of a device's compute capability. Throws Error.
std::pair<int, int> capability(int ordinal);

// A device and its primary context, the one that torch and CuPy use too, with the page kernels of `image` loaded (a fat
// binary, a cubin or PTX). Throws Error.
std::shared_ptr<Runtime> open_device(int ordinal, std::span<const std::byte> image);

namespace api {
struct Functions;
}
// The same with the functions of another library than the one that is found, which outlive the device.
std::shared_ptr<Runtime> open_device(const api::Functions& call, int version, int ordinal,
                                     std::span<const std::byte> image);

}  // namespace kvtier::cuda
