// Asking for lines of a weight in columns in the order of memory. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "kernels/dot/dot.h"

namespace cpumoe::CPUMOE_NS {

struct LinesAhead {
  const char* at;
  const char* run_end;
  int64_t run_bytes, stride;
  CPUMOE_INLINE void step(LinesAhead& a) {
    _mm_prefetch(a.at, _MM_HINT_T1);
    a.at += 64;
    if (a.at >= a.run_end) {
      a.run_end += a.stride;
      a.at = a.run_end - a.run_bytes;
    }
  }
};

// The `lines` lines of the slice from line k on, or behind it those of the caller's next one.
CPUMOE_INLINE LinesAhead lines_from(const DotArgs& a, int64_t element_bytes, int64_t lines,
                                    int64_t k) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * element_bytes, bytes = (a.n1 - a.n0) * element_bytes;
  const int64_t run = bytes == stride ? lines * bytes : bytes;
  const char* p = static_cast<const char*>(w.data) + a.n0 * element_bytes;
  if (k + lines <= w.k) {
    p += k * stride;
  } else if (k >= w.k && a.next != nullptr) {
    p = static_cast<const char*>(a.next) + (k - w.k) * stride;
  }
  return {p, p + run, run, stride};
}

}  // namespace cpumoe::CPUMOE_NS
