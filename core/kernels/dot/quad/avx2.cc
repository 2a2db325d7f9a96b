// Two to four tokens: one row of memory at a time for all tokens, in spans of K whose activations
// stay in L1. Strictly one stream per core: rows read side by side come slower, even prefetched.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

constexpr int64_t kSpan = 1024;    // inputs: 4 tokens x 4 KiB beside the stream of weights in L1
constexpr int64_t kRows = 8;       // rows that take one span after the other
constexpr int64_t kAhead = 16384;  // bytes fetched into L2 ahead of their use, in the order of use

template <class W, int T>
CPUMOE_INLINE void step16(__m256 lo[T], __m256 hi[T], const char* w, const float* x, int64_t xs) {
  const __m256 a = W::lo(w), b = W::hi(w);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    lo[t] = _mm256_fmadd_ps(a, _mm256_loadu_ps(x + t * xs), lo[t]);
    hi[t] = _mm256_fmadd_ps(b, _mm256_loadu_ps(x + t * xs + 8), hi[t]);
  }
}

// c[t * cs] (+)= one row's products with T tokens over `inputs`; `next`: what to fetch meanwhile.
template <class W, int T>
CPUMOE_INLINE void row_span(const char* w, const char* next, int64_t inputs, const float* x,
                            int64_t xs, float* c, int64_t cs, bool first) {
  constexpr int64_t kLine = 64 / W::kBytes;
  __m256 lo[T], hi[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) lo[t] = hi[t] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLine <= inputs; k += kLine) {
    _mm_prefetch(next + k * W::kBytes, _MM_HINT_T1);
    step16<W, T>(lo, hi, w + k * W::kBytes, x + k, xs);
    if (kLine > 16) step16<W, T>(lo, hi, w + (k + 16) * W::kBytes, x + k + 16, xs);
  }
  if (kLine > 16 && k + 16 <= inputs) {
    step16<W, T>(lo, hi, w + k * W::kBytes, x + k, xs);
    k += 16;
  }
  if (k < inputs) {
    alignas(64) char tail[64];
    copy_tail16<W>(w + k * W::kBytes, inputs - k, tail);
    step16<W, T>(lo, hi, tail, x + k, xs);
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const float sum = sum8(_mm256_add_ps(lo[t], hi[t]));
    c[t * cs] = first ? sum : c[t * cs] + sum;
  }
}

template <class W, int T>
void features(const DotArgs& a, int64_t m) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Rows::pos(1, 0, w.k);
  const char* base = static_cast<const char*>(w.data);
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride - a.n0;
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    const int64_t rows = min64(kRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t inputs = min64(kSpan, w.k - k);
      const int64_t ahead = max64(1, kAhead / max64(64, inputs * W::kBytes));  // spans
      for (int64_t r = 0; r < rows; ++r) {
        const char* p = base + (n + r) * stride + k * W::kBytes;
        // The span to fetch: further down this block, else at its next inputs, else a block on.
        int64_t row = r + ahead, input = k;
        if (row >= rows) {
          row -= rows;
          if (k + kSpan < w.k) {
            input += kSpan;
          } else {
            row += kRows, input = 0;
          }
        }
        const char* next = p;
        if (n + row < a.n1) {
          if (input + inputs <= w.k) next = base + (n + row) * stride + input * W::kBytes;
        } else if (a.next != nullptr) {
          next = static_cast<const char*>(a.next) + (n + row - a.n1) * stride;
        }
        row_span<W, T>(p, next, inputs, x + k, xs, c + n + r, a.c_stride, k == 0);
      }
      k += kSpan;
    } while (k < w.k);
  }
}

template <class W>
void quad(const DotArgs& a) {
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      features<W, 1>(a, m), m += 1;
    } else if (left == 2) {
      features<W, 2>(a, m), m += 2;
    } else if (left == 3) {
      features<W, 3>(a, m), m += 3;
    } else {
      features<W, 4>(a, m), m += 4;
    }
  }
}

}  // namespace

void dot_quad_rows_f32(const DotArgs& a) { quad<F32>(a); }
void dot_quad_rows_f16(const DotArgs& a) { quad<F16>(a); }
void dot_quad_rows_bf16(const DotArgs& a) { quad<BF16>(a); }

size_t scratch_quad(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2
