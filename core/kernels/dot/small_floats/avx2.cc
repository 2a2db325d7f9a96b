// A few tokens with e4m3 and e2m1 weights. The fields of a code are moved to those of an fp32:
// 2^-120 (e4m3) or 2^-126 (e2m1) of its value, exactly, with subnormals; rows_scaled takes the
// power of two back. Scales meet sums of up to 64 products. Converting by F16C instead took a
// third longer from L1 (Zen 4).
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_codes.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

// Inputs of a span: those of all tokens are 16 KiB, beside the stream of weights in L1.
constexpr int64_t span_of(int tokens) { return tokens == 1 ? 4096 : tokens == 2 ? 2048 : 1024; }
constexpr int64_t kRows = 8;       // rows that take one span after the other
constexpr int64_t kAhead = 16384;  // bytes fetched into L2 ahead of their use, at least

CPUMOE_INLINE __m256 fields(__m256i bits, uint32_t mask) {
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(mask))));
}

// Keeps the compiler from loading v again for each of its uses: at four tokens the loads of
// activations take longer than the products (a tenth on Zen 4).
CPUMOE_INLINE void in_register(__m256& v) { __asm__("" : "+x"(v)); }

// Every code offers
//   kBytes32, kFactor   bytes of 32 inputs; what is left of the power of two
//   kRun                inputs whose products are added before scales: at most a group of scales
//   load(p, nan)        32 inputs; `nan` collects what is_nan asks for
//   vector<J>(bits)     inputs 4i + J of them in lane i
struct E4m3 {
  static constexpr Code kCode = Code::e4m3;
  static constexpr int64_t kBytes32 = 32, kRun = 64;
  static constexpr float kFactor = 1;
  struct Bits {
    __m256i even, odd;
  };
  CPUMOE_INLINE Bits load(const char* p, __m256i& nan) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    nan = _mm256_max_epu8(nan, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
    return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), _mm256_srai_epi16(v, 4)};
  }
  template <int J>
  CPUMOE_INLINE __m256 vector(const Bits& b) {
    const __m256i v = J % 2 == 0 ? b.even : b.odd;
    return fields(J < 2 ? _mm256_slli_epi32(v, 16) : v, 0x87f00000u);
  }
  CPUMOE_INLINE bool is_nan(__m256i nan) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(nan, _mm256_set1_epi8(0x7f))) != 0;
  }
};
struct E2m1 {
  static constexpr Code kCode = Code::e2m1;
  static constexpr int64_t kBytes32 = 16, kRun = 32;
  static constexpr float kFactor = 64;
  using Bits = __m256i;
  CPUMOE_INLINE Bits load(const char* p, __m256i&) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <int J>
  CPUMOE_INLINE __m256 vector(Bits b) {
    return fields(_mm256_srai_epi32(_mm256_slli_epi32(b, 28 - 4 * J), 6), 0x81c00000u);
  }
  CPUMOE_INLINE bool is_nan(__m256i) { return false; }
};

// Scales of the runs of a span of one row, times the factors of each token: two for every run, of
// the inputs' first and last half (lanes 0..3 and 4..7), where 16 inputs share a scale.
template <class D, bool kHalves, int T>
struct RunScales {
  static constexpr int64_t kStep = kHalves ? 16 : D::kRun;  // inputs of a scale here
  static constexpr int64_t kPerGroup = RowsScaled::kGroup / kStep, kMost = span_of(T) / kStep;
  float of[T][kMost];

