// GPTQ's words, columns: a word holds neighbouring inputs of one feature, so that 32 bytes of a line
// times broadcast activations are sums of eight features, and nothing is summed across lanes.
#include "kernels/dot/dot.h"
#include "kernels/dot/integer/grid_values.h"
#include "kernels/dot/integer/math.h"
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::avx2 {
namespace {

constexpr int64_t kDepth = 128;     // inputs of a block
constexpr int64_t kFeatures = 1536;  // of a slice whose factors and sums stay near
constexpr int64_t kMostGroups = kDepth / 16;

// A source: inputs of a word, the order of its activations, and their products with a word's
// codes, added to s16 sums (nibbles) or s32 ones (bytes).
struct Gptq4 {
  using Order = Pairs;
  static constexpr Code kCode = Code::u4_gptq;
  static constexpr int64_t kInputs = 8;
  static constexpr float kCountedFrom = 0;
  static constexpr int kParts = 2;  // registers of codes in a word: even inputs, odd inputs
  CPUMOE_INLINE void split(__m256i word, __m256i codes[2]) {
    codes[0] = low_nibbles(word);
    codes[1] = high_nibbles(word);
  }
  // Where the activations of word line i of a group lie, counted in vectors.
  static constexpr int vector(int i, int part) { return i / 2 * 4 + part * 2 + i % 2; }
  CPUMOE_INLINE __m256i add(__m256i sum, __m256i codes, __m256i a) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, a));
  }
  CPUMOE_INLINE __m256 total(__m256i sum) {
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
};
struct Gptq8 {
  using Order = Quads;
  static constexpr Code kCode = Code::u8_gptq;
  static constexpr int64_t kInputs = 4;
  static constexpr float kCountedFrom = 128;
  static constexpr int kParts = 1;
  CPUMOE_INLINE void split(__m256i word, __m256i codes[1]) {
    codes[0] = _mm256_xor_si256(word, _mm256_set1_epi8(char(0x80)));
  }
  static constexpr int vector(int i, int) { return i; }
  CPUMOE_INLINE __m256i add(__m256i sum, __m256i codes, __m256i a) {
    const __m256i product =
        _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(product, _mm256_set1_epi16(1)));
  }
  CPUMOE_INLINE __m256 total(__m256i sum) { return _mm256_cvtepi32_ps(sum); }
};

// What comes after a block in the order of its lines.
struct Ahead {
  const char* at;
  const char* row_end;
  int64_t row_bytes, stride;  // at == null: nothing
  CPUMOE_INLINE void step(Ahead& a) {
    _mm_prefetch(a.at, _MM_HINT_T1);
    a.at += 64;
    if (a.at < a.row_end) return;
    a.row_end += a.stride;
    a.at = a.row_end - a.row_bytes;
  }
};

// The activations of T tokens for a group of `kActGroup` inputs.
template <class S>
CPUMOE_INLINE const char* lane_of(const char* x, int64_t k) {
  return x + k / Spans::kInputs * Spans::kBytes +
         S::Order::lane(int(k / kActGroup % Spans::kGroups)) * 4;
}

// Words `w` of `lines` lines from line `first` of an activation group on, H x 8 features, T tokens:
// sums[t][h] += scale * integer sum. a: the group's lane of token 0.
template <class S, int T, int H>
CPUMOE_INLINE void add_words(__m256 sums[T][H], const char* w, int64_t stride, int first, int lines,
                             const char* a, int64_t xs, Ahead& ahead) {
  __m256i p[T][H];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) p[t][h] = _mm256_setzero_si256();
  }
  const auto line = [&](int i) __attribute__((always_inline)) {
    Ahead::step(ahead);
    __m256i codes[H][S::kParts];
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) S::split(load_codes(w + (i - first) * stride + 32 * h), codes[h]);
#pragma GCC unroll 2
    for (int part = 0; part < S::kParts; ++part) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        int32_t four;
        memcpy(&four, a + t * xs + S::vector(i, part) * 32, 4);
        const __m256i x = _mm256_set1_epi32(four);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) p[t][h] = S::add(p[t][h], codes[h][part], x);
      }
    }
  };
  constexpr int kWhole = int(kActGroup / S::kInputs);
  if (first == 0 && lines == kWhole) {
#pragma GCC unroll 8
    for (int i = 0; i < kWhole; ++i) line(i);
  } else {
    for (int i = first; i < first + lines; ++i) line(i);
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    float scale;
    memcpy(&scale, a + t * xs + Spans::kScale, 4);
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h)
      sums[t][h] = _mm256_fmadd_ps(S::total(p[t][h]), _mm256_set1_ps(scale), sums[t][h]);
  }
}

