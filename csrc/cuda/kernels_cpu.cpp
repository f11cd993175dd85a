#include "cuda/kernels.hpp"
#include "cuda/shim.hpp"
// After the shim, which gives it its words.
#include "cuda/page_copy.cu"

namespace kvtier::cuda {

void run_on_cpu(Kernel kernel, const PageLaunch& launch, unsigned blocks) {
  using Function = void (*)(PageLaunch);
  constexpr Function functions[kKernels] = {kvtier_gather,       kvtier_scatter,       kvtier_sum,
                                            kvtier_gather_bytes, kvtier_scatter_bytes, kvtier_sum_bytes};
  // A kernel takes its argument by value; once a launch will do.
  const Function function = functions[static_cast<int>(kernel)];
  run_launch([function](const PageLaunch& arguments) { function(arguments); }, launch, blocks, kThreads);
}

}  // namespace kvtier::cuda