  CPUMOE_INLINE void fill(RunScales& s, const WeightView& w, int64_t n, int64_t k, int64_t inputs,
                          const float* factors, int64_t fs) {
    const int64_t size = w.format->scale_cols, line = n / w.format->scale_rows;
    const int64_t groups = ceil_div(inputs, RowsScaled::kGroup);
    const int64_t count = ceil_div(inputs, size);
    alignas(32) float steps[kMost];
    codes::load_scales(w.scales, line, k / size, count, w.global_scale, steps);
    if (size == kStep) {
      for (int64_t i = count; i < groups * kPerGroup; ++i) steps[i] = 0;
    } else {  // one for 2^n groups; from the last on, so that none is overwritten before its use
      const int shift = count == 1 ? 63 : __builtin_ctzll(uint64_t(size / RowsScaled::kGroup));
      for (int64_t g = groups; g-- > 0;) {
        const float scale = steps[g >> shift];
        for (int64_t i = 0; i < kPerGroup; ++i) steps[g * kPerGroup + i] = scale;
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      for (int64_t g = 0; g < groups; ++g) {
        const float factor = factors[t * fs + g];
        for (int64_t i = g * kPerGroup; i < (g + 1) * kPerGroup; ++i)
          s.of[t][i] = steps[i] * factor;
      }
    }
  }
  CPUMOE_INLINE __m256 run(const RunScales& s, int t, int64_t i) {
    if constexpr (!kHalves) return _mm256_broadcast_ss(&s.of[t][i]);
    return _mm256_set_m128(_mm_broadcast_ss(&s.of[t][2 * i + 1]),
                           _mm_broadcast_ss(&s.of[t][2 * i]));
  }
};

// Where a span of rows lies, and what to fetch meanwhile.
struct Span {
  const WeightView* w;
  int64_t n, k, inputs;
  const char *p, *next;
  int64_t stride;
};

// sums[r * T + t] (+)= the products of R rows over a span with T tokens, in 8 lanes.
template <class D, bool kHalves, int R, int T>
void row_span(const Span& s, const float* x, int64_t xs, const float* factors, __m256* sums) {
  using Scales = RunScales<D, kHalves, T>;
  Scales scales[R];
  __m256 total[R][T];
  __m256i nan[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    Scales::fill(scales[r], *s.w, s.n + r, s.k, s.inputs, factors, xs);
    nan[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) total[r][t] = s.k == 0 ? _mm256_setzero_ps() : sums[r * T + t];
  }
  // One run: the steps of 32 inputs at(r, i), added up and scaled.
  const auto run = [&](int64_t k, int64_t steps, const auto& at) __attribute__((always_inline)) {
    __m256 acc[R][T];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < steps; ++i) {
      typename D::Bits bits[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) bits[r] = D::load(at(r, i), nan[r]);
      const auto quarter = [&]<int J>() __attribute__((always_inline)) {
        __m256 w[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) w[r] = D::template vector<J>(bits[r]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          __m256 xt = _mm256_loadu_ps(x + t * xs + k + i * 32 + J * 8);
          if (R > 1) in_register(xt);
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) acc[r][t] = _mm256_fmadd_ps(w[r], xt, acc[r][t]);
        }
      };
      quarter.template operator()<0>();
      quarter.template operator()<1>();
      quarter.template operator()<2>();
      quarter.template operator()<3>();
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 f = Scales::run(scales[r], t, k / D::kRun);
        total[r][t] = _mm256_fmadd_ps(acc[r][t], f, total[r][t]);
      }
    }
  };
  constexpr int64_t kSteps = D::kRun / 32;
  int64_t k = 0;
  for (; k + D::kRun <= s.inputs; k += D::kRun) {
    const int64_t byte = k / 32 * D::kBytes32;
    if (byte % 64 == 0) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) _mm_prefetch(s.next + r * s.stride + byte, _MM_HINT_T1);
    }
    run(k, kSteps, [&](int r, int64_t i) { return s.p + r * s.stride + byte + i * D::kBytes32; });
  }
  if (k < s.inputs) {
    alignas(32) char tail[R][kSteps * D::kBytes32] = {};
    const int64_t byte = k / 32 * D::kBytes32;
    for (int r = 0; r < R; ++r) {
      memcpy(tail[r], s.p + r * s.stride + byte, size_t(line_bytes(D::kCode, s.inputs) - byte));
    }
    run(k, ceil_div(s.inputs - k, 32), [&](int r, int64_t i) { return tail[r] + i * D::kBytes32; });
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    const __m256 bad = _mm256_set1_ps(D::is_nan(nan[r]) ? bits_to_float(0x7fc00000u) : 0.0f);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[r * T + t] = _mm256_add_ps(total[r][t], bad);
  }
}

// Up to kRows rows from n on, T tokens from m on.
template <class D, bool kHalves, int T>
void rows_tokens(const DotArgs& a, int64_t n, int64_t m) {
  constexpr int R = T == 1 ? 1 : 2;
  const WeightView& w = *a.w;
  const int64_t xs = RowsScaled::line(w.k), stride = line_bytes(D::kCode, w.stride);
  const int64_t ahead = round_up(ceil_div(kAhead, max64(64, stride)), kRows);  // rows
  const int64_t rows = min64(kRows, a.n1 - n);
  const char* base = line_at(w, n);
  const char* next = m != a.m0          ? base
                     : n + ahead < a.n1 ? base + ahead * stride
                     : a.next != nullptr
                         ? static_cast<const char*>(a.next) + (n + ahead - a.n1) * stride
                         : base;
  const float* x = static_cast<const float*>(a.act) + m * xs;
  const float* factors = static_cast<const float*>(a.act) + RowsScaled::factor(m, 0, w.k);
  __m256 sums[kRows * T];
  int64_t k = 0;
  do {
    const int64_t byte = line_bytes(D::kCode, k);
    Span s{&w, n, k, min64(span_of(T), w.k - k), base + byte, next + byte, stride};
    const float* f = factors + k / RowsScaled::kGroup;
    int64_t r = 0;
    for (; r + R <= rows; r += R) {
      row_span<D, kHalves, R, T>(s, x + k, xs, f, sums + r * T);
      s.n += R, s.p += R * stride, s.next += R * stride;
    }
    if (R > 1 && r < rows) row_span<D, kHalves, 1, T>(s, x + k, xs, f, sums + r * T);
    k += span_of(T);
  } while (k < w.k);
  float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int t = 0; t < T; ++t) c[t * a.c_stride + r] = sum8(sums[r * T + t]) * D::kFactor;
  }
}

