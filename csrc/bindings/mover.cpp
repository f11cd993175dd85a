#include "bindings/bindings.hpp"

namespace kvtier {

void bind_mover(nanobind::module_&) {}

}  // namespace kvtier
