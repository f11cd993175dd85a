// Completions as kvtier.messages has them, which come from other planes than this process's own.
#pragma once

#include <nanobind/nanobind.h>

#include "common/completion.hpp"

namespace kvtier {

// TypeError for what is none.
Completion completion_of(nanobind::handle told);

}  // namespace kvtier
