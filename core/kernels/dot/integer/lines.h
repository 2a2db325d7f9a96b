// Shape int_lines: one to four tokens and plain codes of which several share a byte. A line of 64
// bytes is multiplied as it lies, one register of activations per code of a byte; four bytes are a
// lane, which never holds two scales. Included by ISA files with VNNI only.
//
// A source, one small struct per code:
//   kCodes          of a byte
//   kBits           log2 of the middle, which is subtracted from every code in integers
//   kFactor         of every scale
//   kSigned         codes of signed numbers: whatever the format says, the middle is their zero
//   unpack(v, w)    kCodes registers of unsigned codes
#pragma once
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/integer/grid_values.h"
#include "kernels/dot/integer/scales.h"
#include "kernels/dot/integer/scales16.h"
#include "kernels/dot/layouts.h"
#include "kernels/dot/stream/pieces.h"
#include "kernels/vec/avx512.h"

namespace cpumoe::CPUMOE_NS {

struct U4Lines {
  static constexpr int kCodes = 2, kBits = 3;
  static constexpr float kFactor = 1;
  static constexpr bool kSigned = false;
  CPUMOE_INLINE void unpack(__m512i v, __m512i w[kCodes]) {
    const __m512i low = _mm512_set1_epi8(15);
    w[0] = _mm512_and_si512(v, low);
    w[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
  }
};
// Doubled e2m1 plus 16.
struct E2m1Lines {
  static constexpr int kCodes = 2, kBits = 4;
  static constexpr float kFactor = 0.5f;
  static constexpr bool kSigned = true;
  CPUMOE_INLINE void unpack(__m512i v, __m512i w[kCodes]) {
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
    U4Lines::unpack(v, w);
    w[0] = _mm512_shuffle_epi8(table, w[0]);
    w[1] = _mm512_shuffle_epi8(table, w[1]);
  }
};
struct U2Lines {
  static constexpr int kCodes = 4, kBits = 1;
  static constexpr float kFactor = 1;
  static constexpr bool kSigned = false;
  CPUMOE_INLINE void unpack(__m512i v, __m512i w[kCodes]) {
    const __m512i low = _mm512_set1_epi8(3);
    w[0] = _mm512_and_si512(v, low);
#pragma GCC unroll 4
    for (int j = 1; j < kCodes; ++j) w[j] = _mm512_and_si512(_mm512_srli_epi16(v, 2 * j), low);
  }
};

constexpr int64_t kLinesRows = 8;  // that take one piece after the other
// Inputs of a piece: those of all tokens are 16 KiB, beside the stream of weights in L1.
template <int T>
constexpr int64_t kLinesPiece = T == 1   ? 8192
                                : T == 2 ? 4096
                                         : 2048;
constexpr int64_t kLinesScales = kLinesPiece<1> / 16 + 32;

// Scales and zero points of a matrix, one after the other as they lie along a row.
struct LinesGrid {
  const WeightView* w;
  int shift;      // log2 of inputs that share a scale, or more than K has
  float factor;   // of every scale
  float zero;     // zero point of every code, or what is added to a stored one
  float middle;   // what is subtracted in integers
  __m512i index;  // of each lane's scale, counted from the line's first
};

template <Code C>
CPUMOE_INLINE void copy_scales(const char* p, int64_t count, float factor, float* to) {
  const char* end = p + count * code_block(C).bytes;
  const __m512 by = _mm512_set1_ps(factor);
  int64_t i = 0;
  for (; i < count; i += 16) {
    const __m512 s = scales16<C>(p + i * code_block(C).bytes, end);
    _mm512_storeu_ps(to + i, _mm512_mul_ps(s, by));
  }
  _mm512_storeu_ps(to + i, _mm512_setzero_ps());  // a line takes 16 from its first one on
}

CPUMOE_INLINE const char* scales_of(const LinesGrid& g, int64_t n, int64_t first) {
  const MatrixView& m = g.w->scales;
  const int64_t line = n / g.w->format->scale_rows;
  return static_cast<const char*>(m.data) + line_bytes(m.code, line * m.stride + first);
}
// They are few bytes of many lines, of which a core alone sees no pattern.
CPUMOE_INLINE void fetch_scales(const LinesGrid& g, int64_t n, int64_t first, int64_t count) {
  const char* p = scales_of(g, n, first);
  const char* end = p + line_bytes(g.w->scales.code, count);
  for (; p < end; p += 64) _mm_prefetch(p, _MM_HINT_T0);
}

// Scales first .. first + count of the rows' lines. Returns how many floats the rows are apart.
static __attribute__((noinline)) int64_t load_scales(const LinesGrid& g, int64_t n, int64_t rows,
                                                     int64_t first, int64_t count, float* to) {
  const Format& f = *g.w->format;
  const MatrixView& m = g.w->scales;
  const auto copy = [&]<Code C>() __attribute__((always_inline)) -> int64_t {
    if (f.scale_rows == 1 && m.stride == count) {  // one after the other
      copy_scales<C>(scales_of(g, n, first), rows * count, g.factor, to);
      return count;
    }
    for (int64_t r = 0; r < rows; ++r, to += kLinesScales)
      copy_scales<C>(scales_of(g, n + r, first), count, g.factor, to);
    return kLinesScales;
  };
  switch (m.code) {
    case Code::f16:
      return copy.template operator()<Code::f16>();
    case Code::bf16:
      return copy.template operator()<Code::bf16>();
    case Code::e8m0:
      return copy.template operator()<Code::e8m0>();
    case Code::e4m3:
      return copy.template operator()<Code::e4m3>();
    default:
      return copy.template operator()<Code::f32>();
  }
}
// Zero points likewise, less the middle and divided by it: times what the middle took from a sum
// they give what is left to take.
static __attribute__((noinline)) void load_zeros(const LinesGrid& g, int64_t n, int64_t rows,
                                                 int64_t first, int64_t count, float* to,
                                                 int64_t step) {
  const WeightView& w = *g.w;
  const MatrixView& m = w.zeros;
  const bool stored = w.format->stored_zeros();
  const __m256 plus = _mm256_set1_ps(g.zero - g.middle), by = _mm256_set1_ps(1 / g.middle);
  const int64_t bytes = stored ? line_bytes(m.code, m.stride) : 0;
  const char* data = static_cast<const char*>(m.data);
  const char* end = stored ? end_of(m) : data;
  for (int64_t r = 0; r < rows; ++r) {
    const char* line = data + (n + r) / w.format->scale_rows * bytes;
    for (int64_t i = 0; i < count + 16; i += 8) {
      const __m256 v =
          stored && i < count ? zeros_at(m.code, line, end, first + i) : _mm256_setzero_ps();
      _mm256_storeu_ps(to + r * step + i, _mm256_mul_ps(_mm256_add_ps(v, plus), by));
    }
  }
}

// Scales (and zeros) of a piece of each row of a block, `step` floats apart. They are written well
// before they are read: a read across two vectors just written waits for both to reach L1.
template <bool kZeros>
struct LinesScales {
  int64_t step;
  alignas(64) float of[kLinesRows * kLinesScales];
  alignas(64) float zeros[kZeros ? kLinesRows * kLinesScales : 1];
};

// sums[r * T + t] (+)= `bytes` of R rows from p on, which is their byte `byte`, times T tokens from
// x on. row: the first one's in `scales`.
template <class D, bool kZeros, int R, int T>
CPUMOE_INLINE void lines_piece(const char* p, int64_t stride, int64_t bytes, const LinesGrid& g,
                               const LinesScales<kZeros>& scales, int64_t row, const char* x,
                               int64_t xs, bool first, __m512* sums, const Ahead<2>& ahead,
                               int64_t byte) {
  using L = Lines<D::kCodes>;
  __m512 acc[R][T];
  const float *of[R], *zeros[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    of[r] = scales.of + (row + r) * scales.step;
    zeros[r] = scales.zeros + (kZeros ? (row + r) * scales.step : 0);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = first ? _mm512_setzero_ps() : sums[r * T + t];
  }
  // lanes: those that have inputs. Behind them lie scales of another row.
  const auto line = [&](int64_t i, __mmask16 lanes, const auto& load)
      __attribute__((always_inline)) {
    __m512i w[R][D::kCodes];
    __m512 s[R], z[R];
    const int64_t at = i * L::kInputs >> g.shift;
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      __m512i v = load(p + r * stride + i * 64);
      __asm__("" : "+v"(v));  // else GCC reads it once per code
      D::unpack(v, w[r]);
      s[r] = _mm512_maskz_permutexvar_ps(lanes, g.index, _mm512_loadu_ps(of[r] + at));
      if (kZeros) z[r] = _mm512_permutexvar_ps(g.index, _mm512_loadu_ps(zeros[r] + at));
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const char* xt = x + t * xs + i * L::kBytes;
      const __m512i minus = _mm512_slli_epi32(_mm512_load_si512(xt + L::kMinus), D::kBits);
      __m512 scale = _mm512_load_ps(xt + L::kScale);
      __asm__("" : "+v"(scale));
      __m512i sum[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) sum[r] = minus;
#pragma GCC unroll 4
      for (int j = 0; j < D::kCodes; ++j) {
        __m512i codes = _mm512_load_si512(xt + 64 * j);
        if constexpr (R > 1) __asm__("" : "+v"(codes));  // else GCC reads it once per row
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) sum[r] = _mm512_dpbusd_epi32(sum[r], w[r][j], codes);
      }
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        __m512 v = _mm512_cvtepi32_ps(sum[r]);
        if (kZeros) v = _mm512_fmadd_ps(z[r], _mm512_cvtepi32_ps(minus), v);
        acc[r][t] = _mm512_fmadd_ps(_mm512_mul_ps(v, scale), s[r], acc[r][t]);
      }
    }
  };
  int64_t i = 0;
  for (; i < bytes / 64; ++i) {
    Ahead<2>::fetch<64>(ahead, byte + i * 64);
    line(i, 0xffff, [](const char* from) __attribute__((always_inline)) {
      return _mm512_loadu_si512(from);
    });
  }
  if (i * 64 < bytes) {
    const int64_t left = bytes - i * 64;
    const __mmask64 there = (uint64_t(1) << left) - 1;
    const auto load = [=](const char* from) __attribute__((always_inline)) {
      return _mm512_maskz_loadu_epi8(there, from);
    };
    line(i, __mmask16((1 << ceil_div(left, 4)) - 1), load);
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[r * T + t] = acc[r][t];
  }
}

