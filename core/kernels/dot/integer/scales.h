// fp32 scales and offsets of plain codes in the lanes of a span, from arrays of any scale code and
// zero points. Included by avx2.cc files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "formats/format.h"
#include "kernels/dot/integer/math.h"

namespace cpumoe::avx2 {

// The scales and zero points of one feature.
struct GridRow {
  const char* scales;
  const char* scales_end;  // of the array
  const char* zeros;       // null: all `zero`
  const char* zeros_end;
  Code scale_code, zero_code;
  float global, zero, less;  // what is subtracted beside a stored zero point
  int shift;                 // log2 of inputs that share a scale, or more than K has
};

// `counted_from`: the number whose code is 0 in the kernel (128: unsigned bytes read as signed).
CPUMOE_INLINE GridRow grid_row(const WeightView& w, int64_t n, float counted_from, float middle) {
  const Format& f = *w.format;
  const int64_t line = f.scale_rows == kWhole ? 0 : n / f.scale_rows;
  const auto end = [](const MatrixView& m) {
    return static_cast<const char*>(m.data) + (m.rows - 1) * line_bytes(m.code, m.stride) +
           line_bytes(m.code, m.cols);
  };
  GridRow g;
  g.scale_code = w.scales.code;
  g.scales = static_cast<const char*>(w.scales.data) + line * line_bytes(g.scale_code,
                                                                         w.scales.stride);
  g.scales_end = end(w.scales);
  g.zeros = nullptr;
  g.zeros_end = nullptr;
  g.zero_code = Code::u8;
  g.global = w.global_scale;
  g.less = f.zeros == ZeroRule::stored_less_one ? 1.0f - counted_from : -counted_from;
  g.zero = (f.zeros == ZeroRule::middle ? middle : 0.0f) - counted_from;
  if (f.stored_zeros()) {
    g.zero_code = w.zeros.code;
    g.zeros = static_cast<const char*>(w.zeros.data) + line * line_bytes(g.zero_code,
                                                                         w.zeros.stride);
    g.zeros_end = end(w.zeros);
  }
  g.shift = 40;
  for (int s = 4; s < 30; ++s) {
    if (f.scale_cols == int32_t(1) << s) g.shift = s;
  }
  return g;
}

// Lane by lane the group of 32 it holds.
template <class Order>
CPUMOE_INLINE __m256i groups_of_lanes() {
  alignas(32) int32_t g[8] = {};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) g[Order::lane(i)] = i;
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(g));
}

// Factors of spans [first, last) of a row of `inputs`, `step` floats apart: per span the scales times
// `factor` (of halves: two vectors), then, with `offset`, as many offsets -zero * scale. Lanes past
// K are zero.
struct ExpandArgs {
  GridRow grid;
  int64_t first, last, inputs;
  float factor;
  float* out;
  int64_t step;
  __m256i groups;  // groups_of_lanes()
  bool halves, offset;
};
void expand_factors(const ExpandArgs& a);

}  // namespace cpumoe::avx2
