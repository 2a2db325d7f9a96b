// Few tokens: every weight is read once, in the order of memory, and used for all tokens while it is
// in a register.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/codes_avx2.h"

namespace cpumoe::avx2 {
namespace {

// ---- rows: one row of memory after the other, since hardware prefetchers follow one stream best.
// Sums run along K: 4 chains of 8 lanes per token (halves of even and odd groups of 16 inputs).

constexpr int64_t kAhead = 4096;  // bytes; into L2

template <class W, int T>
CPUMOE_INLINE void rows_step(__m256 acc[T][4], int chain, const char* w, const float* x, int64_t xs) {
  const __m256 lo = W::lo(w), hi = W::hi(w);
  for (int t = 0; t < T; ++t) {
    acc[t][chain] = _mm256_fmadd_ps(lo, _mm256_loadu_ps(x + t * xs), acc[t][chain]);
    acc[t][chain + 1] = _mm256_fmadd_ps(hi, _mm256_loadu_ps(x + t * xs + 8), acc[t][chain + 1]);
  }
}

// c[t * cs] of one feature.
template <class W, int T>
CPUMOE_INLINE void rows_feature(const char* w, const float* x, int64_t xs, int64_t inputs, float* c,
                                int64_t cs) {
  __m256 acc[T][4];
  for (int t = 0; t < T; ++t) {
    for (int i = 0; i < 4; ++i) acc[t][i] = _mm256_setzero_ps();
  }
  int64_t k = 0;
  for (; k + 32 <= inputs; k += 32) {
    const char* p = w + k * W::kBytes;
    for (int64_t b = 0; b < 32 * W::kBytes; b += 64) _mm_prefetch(p + kAhead + b, _MM_HINT_T1);
    rows_step<W, T>(acc, 0, p, x + k, xs);
    rows_step<W, T>(acc, 2, p + 16 * W::kBytes, x + k + 16, xs);
  }
  for (int chain = 0; k < inputs; k += 16, chain = 2) {
    alignas(64) char tail[64];
    const char* p = w + k * W::kBytes;
    if (k + 16 > inputs) {
      copy_tail16<W>(p, inputs - k, tail);
      p = tail;
    }
    if (chain == 0) {
      rows_step<W, T>(acc, 0, p, x + k, xs);
    } else {
      rows_step<W, T>(acc, 2, p, x + k, xs);
    }
  }
  for (int t = 0; t < T; ++t) {
    const __m256 sum = _mm256_add_ps(_mm256_add_ps(acc[t][0], acc[t][1]),
                                     _mm256_add_ps(acc[t][2], acc[t][3]));
    const __m256 h = _mm256_hadd_ps(sum, sum);
    const __m256 q = _mm256_hadd_ps(h, h);
    c[t * cs] = _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
  }
}

template <class W, int T>
void rows_features(const DotArgs& a, int64_t n0, int64_t n1, int64_t m) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k);
  const char* p = static_cast<const char*>(w.data) + n0 * stride;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride + (n0 - a.n0);
  for (int64_t n = n0; n < n1; ++n, p += stride, ++c) rows_feature<W, T>(p, x, xs, w.k, c, a.c_stride);
}

template <class W>
void rows(const DotArgs& a) {
  // Beyond three tokens a few rows at a time stay in L2 for the next three.
  const int64_t block = a.m1 - a.m0 <= 3 ? a.n1 - a.n0 : 16;
  for (int64_t n = a.n0; n < a.n1; n += block) {
    const int64_t end = min64(n + block, a.n1);
    for (int64_t m = a.m0; m < a.m1; m += 3) {
      if (a.m1 - m >= 3) {
        rows_features<W, 3>(a, n, end, m);
      } else if (a.m1 - m == 2) {
        rows_features<W, 2>(a, n, end, m);
      } else {
        rows_features<W, 1>(a, n, end, m);
      }
    }
  }
}

// ---- columns: sums run down K in the tile itself, features in lanes; U inputs per pass over a slice.

template <class W>
CPUMOE_INLINE void columns_step(float* c, int64_t cs, const char* w, int64_t stride, int inputs,
                                int tokens, const __m256* x, bool first) {
  __m256 lo[4], hi[4];
  for (int t = 0; t < tokens; ++t) {
    lo[t] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs);
    hi[t] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs + 8);
  }
  for (int u = 0; u < inputs; ++u) {
    const __m256 a = W::lo(w + u * stride), b = W::hi(w + u * stride);
    for (int t = 0; t < tokens; ++t) {
      lo[t] = _mm256_fmadd_ps(a, x[u * tokens + t], lo[t]);
      hi[t] = _mm256_fmadd_ps(b, x[u * tokens + t], hi[t]);
    }
  }
  for (int t = 0; t < tokens; ++t) {
    _mm256_store_ps(c + t * cs, lo[t]);
    _mm256_store_ps(c + t * cs + 8, hi[t]);
  }
}