template <class D, bool kHalves>
__attribute__((noinline)) void tokens(const DotArgs& a) {
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    for (int64_t m = a.m0; m < a.m1;) {
      const int64_t left = a.m1 - m;
      if (left == 1) {
        rows_tokens<D, kHalves, 1>(a, n, m), m += 1;
      } else if (left == 2) {
        rows_tokens<D, kHalves, 2>(a, n, m), m += 2;
      } else if (left == 3) {
        rows_tokens<D, kHalves, 3>(a, n, m), m += 3;
      } else {
        rows_tokens<D, kHalves, 4>(a, n, m), m += 4;
      }
    }
  }
}

// Subnormals are codes here: a caller that lives with denormals as zeros gets them back after.
template <class D, bool kHalves>
void with_subnormals(const DotArgs& a) {
  constexpr unsigned kFlushes = 0x8040u;
  const unsigned control = _mm_getcsr();
  if ((control & kFlushes) != 0) _mm_setcsr(control & ~kFlushes);
  tokens<D, kHalves>(a);
  if ((control & kFlushes) != 0) _mm_setcsr(control);
}

// ---- activations

// One group: `count` values at x (zeros behind them up to a multiple of 32).
CPUMOE_INLINE void write_group(float* line, int64_t k, int64_t count, int64_t inputs,
                               const float* x) {
  const int64_t padded = round_up(count, 32);
  __m256i amax = _mm256_setzero_si256();
  for (int64_t i = 0; i < padded; i += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_load_ps(x + i));
    amax = _mm256_max_epu32(amax, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(amax), _mm256_extracti128_si256(amax, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  const int32_t e = RowsScaled::exponent(uint32_t(_mm_cvtsi128_si32(half)));
  const __m256 power = _mm256_set1_ps(RowsScaled::power(e));
  for (int64_t i = 0; i < padded; i += 32) {
    __m256 v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = _mm256_mul_ps(_mm256_load_ps(x + i + 8 * j), power);
    to_even_odd(v[0], v[1]);
    to_even_odd(v[2], v[3]);
    to_even_odd(v[0], v[2]);  // 4i and 4i + 2
    to_even_odd(v[1], v[3]);  // 4i + 1 and 4i + 3
    _mm256_storeu_ps(line + k + i, v[0]);
    _mm256_storeu_ps(line + k + i + 8, v[1]);
    _mm256_storeu_ps(line + k + i + 16, v[2]);
    _mm256_storeu_ps(line + k + i + 24, v[3]);
  }
  line[RowsScaled::factor(0, k / RowsScaled::kGroup, inputs)] = RowsScaled::power(120 - e);
}

// Inputs [k0, k1) of a token by get(k, count, out), 8 or fewer at a time, out zero before.
template <class Get>
CPUMOE_INLINE void write_scaled(float* line, int64_t k0, int64_t k1, int64_t inputs,
                                const Get& get) {
  for (int64_t k = k0; k < k1; k += RowsScaled::kGroup) {
    alignas(32) float x[RowsScaled::kGroup] = {};
    const int64_t count = min64(RowsScaled::kGroup, k1 - k);
    for (int64_t i = 0; i < count; i += 8) get(k + i, min64(8, count - i), x + i);
    write_group(line, k, count, inputs, x);
  }
  if (k1 != inputs) return;
  const int64_t end = RowsScaled::factor(0, ceil_div(inputs, RowsScaled::kGroup), inputs);
  for (int64_t i = end; i < RowsScaled::line(inputs); ++i) line[i] = 0;
}

template <class S>
void pack_scaled(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    const char* src = static_cast<const char*>(a.src.data) + row * a.src.stride * S::kBytes;
    const auto get = [src](int64_t k, int64_t count, float* out) {
      if (count == 8) return _mm256_store_ps(out, S::load8(src + k * S::kBytes));
      for (int64_t i = 0; i < count; ++i)
        out[i] = load_as_float(src + (k + i) * S::kBytes, S::kCode, 0);
    };
    float* line = static_cast<float*>(a.dst) + m * RowsScaled::line(inputs);
    write_scaled(line, 0, inputs, inputs, get);
  }
}

}  // namespace

void dot_small_floats_rows_e4m3(const DotArgs& a) { with_subnormals<E4m3, false>(a); }
void dot_small_floats_rows_e2m1(const DotArgs& a) {
  a.w->format->scale_cols == 16 ? with_subnormals<E2m1, true>(a) : with_subnormals<E2m1, false>(a);
}
size_t scratch_small_floats(int64_t, int64_t, int64_t) { return 0; }

void pack_rows_scaled(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack_scaled<F32>(a);
  if (a.src.code == Code::f16) return pack_scaled<F16>(a);
  pack_scaled<BF16>(a);
}

void mid_rows_scaled(const StoreMidArgs& a) {
  const bool n_major = a.order == TileOrder::n_major;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* tile = a.tile + (m - a.m0) * (n_major ? 1 : a.stride);
    const int64_t step = n_major ? a.stride : 1;
    const auto get = [=](int64_t k, int64_t count, float* out) {
      for (int64_t i = 0; i < count; ++i) out[i] = tile[(k - a.n0 + i) * step];
    };
    write_scaled(static_cast<float*>(a.dst) + m * RowsScaled::line(a.k), a.n0, a.n1, a.k, get);
  }
}

}  // namespace cpumoe::avx2
