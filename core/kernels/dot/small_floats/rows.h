// Shape small_floats: rows of e4m3 and e2m1 weights with one to four tokens, for any width of
// vectors. Included by ISA files, each with its codes. Scales meet sums of up to 128 products.
//
// A code D offers
//   V                   its vectors: those of vec/floats.h, and spread
//   Act                 the layout of activations
//   kBytes, kFactor     bytes of Act::kChunk inputs; what is left of the power of two
//   kRun                inputs whose products are added before scales meet them
//   kScale              inputs of a scale, a divisor of kRun: the kLanes are shared out in order
//   kNear               bytes fetched into L1 ahead of their use at one token; 0: none
//   kPerFloat           inputs behind a float of Act: 1, or 2 as pairs of bf16
//   kFactors            whether Act has factors of its own; else it need not be whole chunks
//   rows(tokens)        rows computed side by side
//   load(p, nan)        kChunk inputs; `nan` collects what is_nan asks for
//   vector<J>(bits)     inputs kStep * i + J of them in lane i
#pragma once
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_codes.h"
#include "kernels/vec/floats.h"

namespace cpumoe::CPUMOE_NS::small_floats {

// Inputs of a span: those of all tokens are 16 KiB, beside the stream of weights in L1.
constexpr int64_t span_of(int tokens) { return tokens == 1 ? 4096 : tokens == 2 ? 2048 : 1024; }
constexpr int64_t kRows = 8;       // rows that take one span after the other
// Bytes fetched into L2 ahead of their use, at least; and once more at half the distance, because
// the CPU drops a prefetch when too many are under way.
constexpr int64_t kAhead = 16384;

// Scales of the runs of a span of one row, times the factors of each token.
template <class D, int T>
struct RunScales {
  static constexpr int64_t kGroup = D::Act::kGroup, kPerGroup = kGroup / D::kScale,
                           kMost = span_of(T) / D::kScale;
  alignas(64) float of[D::kFactors ? T : 1][kMost];

