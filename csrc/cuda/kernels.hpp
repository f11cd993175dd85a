// The page kernels by name, their machine code, and the same run by the CPU.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "cuda/page_args.hpp"

namespace kvtier::cuda {

enum class Kernel { kGather, kScatter, kSum, kGatherBytes, kScatterBytes, kSumBytes };
inline constexpr int kKernels = 6;

constexpr const char* kernel_name(Kernel kernel) {
  constexpr const char* names[kKernels] = {"kvtier_gather",       "kvtier_scatter",       "kvtier_sum",
                                           "kvtier_gather_bytes", "kvtier_scatter_bytes", "kvtier_sum_bytes"};
  return names[static_cast<int>(kernel)];
}

// What nvcc made of page_copy.cu when this was built: a fat binary; empty when it was built without nvcc.
std::span<const std::byte> built_image();
std::string_view built_for();  // e.g. "sm_80 sm_90 sm_100 compute_100"; empty without an image

// The source, for a compiler at run time: page_copy.cu and the one header that it includes.
std::string_view kernel_source();
std::string_view kernel_header();

// Runs a launch here and now, its pointers being the CPU's.
void run_on_cpu(Kernel kernel, const PageLaunch& launch, unsigned blocks);

}  // namespace kvtier::cuda
