// A few tokens: the codes of a span are unpacked once, in registers, and multiplied with all tokens.
// Bound by memory: rows are read one after the other, one stream per core. Included by ISA
// files only.
#pragma once
#include "kernels/dot/dot.h"
#include "kernels/dot/integer/source.h"
#include "kernels/dot/stream/pieces.h"

namespace cpumoe::CPUMOE_NS {

// Spans that eight rows take before the next ones: the tokens' spans stay in L1.
template <int T>
constexpr int64_t kStreamSpans = T == 1   ? 64
                                 : T == 2 ? 16
                                          : 8;
constexpr int64_t kStreamRows = 8;
// Rows at once. With VNNI reading the activations is what limits a core, but for one token and factors
// that are read beside them.
template <class S, int T>
constexpr int kStreamPair = kVnni && (T > 1 || !S::kPlain) ? 2 : 1;
constexpr int64_t kStreamFactors = 32;  // spans whose factors are expanded at a time

// One span of R rows, `stride` bytes and `step` floats apart.
template <class S, bool kHalves, int R, int T>
CPUMOE_INLINE void stream_span(__m256 acc[R][T], const char* p, int64_t stride, const float* plain,
                               int64_t step, const char* x, int64_t xs) {
  constexpr Math M = math_of<S>(kHalves);
  Codes w[R][kRegisters];
  Factors f[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    decode_span<S>(p + r * stride, w[r]);
    if constexpr (S::kPlain) {
      load_factors<M>(plain + r * step, f[r]);
    } else {
      S::factors(p + r * stride, f[r]);
    }
  }
  add_span<M, R, T>(
      acc, [&](int r, int i) __attribute__((always_inline)) { return w[r][i]; },
      [&](int r) __attribute__((always_inline)) -> const Factors& { return f[r]; }, x, xs);
}

// Spans [first, last) of R rows; `sums`: T vectors a row to start from and to leave the sums in.
template <class S, bool kHalves, int R, int T>
CPUMOE_INLINE void stream_rows(const char* row, int64_t stride, const Ahead<R>& ahead,
                               const float* plain, int64_t step, int64_t first, int64_t last,
                               int64_t row_bytes, const char* x, int64_t xs, float* sums) {
  constexpr int64_t kFloats = kFactorFloats<math_of<S>(kHalves)>;
  __m256 acc[R][T];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      acc[r][t] =
          first == 0 ? _mm256_setzero_ps() : _mm256_load_ps(sums + (t * kStreamRows + r) * 8);
    }
  }
  const int64_t whole = min64(last, row_bytes / S::kSpanBytes);
  int64_t i = first;
  for (; i < whole; ++i) {
    Ahead<R>::template fetch<S::kSpanBytes>(ahead, i * S::kSpanBytes);
    stream_span<S, kHalves, R, T>(acc, row + i * S::kSpanBytes, stride,
                                  plain + (i - first) * kFloats, step, x + i * Spans::kBytes, xs);
  }
  if (i < last) {
    alignas(64) char part[R * S::kSpanBytes];
    for (int r = 0; r < R; ++r) {
      copy_span<S>(row + r * stride + i * S::kSpanBytes, row_bytes - i * S::kSpanBytes,
                   part + r * S::kSpanBytes);
    }
    stream_span<S, kHalves, R, T>(acc, part, S::kSpanBytes, plain + (i - first) * kFloats, step,
                                  x + i * Spans::kBytes, xs);
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) _mm256_store_ps(sums + (t * kStreamRows + r) * 8, acc[r][t]);
  }
}

