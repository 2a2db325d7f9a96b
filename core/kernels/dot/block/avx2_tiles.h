// The register tiles of shape `block` and the walk around them, for weights that somebody decodes
// to fp32 block by block. Included by avx2.cc files only.
// rows:    tokens in lanes (24 of them), weights broadcast, tile n_major.
// columns: features in lanes (24 of them), activations broadcast, tile m_major.
#pragma once
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"

namespace cpumoe::avx2 {

constexpr int64_t kDepth = 256;    // inputs per block
constexpr int64_t kRows = 96;      // features per block, rows: 96 KiB of decoded weights
constexpr int64_t kColumns = 192;  // features per block, columns: 192 KiB
constexpr int64_t kPanel = 24;     // features per decoded panel, columns

constexpr int64_t kPanelFloats = kPanel * kDepth + 16;  // the 16 keep panels apart in L1's sets

// c[r * cs + 8 p + lane] += sum over depth of lanes[p * ls + k * kLaneStep + lane] *
// scalars[r * kScalarRow + k * kScalarStep]; `first` starts from zero. P * R <= 12 accumulators.
// fetch(k) is called once every 8 steps to fetch what comes after this block.
template <int P, int R, int64_t kLaneStep, int64_t kScalarRow, int64_t kScalarStep, class Fetch>
CPUMOE_INLINE void multiply(const float* lanes, int64_t ls, const float* scalars, int64_t depth,
                            float* c, int64_t cs, bool first, const Fetch& fetch) {
  __m256 acc[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) {
      acc[r][p] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + r * cs + 8 * p);
    }
  }
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    __m256 v[P];
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) v[p] = _mm256_loadu_ps(lanes + p * ls + k * kLaneStep);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m256 s = _mm256_broadcast_ss(scalars + r * kScalarRow + k * kScalarStep);
#pragma GCC unroll 12
      for (int p = 0; p < P; ++p) acc[r][p] = _mm256_fmadd_ps(v[p], s, acc[r][p]);
    }
  };
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    fetch(k);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) step(k + i);
  }
  for (; k < depth; ++k) step(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) _mm256_store_ps(c + r * cs + 8 * p, acc[r][p]);
  }
}

// ---- rows

// P panels of tokens with all rows of the block, R at a time. fetch(r, k): see block_rows.
template <int P, int R, class Fetch>
static void rows_panels(const float* x, int64_t xs, const float* w, int64_t rows, int64_t depth,
                        float* c, int64_t cs, bool first, const Fetch& fetch) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    const auto ahead = [&fetch, r](int64_t k)
                           __attribute__((always_inline)) { fetch.template rows<R>(r, k); };
    multiply<P, R, 8, kDepth, 1>(x, xs, w + r * kDepth, depth, c + r * cs, cs, first, ahead);
  }
  const auto none = [](int64_t) {};
  for (; r < rows; ++r) {
    multiply<P, 1, 8, kDepth, 1>(x, xs, w + r * kDepth, depth, c + r * cs, cs, first, none);
  }
}

// decode(n, rows, k, depth, out): weights [n, n + rows) x [k, k + depth) to out[r * kDepth + i].
// Fetch{w, n, rows, k}: what comes after this block, to be fetched while it is multiplied; nothing
// for n < 0. Its rows<R>(r, i) is called for every R rows r and every 8 inputs i.
template <class Fetch, class Decode>
CPUMOE_INLINE void block_rows(const DotArgs& a, const Decode& decode) {
  const WeightView& w = *a.w;
  const int64_t xs = Panels8::pos(8, 0, w.k);
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    const int64_t rows = min64(kRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode(n, rows, k, depth, block);
      Fetch fetch = k + kDepth < w.k   ? Fetch{w, n, k + kDepth}
                    : n + kRows < a.n1 ? Fetch{w, n + kRows, 0}
                                       : Fetch{w, -1, 0};
      for (int64_t m = a.m0; m < a.m1; fetch = Fetch{w, -1, 0}) {
        const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
        float* c = a.c + (n - a.n0) * a.c_stride + (m - a.m0);
        const int64_t panels = ceil_div(a.m1 - m, 8);
        const bool first = k == 0;
        if (panels == 1) {
          rows_panels<1, 12>(x, xs, block, rows, depth, c, a.c_stride, first, fetch);
          m += 8;
        } else if (panels == 2 || panels == 4) {
          rows_panels<2, 6>(x, xs, block, rows, depth, c, a.c_stride, first, fetch);
          m += 16;
        } else {
          rows_panels<3, 4>(x, xs, block, rows, depth, c, a.c_stride, first, fetch);
          m += 24;
        }
      }
      k += kDepth;
    } while (k < w.k);
  }
}

// ---- columns

// P vectors of 8 features of panel f with up to four tokens. fetch: see block_columns.
template <int P, class Fetch>
static void columns_tokens(const float* w, const float* x, int64_t tokens, int64_t depth, float* c,
                           int64_t cs, bool first, const Fetch& fetch, int64_t f) {
  const auto ahead = [&fetch, f](int64_t k) __attribute__((always_inline)) { fetch.panel(f, k); };
  if (tokens >= 4) {
    multiply<P, 4, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, ahead);
  } else if (tokens == 3) {
    multiply<P, 3, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, ahead);
  } else if (tokens == 2) {
    multiply<P, 2, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, ahead);
  } else {
    multiply<P, 1, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, ahead);
  }
}

// Where feature f (a multiple of 8) of input k of a block of columns lies: panels of 24 features,
// input after input.
CPUMOE_INLINE float* columns_at(float* block, int64_t f, int64_t k) {
  return block + f / kPanel * kPanelFloats + k * kPanel + f % kPanel;
}

// decode(n, features, k, depth, block): weights to columns_at; features past the last up to a
// multiple of 8 are finite or not, and used by nobody.
// Fetch{w, n, k} as for rows; its panel(f, i) is called for every panel and every 8 inputs i.
template <class Fetch, class Decode>
CPUMOE_INLINE void block_columns(const DotArgs& a, const Decode& decode) {
  const WeightView& w = *a.w;
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kColumns) {
    const int64_t features = min64(kColumns, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode(n, features, k, depth, block);
      const Fetch after = k + kDepth < w.k      ? Fetch{w, n, k + kDepth}
                          : n + kColumns < a.n1 ? Fetch{w, n + kColumns, 0}
                                                : Fetch{w, -1, 0};
      for (int64_t f = 0; f < features; f += kPanel) {
        const float* panel = columns_at(block, f, 0);
        const int64_t vectors = min64(3, ceil_div(features - f, 8));
        for (int64_t m = a.m0; m < a.m1; m += 4) {
          const Fetch fetch = m == a.m0 ? after : Fetch{w, -1, 0};
          const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
          float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0 + f);
          const int64_t tokens = a.m1 - m;
          const bool first = k == 0;
          if (vectors == 3) {
            columns_tokens<3>(panel, x, tokens, depth, c, a.c_stride, first, fetch, f);
          } else if (vectors == 2) {
            columns_tokens<2>(panel, x, tokens, depth, c, a.c_stride, first, fetch, f);
          } else {
            columns_tokens<1>(panel, x, tokens, depth, c, a.c_stride, first, fetch, f);
          }
        }
      }
      k += kDepth;
    } while (k < w.k);
  }
}

}  // namespace cpumoe::avx2