// Scales and offsets of up to kFeatures features for the groups of a block.
struct BlockFactors {
  int64_t groups, size;  // inputs that share a factor
  float* scales;         // [group][kFeatures]
  float* offsets;
};

template <Code C>
void load_factors(const WeightView& w, float counted_from, int64_t n, int64_t features,
                  int64_t group, float* scales, float* offsets) {
  const Format& f = *w.format;
  const auto line = [&](const MatrixView& m) {
    return static_cast<const char*>(m.data) + group * line_bytes(m.code, m.stride);
  };
  const auto end = [&](const MatrixView& m) {
    return static_cast<const char*>(m.data) + (m.rows - 1) * line_bytes(m.code, m.stride) +
           line_bytes(m.code, m.cols);
  };
  const bool stored = f.stored_zeros();
  const char* s = line(w.scales);
  const char* s_end = end(w.scales);
  const char* z = stored ? line(w.zeros) : nullptr;
  const char* z_end = stored ? end(w.zeros) : nullptr;
  const __m256 global = _mm256_set1_ps(w.global_scale);
  const __m256 from = _mm256_set1_ps(counted_from -
                                     (f.zeros == ZeroRule::stored_less_one ? 1.0f : 0.0f) -
                                     (f.zeros == ZeroRule::middle ? 8.0f : 0.0f));
  for (int64_t i = 0; i < features; i += 8) {
    const __m256 scale = _mm256_mul_ps(scales_at<C>(s, s_end, n + i), global);
    const __m256 zero =
        stored ? zeros_at(w.zeros.code, z, z_end, n + i) : _mm256_setzero_ps();
    _mm256_store_ps(scales + i, scale);
    _mm256_store_ps(offsets + i, _mm256_mul_ps(_mm256_sub_ps(from, zero), scale));
  }
}
void load_factors(const WeightView& w, float counted_from, int64_t n, int64_t features,
                  int64_t group, float* s, float* o) {
  switch (w.scales.code) {
    case Code::f16:
      return load_factors<Code::f16>(w, counted_from, n, features, group, s, o);
    case Code::bf16:
      return load_factors<Code::bf16>(w, counted_from, n, features, group, s, o);
    case Code::e8m0:
      return load_factors<Code::e8m0>(w, counted_from, n, features, group, s, o);
    case Code::e4m3:
      return load_factors<Code::e4m3>(w, counted_from, n, features, group, s, o);
    default:
      return load_factors<Code::f32>(w, counted_from, n, features, group, s, o);
  }
}

// Inputs [k, k + depth) of a block, H x 8 features, T tokens. c: their sums, f.scales and f.offsets
// moved to the first feature.
template <class S, int T, int H>
CPUMOE_INLINE void columns_tile(const char* w, int64_t stride, const char* x, int64_t xs,
                                int64_t k, int64_t depth, const BlockFactors& f, float* c,
                                int64_t cs, bool first, Ahead& ahead) {
  __m256 acc[T][H];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h)
      acc[t][h] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + t * cs + 8 * h);
  }
  int64_t i = 0;
  for (int64_t g = 0; g < f.groups; ++g) {
    const int64_t end = min64(depth, (g + 1) * f.size);
    __m256 sums[T][H];
    float total[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      total[t] = 0;
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) sums[t][h] = _mm256_setzero_ps();
    }
    while (i < end) {  // a group of activations, or the half of it that shares a scale
      const int64_t within = i % kActGroup, count = min64(end - i, kActGroup - within);
      const char* a = lane_of<S>(x, k + i);
      add_words<S, T, H>(sums, w + i / S::kInputs * stride, stride, int(within / S::kInputs),
                         int(count / S::kInputs), a, xs, ahead);
      const int64_t part = f.size >= kActGroup ? Spans::kSum
                           : within == 0       ? Spans::kFirstSum
                                               : Spans::kLastSum;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float sum;
        memcpy(&sum, a + t * xs + part, 4);
        total[t] += sum;
      }
      i += count;
    }
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      const __m256 s = _mm256_load_ps(f.scales + g * kFeatures + 8 * h);
      const __m256 o = _mm256_load_ps(f.offsets + g * kFeatures + 8 * h);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        acc[t][h] = _mm256_fmadd_ps(sums[t][h], s, acc[t][h]);
        acc[t][h] = _mm256_fmadd_ps(o, _mm256_set1_ps(total[t]), acc[t][h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) _mm256_store_ps(c + t * cs + 8 * h, acc[t][h]);
  }
}