// U inputs (rows of memory), `features` wide, for T tokens. x: input 0 of token 0.
template <class W, int U, int T>
void columns_pass(const char* w, int64_t stride, int64_t features, const float* x, int64_t xs,
                  float* c, int64_t cs, bool first, const char* next) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 xv[U * T];
  for (int u = 0; u < U; ++u) {
    for (int t = 0; t < T; ++t) xv[u * T + t] = _mm256_broadcast_ss(x + t * xs + u);
  }
  int64_t f = 0;
  for (; f + kLine <= features; f += kLine) {
    for (int u = 0; u < U; ++u) _mm_prefetch(next + u * stride + f * W::kBytes, _MM_HINT_T0);
    for (int64_t i = 0; i < kLine; i += 16) {
      columns_step<W>(c + f + i, cs, w + (f + i) * W::kBytes, stride, U, T, xv, first);
    }
  }
  for (; f + 16 <= features; f += 16) {
    columns_step<W>(c + f, cs, w + f * W::kBytes, stride, U, T, xv, first);
  }
  if (f < features) {
    alignas(64) char tail[U * 64];
    for (int u = 0; u < U; ++u) {
      copy_tail16<W>(w + u * stride + f * W::kBytes, features - f, tail + u * 64);
    }
    columns_step<W>(c + f, cs, tail, 64, U, T, xv, first);
  }
}

template <class W, int U, int T>
void columns_group(const DotArgs& a, int64_t n0, int64_t n1, int64_t m) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k);
  const char* base = static_cast<const char*>(w.data) + n0 * W::kBytes;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride + (n0 - a.n0);
  int64_t k = 0;
  for (; k + U <= w.k; k += U) {
    const char* p = base + k * stride;
    const char* next = k + 2 * U <= w.k ? p + U * stride : p;
    columns_pass<W, U, T>(p, stride, n1 - n0, x + k, xs, c, a.c_stride, k == 0, next);
  }
  for (; k < w.k; ++k) {
    const char* p = base + k * stride;
    columns_pass<W, 1, T>(p, stride, n1 - n0, x + k, xs, c, a.c_stride, k == 0, p);
  }
  for (int t = 0; t < T; ++t) {
    for (int64_t n = 0; n < n1 - n0; n += 16) {
      float* p = c + t * a.c_stride + n;
      __m256 lo = _mm256_load_ps(p), hi = _mm256_load_ps(p + 8);
      if (w.k == 0) lo = hi = _mm256_setzero_ps();
      if constexpr (W::kEvenOdd) from_even_odd(lo, hi);
      _mm256_store_ps(p, lo);
      _mm256_store_ps(p + 8, hi);
    }
  }
}

template <class W>
void columns(const DotArgs& a) {
  constexpr int64_t kSlice = 1024;  // its sums for 4 tokens take half of L1
  for (int64_t n = a.n0; n < a.n1; n += kSlice) {
    const int64_t end = min64(n + kSlice, a.n1);
    for (int64_t m = a.m0; m < a.m1;) {
      const int64_t left = a.m1 - m;
      if (left == 1) {
        columns_group<W, 8, 1>(a, n, end, m), m += 1;
      } else if (left == 2) {
        columns_group<W, 4, 2>(a, n, end, m), m += 2;
      } else if (left == 3) {
        columns_group<W, 4, 3>(a, n, end, m), m += 3;
      } else {
        columns_group<W, 4, 4>(a, n, end, m), m += 4;
      }
    }
  }
}

}  // namespace

void dot_stream_rows_f32(const DotArgs& a) { rows<F32>(a); }
void dot_stream_rows_f16(const DotArgs& a) { rows<F16>(a); }
void dot_stream_rows_bf16(const DotArgs& a) { rows<BF16>(a); }
void dot_stream_columns_f32(const DotArgs& a) { columns<F32>(a); }
void dot_stream_columns_f16(const DotArgs& a) { columns<F16>(a); }
void dot_stream_columns_bf16(const DotArgs& a) { columns<BF16>(a); }

size_t scratch_stream(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2
