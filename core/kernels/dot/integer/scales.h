// fp32 scales and offsets of plain codes in the lanes of a span, from arrays of any scale code and
// zero points. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "formats/format.h"
#include "kernels/dot/integer/math.h"

namespace cpumoe::CPUMOE_NS {

// Scales and zero points of a matrix, as spread over lanes.
struct Grid {
  struct Lines {
    const char* data;
    const char* end;
    int64_t step;  // bytes between lines
  };
  Lines scales, zeros;
  Code zero_code;
  int64_t rows;    // features that share a line
  int64_t inputs;  // K
  int64_t bytes;   // of a scale
  int shift;       // log2 of inputs that share a scale, or more than K has
  float factor;    // of every scale
  float zero;      // what every feature's codes are above the numbers they stand for, or
  float less;      // what is added to a stored zero point for that
  __m256i groups;  // group of 32 in each lane
  __m256i index;   // its scale, counted from the span's first
};

// Fetches what spans [first, first + spans) of feature n have for scales. They are few bytes of many
// lines, of which a core alone sees no pattern.
CPUMOE_INLINE void fetch_scales(const Grid& g, int64_t n, int64_t first, int64_t spans) {
  const char* p = g.scales.data + (g.rows == 1 ? n : n / g.rows) * g.scales.step;
  const char* end = p + ((first + spans) << 8 >> g.shift) * g.bytes;
  for (p += (first << 8 >> g.shift) * g.bytes; p < end; p += 64) _mm_prefetch(p, _MM_HINT_T0);
}

// Factors of spans [first, last) of `rows` features from n on, `step` floats apart, features
// `row_step`: per span the scales (with kHalves: two vectors), then as many offsets -zero * scale
// unless there are none. Lanes past K are zero.
using Expand = void (*)(const Grid& g, int64_t n, int64_t rows, int64_t first, int64_t last,
                        float* out, int64_t step, int64_t row_step);
enum class Zeros { none, constant, stored };
Expand select_expand(Code scales, bool halves, Zeros zeros);

// log2 of inputs that share a scale, or more than K has.
CPUMOE_INLINE int scale_shift(const Format& f) {
  const auto cols = uint32_t(f.scale_cols);
  const bool power = cols >= 16 && cols < uint32_t(1) << 30 && (cols & (cols - 1)) == 0;
  return power ? __builtin_ctz(cols) : 40;
}

template <class Order>
CPUMOE_INLINE __m256i groups_of_lanes() {
  alignas(32) int32_t g[8] = {};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) g[Order::lane(i)] = i;
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(g));
}

// S: a plain source (source.h).
template <class S>
CPUMOE_INLINE Grid make_grid(const WeightView& w, bool halves) {
  const Format& f = *w.format;
  const auto lines = [](const MatrixView& m) {
    return Grid::Lines{static_cast<const char*>(m.data), end_of(m), line_bytes(m.code, m.stride)};
  };
  Grid g;
  g.scales = lines(w.scales);
  g.zeros = f.stored_zeros() ? lines(w.zeros) : Grid::Lines{nullptr, nullptr, 0};
  g.zero_code = w.zeros.code;
  g.rows = f.scale_rows;
  g.inputs = w.k;
  g.bytes = line_bytes(w.scales.code, 1);
  g.shift = scale_shift(f);
  g.factor = w.global_scale * S::kFactor;
  g.zero = (f.zeros == ZeroRule::middle ? S::kMiddle : 0.0f) - S::kCountedFrom;
  g.less = (f.zeros == ZeroRule::stored_less_one ? 1.0f : 0.0f) - S::kCountedFrom;
  g.groups = groups_of_lanes<typename S::Order>();
  g.index = halves ? _mm256_slli_epi32(g.groups, 1)
                   : _mm256_srl_epi32(g.groups, _mm_cvtsi32_si128(g.shift > 8 ? 3 : g.shift - 5));
  return g;
}
template <Math M>
CPUMOE_INLINE Expand expand_for(const WeightView& w) {
  const Zeros zeros = M.offset == Math::none     ? Zeros::none
                      : w.format->stored_zeros() ? Zeros::stored
                                                 : Zeros::constant;
  return select_expand(w.scales.code, M.parts == Math::floats, zeros);
}

}  // namespace cpumoe::CPUMOE_NS
