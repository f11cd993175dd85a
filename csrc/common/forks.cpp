#include "common/forks.hpp"

#include <pthread.h>

#include <atomic>
#include <system_error>

namespace kvtier {
namespace {

std::atomic<std::uint32_t> generation{0};
const int registered = ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

std::uint32_t fork_generation() {
  if (registered != 0) throw std::system_error(registered, std::generic_category(), "pthread_atfork");
  return generation.load(std::memory_order_relaxed);
}

}  // namespace kvtier