// All features of the slice for T tokens from m on.
template <class S, Code C, bool kHalves, int T>
static void stream_tokens(const DotArgs& a, int64_t m) {
  constexpr Math M = math_of<S>(kHalves);
  const WeightView& w = *a.w;
  const int64_t xs = Spans::line_bytes(w.k), spans = ceil_div(w.k, Spans::kInputs);
  const int64_t stride = line_bytes(C, w.stride), bytes = line_bytes(C, w.k);
  const char* base = static_cast<const char*>(w.data);
  const char* x = static_cast<const char*>(a.act) + m * xs;
  float* c = a.c + (m - a.m0) * a.c_stride;
  Grid grid;
  Expand expand = nullptr;
  if constexpr (S::kPlain) {
    grid = make_grid<S>(w, kHalves);
    expand = expand_for<M>(w);
  }
  constexpr int R = kStreamPair<S, T>;
  const Pieces pieces{base,  static_cast<const char*>(a.next), stride, a.n1, kStreamRows,
                      kStreamSpans<T> * S::kSpanBytes, bytes};
  alignas(32) float sums[T * kStreamRows * 8];
  constexpr int64_t kFloats = kFactorFloats<M>;
  alignas(32) float plain[S::kPlain ? R * kFloats * kStreamFactors : 8];
  for (int64_t n = a.n0; n < a.n1; n += kStreamRows) {
    const int64_t rows = min64(kStreamRows, a.n1 - n);
    int64_t first = 0;
    do {
      const int64_t last = min64(spans, first + kStreamSpans<T>);
      const auto later = Later<R>::than(pieces, first * S::kSpanBytes);
      for (int64_t r = 0; r < rows; r += R) {
        const char* p = base + (n + r) * stride;
        const auto ahead = Ahead<R>::from(pieces, later, n, n + r, first * S::kSpanBytes);
        if constexpr (S::kPlain) {
          for (int i = 0; i < R; ++i) {
            const int64_t row = n + r + i + max64(R, later.rows[0]);
            if (row < a.n1) fetch_scales(grid, row, first, last - first);
          }
        }
        // A last row without a second one is its own.
        const bool one = R > 1 && r + 1 == rows;
        const int64_t apart = one ? 0 : stride;
        if constexpr (S::kPlain) {
          const int64_t width = last - first, at_once = R * (kStreamFactors / max64(1, width));
          if (width <= kStreamFactors) {
            const int64_t within = r % at_once;
            if (within == 0) {
              expand(grid, n + r, min64(at_once, rows - r), first, last, plain, kFloats,
                     width * kFloats);
            }
            stream_rows<S, kHalves, R, T>(p, apart, ahead, plain + within * width * kFloats,
                                          one ? 0 : width * kFloats, first, last, bytes, x, xs,
                                          sums + r * 8);
            continue;
          }
          for (int64_t i = first; i < last; i += kStreamFactors) {
            const int64_t end = min64(last, i + kStreamFactors);
            expand(grid, n + r, one ? 1 : R, i, end, plain, kFloats, kStreamFactors * kFloats);
            stream_rows<S, kHalves, R, T>(p, apart, ahead, plain, one ? 0 : kStreamFactors * kFloats,
                                          i, end, bytes, x, xs, sums + r * 8);
          }
        } else {
          stream_rows<S, kHalves, R, T>(p, apart, ahead, nullptr, 0, first, last, bytes, x, xs,
                                        sums + r * 8);
        }
      }
      first = last;
    } while (first < spans);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      __m256 v[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        v[r] = r < rows ? _mm256_load_ps(sums + (t * kStreamRows + r) * 8) : _mm256_setzero_ps();
      _mm256_store_ps(c + t * a.c_stride + (n - a.n0), sum_lanes(v));
    }
  }
}

template <class S, Code C, bool kHalves>
CPUMOE_INLINE void stream_all(const DotArgs& a) {
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      stream_tokens<S, C, kHalves, 1>(a, m), m += 1;
    } else if (left == 2) {
      stream_tokens<S, C, kHalves, 2>(a, m), m += 2;
    } else if (left == 3) {
      stream_tokens<S, C, kHalves, 3>(a, m), m += 3;
    } else {
      stream_tokens<S, C, kHalves, 4>(a, m), m += 4;
    }
  }
}
template <class S, Code C>
static void stream(const DotArgs& a) {
  if (S::kPlain && a.w->format->scale_cols == 16) return stream_all<S, C, S::kPlain>(a);
  stream_all<S, C, false>(a);
}

#define CPUMOE_INT_STREAM(code, source) \
  void dot_int_stream_rows_##code(const DotArgs& a) { stream<source, Code::code>(a); }

}  // namespace cpumoe::CPUMOE_NS
