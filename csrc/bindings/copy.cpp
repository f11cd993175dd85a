#include "bindings/bindings.hpp"

namespace kvtier {

void bind_copy(nanobind::module_&) {}

}  // namespace kvtier
