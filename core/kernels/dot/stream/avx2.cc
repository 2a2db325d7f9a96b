// One token (rows) or up to four (columns): every weight is read once, in the order of memory, and
// used for all tokens while it is in a register.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/dot/stream/lines_ahead.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

// ---- rows. Long rows: two at a time, so that loads of activations are shared, and one chain of 8
// lanes per row. Of every 16 inputs one half (W::lo) enters the chain by a fused multiply-add, the
// other (W::hi) is multiplied apart and added: latencies of 4 and 3 cycles on Zen 4, so that the
// chain of a line of 64 bytes takes 14 cycles with 2-byte weights, 7 with fp32. This paces the
// loads just above the speed of memory; unpaced they overrun the prefetches (compare by editing
// kFused below and running `kernels_dot_dot_bench`).

// Bytes fetched into L2 ahead of their use, rounded up to whole rows.
constexpr int64_t kAhead = 16384;

// What to fetch while the row at p is used: row n, `ahead` rows further; past the slice, the
// caller's next one.
CPUMOE_INLINE const char* line_ahead(const DotArgs& a, const char* p, int64_t n, int64_t ahead,
                                     int64_t stride) {
  if (n < a.n1) return p + ahead * stride;
  return a.next != nullptr ? static_cast<const char*>(a.next) + (n - a.n1) * stride : p;
}

template <class W, int R, bool kHi, bool kFused>
CPUMOE_INLINE void rows_half(__m256 acc[R], const char* w, int64_t stride, const float* x) {
  const __m256 xt = _mm256_loadu_ps(x + (kHi ? 8 : 0));
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    const __m256 v = kHi ? W::hi(w + r * stride) : W::lo(w + r * stride);
    acc[r] = kFused ? _mm256_fmadd_ps(v, xt, acc[r]) : _mm256_add_ps(acc[r], _mm256_mul_ps(v, xt));
  }
}
// 16 inputs.
template <class W, int R>
CPUMOE_INLINE void rows_step(__m256 acc[R], const char* w, int64_t stride, const float* x) {
  rows_half<W, R, false, true>(acc, w, stride, x);
  rows_half<W, R, true, false>(acc, w, stride, x);
}

// c[r] for R features; next: the R rows from here are fetched, and the R rows behind them, so that
// every line is asked for twice: the CPU drops a prefetch when too many are under way.
template <class W, int R>
CPUMOE_INLINE void rows_tile(const char* w, int64_t stride, const float* x, int64_t inputs,
                             float* c, const char* next) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 acc[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLine <= inputs; k += kLine) {
    const char* p = w + k * W::kBytes;
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      _mm_prefetch(next + r * stride + k * W::kBytes, _MM_HINT_T1);
      _mm_prefetch(next + (R + r) * stride + k * W::kBytes, _MM_HINT_T1);
    }
    for (int64_t i = 0; i < kLine; i += 16) {
      rows_step<W, R>(acc, p + i * W::kBytes, stride, x + k + i);
    }
  }
  if (kLine > 16 && k + 16 <= inputs) {
    rows_step<W, R>(acc, w + k * W::kBytes, stride, x + k);
    k += 16;
  }
  if (k < inputs) {
    alignas(64) char tail[R * 64];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      copy_tail16<W>(w + r * stride + k * W::kBytes, inputs - k, tail + r * 64);
    }
    rows_step<W, R>(acc, tail, 64, x + k);
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) c[r] = sum8(acc[r]);
}

// Rows whose activations leave room in L1 are read one after the other: that is one stream per
// core, which the hardware fetches; every second line 12 KiB ahead helps it over page borders.
constexpr int64_t kShortRow = 2048;     // inputs
constexpr int64_t kShortAhead = 12288;  // bytes

// Fetching the second line of a pair keeps the hardware from fetching the first, so the pairs must
// be those of memory, however a tensor lies in its file.
CPUMOE_INLINE const char* pair_of(const char* p) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t(127));
}

template <class W>
CPUMOE_INLINE float short_row(const char* w, const char* next, const float* x, int64_t inputs) {
  constexpr int64_t kStep = 128 / W::kBytes;  // two lines
  __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
  int64_t k = 0;
  for (; k + kStep <= inputs; k += kStep) {
    _mm_prefetch(next + k * W::kBytes, _MM_HINT_T1);
#pragma GCC unroll 2
    for (int64_t i = k; i < k + kStep; i += 32) {
      const char* p = w + i * W::kBytes;
      s0 = _mm256_fmadd_ps(W::lo(p), _mm256_loadu_ps(x + i), s0);
      s1 = _mm256_fmadd_ps(W::hi(p), _mm256_loadu_ps(x + i + 8), s1);
      s2 = _mm256_fmadd_ps(W::lo(p + 16 * W::kBytes), _mm256_loadu_ps(x + i + 16), s2);
      s3 = _mm256_fmadd_ps(W::hi(p + 16 * W::kBytes), _mm256_loadu_ps(x + i + 24), s3);
    }
  }
  for (; k < inputs; k += 16) {
    alignas(64) char tail[64];
    const char* p = w + k * W::kBytes;
    if (inputs - k < 16) {
      copy_tail16<W>(p, inputs - k, tail);
      p = tail;
    }
    s0 = _mm256_fmadd_ps(W::lo(p), _mm256_loadu_ps(x + k), s0);
    s1 = _mm256_fmadd_ps(W::hi(p), _mm256_loadu_ps(x + k + 8), s1);
  }
  const __m256 s = _mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3));
  return sum8(s);
}