// All features of the slice for T tokens from m on.
template <class D, Code C, bool kZeros, int T>
static void lines_tokens(const DotArgs& a, const LinesGrid& g, int64_t m) {
  using L = Lines<D::kCodes>;
  constexpr int64_t kPiece = kLinesPiece<T>;
  const WeightView& w = *a.w;
  const int64_t xs = L::line_bytes(w.k), stride = line_bytes(C, w.stride);
  const char* base = static_cast<const char*>(w.data);
  const char* x = static_cast<const char*>(a.act) + m * xs;
  float* c = a.c + (m - a.m0) * a.c_stride;
  const Pieces pieces{base,  static_cast<const char*>(a.next), stride, a.n1, kLinesRows,
                      kPiece / D::kCodes, line_bytes(C, w.k)};
  __m512 sums[kLinesRows * T];
  LinesScales<kZeros> of;
  for (int64_t n = a.n0; n < a.n1; n += kLinesRows) {
    const int64_t rows = min64(kLinesRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t inputs = min64(kPiece, w.k - k), byte = k / D::kCodes;
      const int64_t from = k >> g.shift;
      const int64_t count = inputs == 0 ? 0 : ((k + inputs - 1) >> g.shift) - from + 1;
      const auto later = Later<2>::than(pieces, byte);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t ahead = n + r + later.rows[0] + kLinesRows;
        if (ahead < a.n1) fetch_scales(g, ahead, from, count);
      }
      of.step = load_scales(g, n, rows, from, count, of.of);
      if (kZeros) load_zeros(g, n, rows, from, count, of.zeros, of.step);
      const auto rows_from = [&]<int R>(int64_t r) __attribute__((always_inline)) {
        lines_piece<D, kZeros, R, T>(base + (n + r) * stride + byte, stride, line_bytes(C, inputs),
                                     g, of, r, x + k / L::kInputs * L::kBytes, xs, k == 0,
                                     sums + r * T, Ahead<2>::from(pieces, later, n, n + r, byte),
                                     byte);
      };
      int64_t r = 0;
      for (; r + 2 <= rows; r += 2) rows_from.template operator()<2>(r);
      if (r < rows) rows_from.template operator()<1>(r);
      k += kPiece;
    } while (k < w.k);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      store_sums(sums + t, T, rows, c + t * a.c_stride + (n - a.n0));
    }
  }
}

