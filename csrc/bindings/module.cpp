#include <nanobind/nanobind.h>

#include "bindings/bindings.hpp"

NB_MODULE(_core, m) {
  m.doc() = "kvtier's native engine. Use the typed faces in the kvtier package rather than this module.";
  kvtier::bind_common(m);
  kvtier::bind_content(m);
  kvtier::bind_catalog(m);
  kvtier::bind_copy(m);
  kvtier::bind_costs(m);
  kvtier::bind_cuda(m);
  kvtier::bind_io(m);
  kvtier::bind_mover(m);
  kvtier::bind_orders(m);
  kvtier::bind_requests(m);
}
