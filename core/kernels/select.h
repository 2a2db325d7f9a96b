// Selection in rooms whose kernels differ by ISA alone: the first usable row of a list, best first.
#pragma once
#include "machine/isa.h"

namespace cpumoe {

// Null when the CPU may use none of them.
template <class Kernel>
const Kernel* first_usable(const Kernel* rows, int count, IsaSet isa) {
  for (int i = 0; i < count; ++i) {
    if (isa.has(rows[i].isa)) return rows + i;
  }
  return nullptr;
}
template <class Kernel, int N>
const Kernel* first_usable(const Kernel (&rows)[N], IsaSet isa) {
  return first_usable(rows, N, isa);
}

}  // namespace cpumoe
