// Few tokens: every weight is read once, in the order of memory, and used for all tokens while it is
// in a register.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/codes_avx2.h"

namespace cpumoe::avx2 {
namespace {

// ---- rows: two rows at a time, all tokens from registers and L1, one chain of 8 lanes per (feature,
// token). Every second product is added apart: the chain of a line of 64 bytes then takes 14 cycles,
// which paces the loads just above the speed of memory. Without the pace they overrun the prefetches
// and a core reads a third less (measured, Zen 4).

constexpr int64_t kAhead = 16384;  // bytes fetched into L2 ahead of their use, rounded up to whole rows

template <class W, int R, int T, bool kHi, bool kFused>
CPUMOE_INLINE void rows_half(__m256 acc[R][T], const char* w, int64_t stride, const float* x,
                             int64_t xs) {
  __m256 v[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) v[r] = kHi ? W::hi(w + r * stride) : W::lo(w + r * stride);
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    const __m256 xt = _mm256_loadu_ps(x + t * xs + (kHi ? 8 : 0));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      acc[r][t] = kFused ? _mm256_fmadd_ps(v[r], xt, acc[r][t])
                         : _mm256_add_ps(acc[r][t], _mm256_mul_ps(v[r], xt));
    }
  }
}
// 16 inputs.
template <class W, int R, int T>
CPUMOE_INLINE void rows_step(__m256 acc[R][T], const char* w, int64_t stride, const float* x,
                             int64_t xs) {
  rows_half<W, R, T, false, true>(acc, w, stride, x, xs);
  rows_half<W, R, T, true, false>(acc, w, stride, x, xs);
}

// c[t * cs + r] for R features and T tokens; next: as many bytes from here are fetched as w holds.
template <class W, int R, int T>
CPUMOE_INLINE void rows_tile(const char* w, int64_t stride, const float* x, int64_t xs,
                             int64_t inputs, float* c, int64_t cs, const char* next) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 acc[R][T];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
  }
  int64_t k = 0;
  for (; k + kLine <= inputs; k += kLine) {
    const char* p = w + k * W::kBytes;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm_prefetch(next + r * stride + k * W::kBytes, _MM_HINT_T1);
    for (int64_t i = 0; i < kLine; i += 16) {
      rows_step<W, R, T>(acc, p + i * W::kBytes, stride, x + k + i, xs);
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
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const __m256 h = _mm256_hadd_ps(acc[r][t], acc[r][t]);
      const __m256 q = _mm256_hadd_ps(h, h);
      c[t * cs + r] =
          _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
    }
  }
}

// Features [n0, n1) for T tokens.
template <class W, int T>
void rows_features(const DotArgs& a, int64_t n0, int64_t n1, int64_t m) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k);
  const int64_t ahead = stride > 0 ? ceil_div(kAhead, 2 * stride) * 2 : 0;  // rows
  const char* p = static_cast<const char*>(w.data) + n0 * stride;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride - a.n0;
  int64_t n = n0;
  for (; n + 2 <= n1; n += 2, p += 2 * stride) {
    const bool fetch = m == a.m0 && n + ahead + 2 <= a.n1;
    rows_tile<W, 2, T>(p, stride, x, xs, w.k, c + n, a.c_stride, fetch ? p + ahead * stride : p);
  }
  if (n < n1) rows_tile<W, 1, T>(p, stride, x, xs, w.k, c + n, a.c_stride, p);
}

template <class W>
void rows(const DotArgs& a) {
  // Beyond two tokens a few rows at a time stay in L2 for the next two.
  const int64_t block = a.m1 - a.m0 <= 2 ? a.n1 - a.n0 : 16;
  for (int64_t n = a.n0; n < a.n1; n += block) {
    const int64_t end = min64(n + block, a.n1);
    int64_t m = a.m0;
    for (; m + 2 <= a.m1; m += 2) rows_features<W, 2>(a, n, end, m);
    if (m < a.m1) rows_features<W, 1>(a, n, end, m);
  }
}

// ---- columns: blocks of `kInputs` rows of memory; sums of 16 features run down a block in registers
// and lie in the tile between blocks, in the order of W::lo and W::hi.

constexpr int64_t kInputs = 64;

