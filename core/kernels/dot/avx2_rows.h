// Rows of weights times a few tokens, for the shapes bound by memory or nearly so: weights are
// decoded in registers, where every one meets up to four tokens. Included by avx2.cc files only.
#pragma once
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

// Where a tile of R rows asks for memory while it computes: per line of 64 bytes of its rows R
// lines at at[i] + r * r_step, and at[i] moves on by k_step. The CPU drops a prefetch when too many
// are under way, so that every line is asked for twice, at two distances (at[0] and at[1]).
struct Ahead {
  const char* at[2];
  int64_t r_step, k_step;
};

// Half a step of 16 inputs. Whichever side is shorter stays in registers.
template <class W, int R, int T, bool kHi>
CPUMOE_INLINE void rows_half(__m256 acc[R][T], const char* w, int64_t stride, const float* x,
                             int64_t xs) {
  const auto weight = [&](int r) { return kHi ? W::hi(w + r * stride) : W::lo(w + r * stride); };
  const auto token = [&](int t) { return _mm256_loadu_ps(x + t * xs + (kHi ? 8 : 0)); };
  if constexpr (R <= T) {
    __m256 v[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) v[r] = weight(r);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      __m256 xt = token(t);
      __asm__("" : "+x"(xt));  // else GCC reads it once per row
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][t] = _mm256_fmadd_ps(v[r], xt, acc[r][t]);
    }
  } else {
    __m256 v[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) v[t] = token(t);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m256 wr = weight(r);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[r][t] = _mm256_fmadd_ps(wr, v[t], acc[r][t]);
    }
  }
}
template <class W, int R, int T>
CPUMOE_INLINE void rows_step(__m256 acc[R][T], const char* w, int64_t stride, const float* x,
                             int64_t xs) {
  rows_half<W, R, T, false>(acc, w, stride, x, xs);
  rows_half<W, R, T, true>(acc, w, stride, x, xs);
}

// c[t * cs + r] (+)= the products of R rows with T tokens over `inputs`. One chain of 8 lanes per
// (row, token), whatever R and T are. kFetch: bit i set, the tile uses ahead.at[i].
template <class W, int R, int T, int kFetch>
void rows_tile(const char* w, int64_t stride, const float* x, int64_t xs, int64_t inputs, float* c,
               int64_t cs, bool first, Ahead ahead) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 acc[R][T];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
  }
  int64_t k = 0;
  for (; k + kLine <= inputs; k += kLine) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if ((kFetch >> i & 1) == 0) continue;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) _mm_prefetch(ahead.at[i] + r * ahead.r_step, _MM_HINT_T1);
      ahead.at[i] += ahead.k_step;
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < kLine; i += 16) {
      rows_step<W, R, T>(acc, w + (k + i) * W::kBytes, stride, x + k + i, xs);
    }
  }
  if (kLine > 16 && k + 16 <= inputs) {
    rows_step<W, R, T>(acc, w + k * W::kBytes, stride, x + k, xs);
    k += 16;
  }
  if (k < inputs) {
    alignas(64) char tail[R * 64];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      copy_tail16<W>(w + r * stride + k * W::kBytes, inputs - k, tail + r * 64);
    }
    rows_step<W, R, T>(acc, tail, 64, x + k, xs);
  }
  // Sums of 8 lanes, four accumulators at a time; the tree is the same for each.
  constexpr int kSums = R * T;
  alignas(16) float sums[(kSums + 3) / 4 * 4];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i += 4) {
    const auto of = [&](int j) { return acc[(j < kSums ? j : 0) % R][(j < kSums ? j : 0) / R]; };
    const __m256 h =
        _mm256_hadd_ps(_mm256_hadd_ps(of(i), of(i + 1)), _mm256_hadd_ps(of(i + 2), of(i + 3)));
    _mm_store_ps(sums + i, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) {
    float* to = c + i / R * cs + i % R;
    *to = first ? sums[i] : *to + sums[i];
  }
}

// A block of rows takes one span of inputs after the other, so that the span's activations stay in
// L1. Lines are asked for in the order of memory, one and two blocks ahead: three blocks fit in L2.
constexpr int64_t kBlockRows = 16, kBlockBytes = 64 << 10;

template <class W>
struct RowsWalk {
  const DotArgs& a;
  int64_t block;         // rows
  int64_t stride;        // bytes from row to row
  bool dense;            // rows follow each other without a gap

