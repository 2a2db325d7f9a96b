// A handful of tokens: the same dot form with several rows at once, so that loads of activations are
// shared too; bound by FMA, not by memory.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/codes_avx2.h"

namespace cpumoe::avx2 {
namespace {

// Lines of 64 bytes to fetch while one line of each of R rows is used: line l, r at
// next + l * line_step + r * row_step.
struct Ahead {
  const char* next;
  int64_t row_step, line_step;
};

// Sums run along K in 8 lanes per (feature, token), added up at the end.

// Half a step of 16 inputs. Whichever side is shorter stays in registers.
template <class W, int R, int T, bool kHi>
CPUMOE_INLINE void rows_half(__m256 acc[R][T], const char* w, int64_t stride, const float* x,
                             int64_t xs) {
  const auto weight = [&](int r) { return kHi ? W::hi(w + r * stride) : W::lo(w + r * stride); };
  const auto token = [&](int t) { return _mm256_loadu_ps(x + t * xs + (kHi ? 8 : 0)); };
  if constexpr (R <= T) {
    __m256 v[R];
    for (int r = 0; r < R; ++r) v[r] = weight(r);
    for (int t = 0; t < T; ++t) {
      const __m256 xt = token(t);
      for (int r = 0; r < R; ++r) acc[r][t] = _mm256_fmadd_ps(v[r], xt, acc[r][t]);
    }
  } else {
    __m256 v[T];
    for (int t = 0; t < T; ++t) v[t] = token(t);
    for (int r = 0; r < R; ++r) {
      const __m256 wr = weight(r);
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

// c[t * cs + r] for R features and T tokens.
template <class W, int R, int T>
void rows_tile(const char* w, int64_t stride, const float* x, int64_t xs, int64_t inputs, float* c,
               int64_t cs, Ahead ahead) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 acc[R][T];
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
  }
  int64_t k = 0;
  for (; k + kLine <= inputs; k += kLine) {
    for (int64_t i = 0; i < kLine; i += 16) {
      rows_step<W, R, T>(acc, w + (k + i) * W::kBytes, stride, x + k + i, xs);
    }
    for (int r = 0; r < R; ++r) {
      _mm_prefetch(ahead.next + r * ahead.row_step, _MM_HINT_T0);
    }
    ahead.next += ahead.line_step;
  }
  for (; k + 16 <= inputs; k += 16) {
    rows_step<W, R, T>(acc, w + k * W::kBytes, stride, x + k, xs);
  }
  if (k < inputs) {
    alignas(64) char tail[R * 64];
    for (int r = 0; r < R; ++r) {
      copy_tail16<W>(w + r * stride + k * W::kBytes, inputs - k, tail + r * 64);
    }
    rows_step<W, R, T>(acc, tail, 64, x + k, xs);
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) {
      const __m256 h = _mm256_hadd_ps(acc[r][t], acc[r][t]);
      const __m256 q = _mm256_hadd_ps(h, h);
      c[t * cs + r] = _mm_cvtss_f32(
          _mm_add_ss(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
    }
  }
}

// Features [n0, n1) for T tokens, R at a time.
template <class W, int R, int T>
void rows_group(const DotArgs& a, int64_t n0, int64_t n1, int64_t m, bool fetch) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k);
  const char* base = static_cast<const char*>(w.data);
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride;
  int64_t n = n0;
  for (; n + R <= n1; n += R) {
    const char* p = base + n * stride;
    Ahead ahead{p, 0, 0};
    if (fetch && n + 2 * R <= a.n1) {
      ahead.next = p + R * stride;
      ahead.row_step = w.stride == w.k ? 64 : stride;
      ahead.line_step = w.stride == w.k ? 64 * R : 64;
    }
    rows_tile<W, R, T>(p, stride, x, xs, w.k, c + (n - a.n0), a.c_stride, ahead);
  }
  for (; n < n1; ++n) {
    const char* p = base + n * stride;
    rows_tile<W, 1, T>(p, stride, x, xs, w.k, c + (n - a.n0), a.c_stride, Ahead{p, 0, 0});
  }
}

template <class W>
void rows(const DotArgs& a) {
  constexpr int64_t kBlock = 12;  // rows kept in L2 for the other tokens
  for (int64_t n = a.n0; n < a.n1; n += kBlock) {
    const int64_t end = min64(n + kBlock, a.n1);
    for (int64_t m = a.m0; m < a.m1;) {
      const int64_t left = a.m1 - m;
      const bool fetch = m == a.m0;
      if (left == 1) {
        rows_group<W, 4, 1>(a, n, end, m, fetch), m += 1;
      } else if (left == 2) {
        rows_group<W, 4, 2>(a, n, end, m, fetch), m += 2;
      } else if (left == 4 || left >= 7) {
        rows_group<W, 3, 4>(a, n, end, m, fetch), m += 4;
      } else {
        rows_group<W, 4, 3>(a, n, end, m, fetch), m += 3;
      }
    }
  }
}

}  // namespace

void dot_few_rows_f32(const DotArgs& a) { rows<F32>(a); }
void dot_few_rows_f16(const DotArgs& a) { rows<F16>(a); }
void dot_few_rows_bf16(const DotArgs& a) { rows<BF16>(a); }

size_t scratch_few(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2