// All features of the slice for T tokens.
template <class S, int T>
void columns_tokens(const char* w, int64_t stride, int64_t features, const char* x, int64_t xs,
                    int64_t k, int64_t depth, BlockFactors f, float* c, int64_t cs, Ahead& ahead) {
  int64_t i = 0;
  const float *scales = f.scales, *offsets = f.offsets;
  for (; i + 16 <= features; i += 16) {
    f.scales = const_cast<float*>(scales) + i, f.offsets = const_cast<float*>(offsets) + i;
    columns_tile<S, T, 2>(w + i * 4, stride, x, xs, k, depth, f, c + i, cs, k == 0, ahead);
  }
  for (; i < features; i += 8) {
    f.scales = const_cast<float*>(scales) + i, f.offsets = const_cast<float*>(offsets) + i;
    const int64_t lines = depth / S::kInputs;
    alignas(32) char tail[kDepth / S::kInputs * 32];
    const char* from = w + i * 4;
    int64_t step = stride;
    if (features - i < 8) {
      memset(tail, 0, sizeof tail);
      for (int64_t l = 0; l < lines; ++l)
        memcpy(tail + l * 32, from + l * stride, size_t(features - i) * 4);
      from = tail, step = 32;
    }
    columns_tile<S, T, 1>(from, step, x, xs, k, depth, f, c + i, cs, k == 0, ahead);
  }
}

template <class S>
void columns(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * 4, xs = Spans::line_bytes(w.k), size = w.format->scale_cols;
  float* scratch = static_cast<float*>(a.scratch);
  BlockFactors f{0, min64(size, kDepth), scratch, scratch + kMostGroups * kFeatures};
  for (int64_t n = a.n0; n < a.n1; n += kFeatures) {
    const int64_t features = min64(kFeatures, a.n1 - n);
    float* c = a.c + (n - a.n0);
    if (w.k == 0) {
      for (int64_t m = a.m0; m < a.m1; ++m)
        memset(c + (m - a.m0) * a.c_stride, 0, size_t(features) * 4);
    }
    for (int64_t k = 0; k < w.k; k += kDepth) {
      const int64_t depth = min64(kDepth, w.k - k);
      f.groups = ceil_div(depth, f.size);
      if (k % size == 0 || size < kDepth) {
        for (int64_t g = 0; g < f.groups; ++g) {
          load_factors(w, S::kCountedFrom, n, features, (k + g * f.size) / size,
                       f.scales + g * kFeatures, f.offsets + g * kFeatures);
        }
      }
      const char* p = static_cast<const char*>(w.data) + k / S::kInputs * stride + n * 4;
      const char* next = k + 2 * kDepth <= w.k ? p + kDepth / S::kInputs * stride : p;
      Ahead ahead{next, next + features * 4, features * 4, stride};
      for (int64_t m = a.m0; m < a.m1;) {
        const char* x = static_cast<const char*>(a.act) + m * xs;
        float* tile = c + (m - a.m0) * a.c_stride;
        const int64_t left = a.m1 - m;
        if (left == 1) {
          columns_tokens<S, 1>(p, stride, features, x, xs, k, depth, f, tile, a.c_stride, ahead);
          m += 1;
        } else if (left < 4) {
          columns_tokens<S, 2>(p, stride, features, x, xs, k, depth, f, tile, a.c_stride, ahead);
          m += 2;
        } else {
          columns_tokens<S, 4>(p, stride, features, x, xs, k, depth, f, tile, a.c_stride, ahead);
          m += 4;
        }
        ahead = {p, p + features * 4, features * 4, 0};
      }
    }
  }
}

}  // namespace

void dot_int_words_columns_u4_gptq(const DotArgs& a) { columns<Gptq4>(a); }
void dot_int_words_columns_u8_gptq(const DotArgs& a) { columns<Gptq8>(a); }

size_t scratch_int_words(int64_t, int64_t, int64_t) {
  return size_t(2 * kMostGroups * kFeatures) * 4;
}

}  // namespace cpumoe::avx2
