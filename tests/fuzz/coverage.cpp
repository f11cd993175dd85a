// Which places of the engine an input reaches, under a compiler that has no libFuzzer: GCC calls this function at every
// branch of what is compiled with -fsanitize-coverage=trace-pc. Never instrumented itself.
#include "coverage.hpp"

#include <cstdint>

namespace kvtier::fuzz {

unsigned char reached[kPlaces];

}  // namespace kvtier::fuzz

// Runs on every thread: a place that another one marks at the same time is marked all the same.
extern "C" __attribute__((no_sanitize("address", "undefined", "thread"))) void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  __atomic_store_n(&kvtier::fuzz::reached[(place ^ place >> 16) % kvtier::fuzz::kPlaces], 1, __ATOMIC_RELAXED);
}
