// The words of CUDA C++ that page_copy.cu uses, as plain C++: a launch is two loops, over blocks and over threads, and
// a kernel runs on the CPU under any sanitizer. It shows wrong indices and wrong bytes. It cannot show what happens
// only among threads that run at once; the kernels have nothing of that kind but a sum over a warp.
//
// Included by one file, right before page_copy.cu.
#pragma once

#include <cstring>

#define KVTIER_KERNEL_SHIM
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define KVTIER_UNROLL

namespace {

struct ulonglong2 {
  unsigned long long x, y;
};
struct Index {
  unsigned x = 0;
};
thread_local Index threadIdx, blockIdx, gridDim;

inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
// By bytes: the memory behind these pointers was not made as ulonglong2.
inline ulonglong2 __ldcs(const ulonglong2* from) {
  ulonglong2 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline void __stcs(ulonglong2* to, ulonglong2 value) { std::memcpy(to, &value, sizeof value); }

template <class Kernel, class Arguments>
void run_launch(Kernel kernel, const Arguments& arguments, unsigned blocks, unsigned threads) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments);
  }
}

}  // namespace
