// A handful of tokens: the same dot form with several rows at once, so that loads of activations
// are shared too; bound by FMA, not by memory.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

// Bytes fetched into L2 ahead of their use, rounded up to whole rows.
constexpr int64_t kAhead = 16384;

// Sums run along K in 8 lanes per (feature, token), added up at the end.

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
      const __m256 xt = token(t);
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

// c[t * cs + r] for R features and T tokens.
template <class W, int R, int T>
void rows_tile(const char* w, int64_t stride, const float* x, int64_t xs, int64_t inputs, float* c,
               int64_t cs, const char* next) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 acc[R][T];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
  }
  int64_t k = 0;
  for (; k + kLine <= inputs; k += kLine) {
    for (int64_t i = 0; i < kLine; i += 16) {
      rows_step<W, R, T>(acc, w + (k + i) * W::kBytes, stride, x + k + i, xs);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm_prefetch(next + r * stride + k * W::kBytes, _MM_HINT_T1);
  }
  for (; k + 16 <= inputs; k += 16) {
    rows_step<W, R, T>(acc, w + k * W::kBytes, stride, x + k, xs);
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
  for (int i = 0; i < kSums; ++i) c[i / R * cs + i % R] = sums[i];
}

// Features [n0, n1) for T tokens, R at a time.
template <class W, int R, int T>
void rows_group(const DotArgs& a, int64_t n0, int64_t n1, int64_t m, bool fetch) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k);
  const char* base = static_cast<const char*>(w.data);
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride;
  const int64_t ahead = stride > 0 ? ceil_div(kAhead, stride) : 0;  // rows
  int64_t n = n0;
  for (; n + R <= n1; n += R) {
    const char* p = base + n * stride;
    const char* next = fetch && n + ahead + R <= a.n1 ? p + ahead * stride : p;
    rows_tile<W, R, T>(p, stride, x, xs, w.k, c + (n - a.n0), a.c_stride, next);
  }
  for (; n < n1; ++n) {
    const char* p = base + n * stride;
    rows_tile<W, 1, T>(p, stride, x, xs, w.k, c + (n - a.n0), a.c_stride, p);
  }
}

template <class W>
void rows(const DotArgs& a) {
  // Beyond four tokens a few rows at a time stay in L2 for the next four.
  const int64_t block = a.m1 - a.m0 <= 4 ? a.n1 - a.n0 : 12;
  for (int64_t n = a.n0; n < a.n1; n += block) {
    const int64_t end = min64(n + block, a.n1);
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