template <class W>
void short_rows(const DotArgs& a, const float* x, float* c) {
  const int64_t stride = a.w->stride * W::kBytes;
  const int64_t ahead = max64(1, kShortAhead / max64(64, a.w->k * W::kBytes));  // rows
  const char* p = static_cast<const char*>(a.w->data) + a.n0 * stride;
  for (int64_t n = a.n0; n < a.n1; ++n, p += stride) {
    *c++ = short_row<W>(p, pair_of(line_ahead(a, p, n + ahead, ahead, stride)), x, a.w->k);
  }
}

template <class W>
void long_rows(const DotArgs& a, const float* x, float* c) {
  const int64_t stride = a.w->stride * W::kBytes;
  const int64_t ahead = stride > 0 ? ceil_div(kAhead, 2 * stride) * 2 : 0;  // rows
  const char* p = static_cast<const char*>(a.w->data) + a.n0 * stride;
  int64_t n = a.n0;
  for (; n + 2 <= a.n1; n += 2, p += 2 * stride, c += 2) {
    rows_tile<W, 2>(p, stride, x, a.w->k, c, line_ahead(a, p, n + ahead, ahead, stride));
  }
  if (n < a.n1) rows_tile<W, 1>(p, stride, x, a.w->k, c, p);
}

template <class W>
void rows(const DotArgs& a) {
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, a.w->k);
    float* c = a.c + (m - a.m0) * a.c_stride;
    a.w->k <= kShortRow ? short_rows<W>(a, x, c) : long_rows<W>(a, x, c);
  }
}

// ---- columns: blocks of a few lines of memory; sums of 16 features run down a block in registers
// and lie in the tile between blocks, in the order of W::lo and W::hi. Lines are asked for in the
// order of memory, twice, one and two blocks ahead.

// 16 features, R lines of memory, T tokens.
template <class W, int T, int R>
CPUMOE_INLINE void columns_tile(const char* w, int64_t stride, const float* x, int64_t xs, float* c,
                                int64_t cs, bool first, LinesAhead ahead[2]) {
  __m256 lo[T], hi[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    lo[t] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs);
    hi[t] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs + 8);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (W::kBytes == 4 || r % 2 == 0) {
      LinesAhead::step(ahead[0]);
      LinesAhead::step(ahead[1]);
    }
    const __m256 a = W::lo(w + r * stride), b = W::hi(w + r * stride);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 v = _mm256_broadcast_ss(x + t * xs + r);
      lo[t] = _mm256_fmadd_ps(a, v, lo[t]);
      hi[t] = _mm256_fmadd_ps(b, v, hi[t]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    _mm256_store_ps(c + t * cs, lo[t]);
    _mm256_store_ps(c + t * cs + 8, hi[t]);
  }
}

// All features, R lines of memory, T tokens.
template <class W, int T, int R>
CPUMOE_INLINE void columns_block(const char* w, int64_t stride, int64_t features, const float* x,
                                 int64_t xs, float* c, int64_t cs, bool first,
                                 LinesAhead ahead[2]) {
  int64_t f = 0;
  for (; f + 16 <= features; f += 16) {
    columns_tile<W, T, R>(w + f * W::kBytes, stride, x, xs, c + f, cs, first, ahead);
  }
  if (f < features) {
    alignas(64) char tail[R * 64];
    for (int r = 0; r < R; ++r) {
      copy_tail16<W>(w + r * stride + f * W::kBytes, features - f, tail + r * 64);
    }
    columns_tile<W, T, R>(tail, 64, x, xs, c + f, cs, first, ahead);
  }
}

// Features [a.n0, a.n1), tokens m .. m + T - 1.
template <class W, int T>
void columns_tokens(const DotArgs& a, int64_t m) {
  constexpr int kLines = 8;
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k), features = a.n1 - a.n0;
  const char* base = static_cast<const char*>(w.data) + a.n0 * W::kBytes;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride;
  const auto block_at = [&](int64_t k) { return lines_from(a, W::kBytes, kLines, k); };
  int64_t k = 0;
  for (; k + kLines <= w.k; k += kLines) {
    LinesAhead ahead[2] = {block_at(k + 2 * kLines), block_at(k + kLines)};
    columns_block<W, T, kLines>(base + k * stride, stride, features, x + k, xs, c, a.c_stride,
                                k == 0, ahead);
  }
  for (; k < w.k; ++k) {
    LinesAhead ahead[2] = {block_at(w.k), block_at(w.k)};
    columns_block<W, T, 1>(base + k * stride, stride, features, x + k, xs, c, a.c_stride, k == 0,
                           ahead);
  }
  if (w.k == 0) {
    for (int t = 0; t < T; ++t) memset(c + t * a.c_stride, 0, size_t(features) * sizeof(float));
    return;
  }
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
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      columns_tokens<W, 1>(a, m), m += 1;
    } else if (left == 2) {
      columns_tokens<W, 2>(a, m), m += 2;
    } else if (left == 3) {
      columns_tokens<W, 3>(a, m), m += 3;
    } else {
      columns_tokens<W, 4>(a, m), m += 4;
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
