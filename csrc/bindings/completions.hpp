// Completions as kvtier.messages has them, which come from other planes than this process's own.
#pragma once

#include <nanobind/nanobind.h>

#include "common/completion.hpp"

namespace kvtier {

// Throws nanobind's errors for what is none, std::invalid_argument for one of more hops than there are.
Completion completion_of(nanobind::handle told);

}  // namespace kvtier