  // Out of line: R copies of it in every row_span are most of the code.
  __attribute__((noinline)) static void fill(RunScales& s, const WeightView& w, int64_t line,
                                             int64_t k, int64_t inputs, const float* factors,
                                             int64_t fs) {
    const int64_t size = w.format->scale_cols;
    const int64_t groups = ceil_div(inputs, kGroup);
    const int64_t count = ceil_div(inputs, size);
    alignas(64) float steps[kMost];
    codes::load_scales(w.scales, line, k / size, count, w.global_scale, steps);
    if (size == D::kScale) {
      for (int64_t i = count; i < groups * kPerGroup; ++i) steps[i] = 0;
    } else {  // one for 2^n groups; from the last on, so that none is overwritten before its use
      const int shift = count == 1 ? 63 : __builtin_ctzll(uint64_t(size / kGroup));
      for (int64_t g = groups; g-- > 0;) {
        const float scale = steps[g >> shift];
        for (int64_t i = 0; i < kPerGroup; ++i) steps[g * kPerGroup + i] = scale;
      }
    }
    for (int t = 0; t < (D::kFactors ? T : 1); ++t) {
      for (int64_t g = 0; g < groups; ++g) {
        const float factor = D::kFactors ? factors[t * fs + g] : 1.0f;
#pragma GCC unroll 8
        for (int64_t i = 0; i < kPerGroup; ++i)
          s.of[t][g * kPerGroup + i] = steps[g * kPerGroup + i] * factor;
      }
    }
  }
};

// Where a span of rows lies, and what to fetch meanwhile.
struct Span {
  const WeightView* w;
  int64_t n, k, inputs;
  const char *p, *far, *near;
  int64_t stride;
};

// sums[r * T + t] (+)= the products of R rows over a span with T tokens. scales[0] holds those of
// line `filled` of scales for this span, none where it is negative.
template <class D, int R, int T>
void row_span(const Span& s, const float* x, int64_t xs, const float* factors,
              RunScales<D, T>* scales, int64_t& filled, typename D::V::F* sums) {
  using V = typename D::V;
  using F = typename V::F;
  constexpr int64_t kChunk = D::Act::kChunk, kSteps = D::kRun / kChunk;
  const RunScales<D, T>* of[R];
  F total[R][T];
  typename D::Nan nan[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const int64_t line = (s.n + r) / s.w->format->scale_rows;
    of[r] = line == filled ? scales : scales + r;
    if (line != filled) RunScales<D, T>::fill(scales[r], *s.w, line, s.k, s.inputs, factors, xs);
    if (r == 0) filled = line;
    nan[r] = {};
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) total[r][t] = s.k == 0 ? V::zero() : sums[r * T + t];
  }
  // One run: the steps of kChunk inputs at(r, i) and x_at(t, i), added up and scaled.
  const auto run = [&](int64_t k, int64_t steps, const auto& at, const auto& x_at)
                       __attribute__((always_inline)) {
    F acc[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = V::zero();
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < steps; ++i) {
      typename D::Bits bits[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) bits[r] = D::load(at(r, i), nan[r]);
      const auto part = [&]<int J>() __attribute__((always_inline)) {
        F w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) w[r] = D::template vector<J>(bits[r]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          F xt = V::load(x_at(t, i) + J * V::kLanes);
          if (R > 1) V::keep(xt);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r][t] = V::products(w[r], xt, acc[r][t]);
        }
      };
      part.template operator()<0>();
      part.template operator()<1>();
      if constexpr (D::Act::kStep > 2) {
        part.template operator()<2>();
        part.template operator()<3>();
      }
      if constexpr (D::Act::kStep == 8) {
        part.template operator()<4>();
        part.template operator()<5>();
        part.template operator()<6>();
        part.template operator()<7>();
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        constexpr int kScales = int(D::kRun / D::kScale);
        const F f = V::template spread<kScales>(of[r]->of[D::kFactors ? t : 0] + k / D::kScale);
        total[r][t] = V::fma(acc[r][t], f, total[r][t]);
      }
    }
  };
  int64_t k = 0;
  for (; k + D::kRun <= s.inputs; k += D::kRun) {
    const int64_t byte = k / kChunk * D::kBytes;
    constexpr int64_t kRunBytes = kSteps * D::kBytes;
    if (kRunBytes >= 64 || byte % 64 == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        for (int64_t b = 0; b < kRunBytes; b += 64) {
          _mm_prefetch(s.far + r * s.stride + byte + b, _MM_HINT_T1);
          _mm_prefetch(s.near + r * s.stride + byte + b, _MM_HINT_T1);
          if (T == 1 && D::kNear != 0)
            _mm_prefetch(s.p + r * s.stride + byte + b + D::kNear, _MM_HINT_T0);
        }
      }
    }
    run(
        k, kSteps, [&](int r, int64_t i) { return s.p + r * s.stride + byte + i * D::kBytes; },
        [&](int t, int64_t i) { return x + t * xs + (k + i * kChunk) / D::kPerFloat; });
  }
  if (k < s.inputs) {
    alignas(64) char tail[R][kSteps * D::kBytes] = {};
    const int64_t byte = k / kChunk * D::kBytes;
    for (int r = 0; r < R; ++r) {
      memcpy(tail[r], s.p + r * s.stride + byte, size_t(line_bytes(D::kCode, s.inputs) - byte));
    }
    constexpr int64_t kFloats = D::kRun / D::kPerFloat;
    alignas(64) float x_tail[D::kFactors ? 1 : T][kFloats];
    const float* x_end = x + k / D::kPerFloat;
    int64_t x_stride = xs;
    if constexpr (!D::kFactors) {  // the line ends before the chunk does
      const int64_t floats = D::Act::line(s.inputs - k);
      for (int t = 0; t < T; ++t) {
        for (int64_t i = 0; i < kFloats; ++i) x_tail[t][i] = i < floats ? x_end[t * xs + i] : 0;
      }
      x_end = x_tail[0], x_stride = kFloats;
    }
    run(
        k, ceil_div(s.inputs - k, kChunk),
        [&](int r, int64_t i) { return tail[r] + i * D::kBytes; },
        [&](int t, int64_t i) { return x_end + t * x_stride + i * kChunk / D::kPerFloat; });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const F bad = V::broadcast(D::is_nan(nan[r]) ? bits_to_float(0x7fc00000u) : 0.0f);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[r * T + t] = V::add(total[r][t], bad);
  }
}

