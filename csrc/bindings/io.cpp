#include "bindings/bindings.hpp"

namespace kvtier {

void bind_io(nanobind::module_&) {}

}  // namespace kvtier
