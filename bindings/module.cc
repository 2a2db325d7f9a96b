#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Native part of cpumoe: operators, executor and decoder.";
  cpumoe_py::bind_machine(m);
  cpumoe_py::bind_ops(m);
  cpumoe_py::bind_decoder(m);
  cpumoe_py::bind_inspect(m);
}