// Up to kRows rows from n on, T tokens from m on.
template <class D, int T>
void rows_tokens(const DotArgs& a, int64_t n, int64_t m) {
  using Act = typename D::Act;
  constexpr int R = D::rows(T);
  const WeightView& w = *a.w;
  const int64_t xs = Act::line(w.k), stride = line_bytes(D::kCode, w.stride);
  const int64_t ahead = round_up(ceil_div(kAhead, max64(64, stride)), kRows);  // rows
  const int64_t rows = min64(kRows, a.n1 - n);
  const char* base = line_at(w, n);
  // Where the block lies that is so many rows on; of this slice or of the next one.
  const auto rows_on = [&](int64_t count) {
    if (m != a.m0) return base;
    if (n + count < a.n1) return base + count * stride;
    if (a.next == nullptr) return base;
    return static_cast<const char*>(a.next) + (n + count - a.n1) * stride;
  };
  const char *far = rows_on(ahead), *near = rows_on(ahead / 2);
  const float* x = static_cast<const float*>(a.act) + m * xs;
  const float* factors = x;
  if constexpr (D::kFactors) factors = static_cast<const float*>(a.act) + Act::factor(m, 0, w.k);
  typename D::V::F sums[kRows * T];
  RunScales<D, T> scales[R];
  int64_t k = 0;
  do {
    const int64_t byte = line_bytes(D::kCode, k);
    Span s{&w, n, k, min64(span_of(T), w.k - k), base + byte, far + byte, near + byte, stride};
    const float* f = factors + k / Act::kGroup;
    int64_t r = 0, filled = -1;
    for (; r + R <= rows; r += R) {
      row_span<D, R, T>(s, x + k / D::kPerFloat, xs, f, scales, filled, sums + r * T);
      s.n += R, s.p += R * stride;
      s.far += R * stride, s.near += R * stride;
    }
    for (; R > 1 && r < rows; ++r) {
      row_span<D, 1, T>(s, x + k / D::kPerFloat, xs, f, scales, filled, sums + r * T);
      s.n += 1, s.p += stride, s.far += stride, s.near += stride;
    }
    k += span_of(T);
  } while (k < w.k);
  float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int t = 0; t < T; ++t) c[t * a.c_stride + r] = D::V::sum(sums[r * T + t]) * D::kFactor;
  }
}

template <class D>
__attribute__((noinline)) void tokens(const DotArgs& a) {
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    for (int64_t m = a.m0; m < a.m1;) {
      const int64_t left = a.m1 - m;
      if (left == 1) {
        rows_tokens<D, 1>(a, n, m), m += 1;
      } else if (left == 2) {
        rows_tokens<D, 2>(a, n, m), m += 2;
      } else if (left == 3) {
        rows_tokens<D, 3>(a, n, m), m += 3;
      } else {
        rows_tokens<D, 4>(a, n, m), m += 4;
      }
    }
  }
}

template <class D>
void all_tokens(const DotArgs& a) {
  with_subnormals([&] { tokens<D>(a); });
}

}  // namespace cpumoe::CPUMOE_NS::small_floats

// The functions of an ISA, whose file says what E4m3, E2m1<inputs that share a scale> are.
#define CPUMOE_SMALL_FLOATS                                                                       \
  void dot_small_floats_rows_e4m3(const DotArgs& a) { small_floats::all_tokens<E4m3>(a); }        \
  void dot_small_floats_rows_e2m1(const DotArgs& a) {                                             \
    if (a.w->format->scale_cols == 16) return small_floats::all_tokens<E2m1<16>>(a);              \
    small_floats::all_tokens<E2m1<32>>(a);                                                        \
  }                                                                                               \
  size_t scratch_small_floats(int64_t, int64_t, int64_t) { return 0; }