  // Prefetches for the piece of `inputs` from k of rows n + r.. of a block that begins at row n.
  Ahead ahead(int64_t n, int64_t r, int64_t k, int64_t inputs, int64_t rows) const {
    const int64_t bytes = inputs * W::kBytes;
    // Pieces before this one in the block, in the order of use, are as many bytes as lie before the
    // one to fetch in the order of memory.
    const int64_t at = dense ? k * block * W::kBytes + r * bytes : r * stride + k * W::kBytes;
    Ahead p{{}, dense ? 64 : stride, dense ? rows * 64 : 64};
    for (int i = 0; i < 2; ++i) {
      const int64_t row = n + (2 - i) * block;
      const char* to = static_cast<const char*>(a.w->data) + n * stride;
      if (row + block <= a.n1) {
        to = static_cast<const char*>(a.w->data) + row * stride;
      } else if (row >= a.n1 && a.next != nullptr) {
        to = static_cast<const char*>(a.next) + (row - a.n1) * stride;
      }
      p.at[i] = to + at;
    }
    return p;
  }
};

// Rows [n, end) of a block, one span, tokens m .. m + T - 1, R rows at a time. GCC keeps the sums
// and operands of these R and T in the 16 registers; it spills those of 3 x 4 and 4 x 3.
template <class W, int R, int T, int kFetch>
void rows_span(const RowsWalk<W>& walk, int64_t n, int64_t end, int64_t k, int64_t inputs,
               int64_t m) {
  const DotArgs& a = walk.a;
  const int64_t xs = Rows::pos(1, 0, a.w->k);
  const char* w = static_cast<const char*>(a.w->data) + n * walk.stride + k * W::kBytes;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, k, a.w->k);
  float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0);
  const int64_t rows = end - n;
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    rows_tile<W, R, T, kFetch>(w + r * walk.stride, walk.stride, x, xs, inputs, c + r, a.c_stride,
                               k == 0, walk.ahead(n, r, k, inputs, R));
  }
  for (; r < rows; ++r) {
    rows_tile<W, 1, T, kFetch>(w + r * walk.stride, walk.stride, x, xs, inputs, c + r, a.c_stride,
                               k == 0, walk.ahead(n, r, k, inputs, 1));
  }
}

template <class W, int kFetch>
CPUMOE_INLINE void rows_tokens(const RowsWalk<W>& walk, int64_t n, int64_t end, int64_t k,
                               int64_t inputs, int64_t m, int64_t tokens) {
  if (tokens == 1) {
    rows_span<W, 4, 1, kFetch>(walk, n, end, k, inputs, m);
  } else if (tokens == 2) {
    rows_span<W, 4, 2, kFetch>(walk, n, end, k, inputs, m);
  } else if (tokens == 3) {
    rows_span<W, 3, 3, kFetch>(walk, n, end, k, inputs, m);
  } else {
    rows_span<W, 2, 4, kFetch>(walk, n, end, k, inputs, m);
  }
}

// All of a.n0..n1 x a.m0..m1, in spans of `span` inputs.
template <class W>
CPUMOE_INLINE void rows_walk(const DotArgs& a, int64_t span) {
  const WeightView& w = *a.w;
  if (a.m0 >= a.m1) return;
  const int64_t block =
      min64(kBlockRows, max64(4, kBlockBytes / max64(1, w.k * W::kBytes) / 4 * 4));
  const RowsWalk<W> walk{a, block, w.stride * W::kBytes, w.stride == w.k};
  for (int64_t n = a.n0; n < a.n1; n += block) {
    const int64_t end = min64(n + block, a.n1);
    int64_t k = 0;
    do {
      const int64_t inputs = min64(span, w.k - k);
      for (int64_t m = a.m0; m < a.m1;) {
        // Five tokens are three and two, six are three and three.
        const int64_t left = a.m1 - m, tokens = left == 4 || left >= 7 ? 4 : min64(left, 3);
        if (m > a.m0 + 4) {
          rows_tokens<W, 0>(walk, n, end, k, inputs, m, tokens);
        } else if (m > a.m0) {
          rows_tokens<W, 2>(walk, n, end, k, inputs, m, tokens);
        } else if (tokens < left) {
          // More tokens follow on this block: they ask for the nearer lines.
          rows_tokens<W, 1>(walk, n, end, k, inputs, m, tokens);
        } else {
          rows_tokens<W, 3>(walk, n, end, k, inputs, m, tokens);
        }
        m += tokens;
      }
      k += span;
    } while (k < w.k);
  }
}

}  // namespace
}  // namespace cpumoe::avx2
