// One function per folder of csrc/, each in its own file. Bindings convert and call; they hold no logic.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

void bind_common(nanobind::module_& m);
void bind_catalog(nanobind::module_& m);
void bind_copy(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_mover(nanobind::module_& m);

}  // namespace kvtier
