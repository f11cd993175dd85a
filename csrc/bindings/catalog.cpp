#include "bindings/bindings.hpp"

namespace kvtier {

void bind_catalog(nanobind::module_&) {}

}  // namespace kvtier