// What to fetch while a block is being computed: the lines of the next one in the order of memory.
struct Ahead {
  const char* at;
  const char* row_end;
  int64_t row_bytes, stride;  // at == null: nothing
  CPUMOE_INLINE void step(Ahead& a) {
    _mm_prefetch(a.at, _MM_HINT_T1);
    a.at += 64;
    if (a.at >= a.row_end) {
      a.row_end += a.stride;
      a.at = a.row_end - a.row_bytes;
    }
  }
};

template <class W, int T>
CPUMOE_INLINE void columns_input(__m256 lo[T], __m256 hi[T], const char* w, const float* x, int64_t xs) {
  const __m256 a = W::lo(w), b = W::hi(w);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const __m256 v = _mm256_broadcast_ss(x + t * xs);
    lo[t] = _mm256_fmadd_ps(a, v, lo[t]);
    hi[t] = _mm256_fmadd_ps(b, v, hi[t]);
  }
}

// 16 features, `inputs` rows of memory, T tokens.
template <class W, int T>
CPUMOE_INLINE void columns_tile(const char* w, int64_t stride, int64_t inputs, const float* x,
                                int64_t xs, float* c, int64_t cs, bool first, Ahead& ahead) {
  __m256 lo[T], hi[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    lo[t] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs);
    hi[t] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs + 8);
  }
  int64_t k = 0;
  for (; k + 2 <= inputs; k += 2) {
    Ahead::step(ahead);
    if (W::kBytes == 4) Ahead::step(ahead);
    columns_input<W, T>(lo, hi, w, x + k, xs);
    columns_input<W, T>(lo, hi, w + stride, x + k + 1, xs);
    w += 2 * stride;
  }
  if (k < inputs) columns_input<W, T>(lo, hi, w, x + k, xs);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    _mm256_store_ps(c + t * cs, lo[t]);
    _mm256_store_ps(c + t * cs + 8, hi[t]);
  }
}

// Features [n0, n1) for T tokens.
template <class W, int T>
void columns_features(const DotArgs& a, int64_t n0, int64_t n1, int64_t m) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k), features = n1 - n0;
  const char* base = static_cast<const char*>(w.data) + n0 * W::kBytes;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride + (n0 - a.n0);
  int64_t k = 0;
  do {
    const int64_t inputs = min64(kInputs, w.k - k);
    const char* p = base + k * stride;
    const bool more = m == a.m0 && k + 2 * kInputs <= w.k;
    const char* next = more ? p + kInputs * stride : p;
    Ahead ahead{next, next + features * W::kBytes, features * W::kBytes, stride};
    int64_t f = 0;
    for (; f + 16 <= features; f += 16) {
      columns_tile<W, T>(p + f * W::kBytes, stride, inputs, x + k, xs, c + f, a.c_stride, k == 0, ahead);
    }
    if (f < features) {
      alignas(64) char tail[kInputs * 64];
      for (int64_t i = 0; i < inputs; ++i) {
        copy_tail16<W>(p + i * stride + f * W::kBytes, features - f, tail + i * 64);
      }
      columns_tile<W, T>(tail, 64, inputs, x + k, xs, c + f, a.c_stride, k == 0, ahead);
    }
    k += kInputs;
  } while (k < w.k);
  if (!W::kEvenOdd) return;
  for (int t = 0; t < T; ++t) {
    for (int64_t f = 0; f < features; f += 16) {
      float* p = c + t * a.c_stride + f;
      __m256 lo = _mm256_load_ps(p), hi = _mm256_load_ps(p + 8);
      from_even_odd(lo, hi);
      _mm256_store_ps(p, lo);
      _mm256_store_ps(p + 8, hi);
    }
  }
}

template <class W>
void columns(const DotArgs& a) {
  constexpr int64_t kSlice = 3072;  // the sums of one token lie in L1
  for (int64_t n = a.n0; n < a.n1; n += kSlice) {
    const int64_t end = min64(n + kSlice, a.n1);
    for (int64_t m = a.m0; m < a.m1;) {
      const int64_t left = a.m1 - m;
      if (left == 1) {
        columns_features<W, 1>(a, n, end, m), m += 1;
      } else if (left == 2) {
        columns_features<W, 2>(a, n, end, m), m += 2;
      } else if (left == 3) {
        columns_features<W, 3>(a, n, end, m), m += 3;
      } else {
        columns_features<W, 4>(a, n, end, m), m += 4;
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