template <class D, Code C, bool kZeros>
static void lines_all(const DotArgs& a, const LinesGrid& g) {
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      lines_tokens<D, C, kZeros, 1>(a, g, m), m += 1;
    } else if (left == 2) {
      lines_tokens<D, C, kZeros, 2>(a, g, m), m += 2;
    } else if (left == 3) {
      lines_tokens<D, C, kZeros, 3>(a, g, m), m += 3;
    } else {
      lines_tokens<D, C, kZeros, 4>(a, g, m), m += 4;
    }
  }
}
template <class D, Code C>
static void lines(const DotArgs& a) {
  const WeightView& w = *a.w;
  const Format& f = *w.format;
  LinesGrid g;
  g.w = &w;
  g.shift = scale_shift(f);
  g.factor = w.global_scale * D::kFactor;
  g.middle = float(1 << D::kBits);
  g.zero = f.zeros == ZeroRule::middle || D::kSigned ? g.middle
           : f.zeros == ZeroRule::stored_less_one   ? 1.0f
                                                    : 0.0f;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  g.index = _mm512_srl_epi32(_mm512_slli_epi32(lane, D::kCodes == 2 ? 3 : 4),
                             _mm_cvtsi32_si128(g.shift));
  if (g.zero == g.middle && !f.stored_zeros()) return lines_all<D, C, false>(a, g);
  lines_all<D, C, true>(a, g);
}

#define CPUMOE_INT_LINES(code, source) \
  void dot_int_lines_rows_##code(const DotArgs& a) { lines<source##Lines, Code::code>(a); }

}  // namespace cpumoe::CPUMOE_NS
