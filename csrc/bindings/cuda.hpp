// What the bindings of `cuda` and of `mover` share.
#pragma once

#include <memory>

#include "cuda/copier.hpp"

namespace kvtier {

struct CudaCopies {
  std::shared_ptr<cuda::Runtime> device;
  std::shared_ptr<cuda::PinnedArena> pinned;
  cuda::CopierOptions options;
};

}  // namespace kvtier
