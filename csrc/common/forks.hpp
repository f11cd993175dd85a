// Whether this is the process that made something, or a fork() of it: asked in each step of an engine, so without
// asking the kernel.
#pragma once

#include <cstdint>

namespace kvtier {

// How many fork()s lie between the process that loaded this code and the calling one.
std::uint32_t fork_generation();

}  // namespace kvtier
