// Sources of words (words.h) in registers of 256 bits. Included by ISA files only.
#pragma once
#include "kernels/dot/integer/grid_values.h"
#include "kernels/dot/integer/words.h"
#include "kernels/dot/stream/lines_ahead.h"

namespace cpumoe::CPUMOE_NS {

// Factors of `features` neighbours from n on for one group. counted_from: the number of code 0.
template <Code C>
CPUMOE_INLINE void load_factors(const WeightView& w, float counted_from, int64_t n,
                                int64_t features, int64_t group, float* scales, float* offsets) {
  const Format& f = *w.format;
  const auto line = [&](const MatrixView& m) {
    return static_cast<const char*>(m.data) + group * line_bytes(m.code, m.stride);
  };
  const bool stored = f.stored_zeros();
  const char* s = line(w.scales);
  const char* s_end = end_of(w.scales);
  const char* z = stored ? line(w.zeros) : nullptr;
  const char* z_end = stored ? end_of(w.zeros) : nullptr;
  const __m256 global = _mm256_set1_ps(w.global_scale);
  const __m256 from =
      _mm256_set1_ps(counted_from - (f.zeros == ZeroRule::stored_less_one ? 1.0f : 0.0f) -
                     (f.zeros == ZeroRule::middle ? 8.0f : 0.0f));
  for (int64_t i = 0; i < features; i += 8) {
    const __m256 scale = _mm256_mul_ps(scales_at<C>(s, s_end, n + i), global);
    const __m256 zero = stored ? zeros_at(w.zeros.code, z, z_end, n + i) : _mm256_setzero_ps();
    _mm256_store_ps(scales + i, scale);
    _mm256_store_ps(offsets + i, _mm256_mul_ps(_mm256_sub_ps(from, zero), scale));
  }
}
CPUMOE_INLINE void load_factors(const WeightView& w, float counted_from, int64_t n,
                                int64_t features, int64_t group, float* s, float* o) {
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

constexpr int64_t kFeatures = 1536;  // of a block: their factors and sums stay near

// What the sources below have:
//   kCountedFrom             the number of code 0
//   kVectors                 registers of sums of a tile (8 features each)
//   add_group<T>(sums, w, stride, first, count, a, xs, ahead)
//                            sums[t][v] += scale * integer sum of `count` inputs from `first` on of
//                            a group of activations, from line w on; a: its lane
//   arrange(p)               16 features at p into the order of the sums

struct TileFactors {
  int64_t groups, size;
  const float *scales, *offsets;  // [group][kFeatures]
};
// Inputs [k, k + depth) of a block, a tile of features, T tokens. c: their sums; f.scales and
// f.offsets moved to the first feature.
template <class S, int T>
CPUMOE_INLINE void words_tile(const char* w, int64_t stride, const char* x, int64_t xs, int64_t k,
                              int64_t depth, const TileFactors& f, float* c, int64_t cs,
                              LinesAhead& ahead) {
  constexpr int H = S::kVectors;
  int64_t i = 0;
  for (int64_t g = 0; g < f.groups; ++g) {
    const int64_t end = min64(depth, (g + 1) * f.size);
    __m256 sums[T][H];
    float total[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      total[t] = 0;
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) sums[t][h] = _mm256_setzero_ps();
    }
    while (i < end) {  // a group of activations, or the half of it that shares a scale
      const int64_t first = i % kActGroup, count = min64(end - i, kActGroup - first);
      const int64_t group = (k + i) / kActGroup;
      const char* a = x + group / Spans::kGroups * Spans::kBytes +
                      S::Order::lane(int(group % Spans::kGroups)) * 4;
      S::template add_group<T>(sums, w + i / S::kInputs * stride, stride, first, count, a, xs,
                               ahead);
      const int64_t part = f.size >= kActGroup ? Spans::kSum
                           : first == 0        ? Spans::kFirstSum
                                               : Spans::kLastSum;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float sum;
        memcpy(&sum, a + t * xs + part, 4);
        total[t] += sum;
      }
      i += count;
    }
    const bool start = k == 0 && g == 0;
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const __m256 s = _mm256_load_ps(f.scales + g * kFeatures + 8 * h);
      const __m256 o = _mm256_load_ps(f.offsets + g * kFeatures + 8 * h);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* at = c + t * cs + 8 * h;
        __m256 acc = start ? _mm256_setzero_ps() : _mm256_load_ps(at);
        acc = _mm256_fmadd_ps(sums[t][h], s, acc);
        _mm256_store_ps(at, _mm256_fmadd_ps(o, _mm256_set1_ps(total[t]), acc));
      }
    }
  }
}

// The factors of a block. Apart from the tiles, whose registers it would take.
template <class S>
__attribute__((noinline)) static void load_block(const Block& b, const WeightView& w) {
  for (int64_t g = 0; g < b.groups; ++g) {
    float *s = b.scales + g * kFeatures, *o = b.offsets + g * kFeatures;
    load_factors(w, S::kCountedFrom, b.n, b.features, b.group + g, s, o);
    for (int64_t i = 0; i < b.features; i += 16) S::arrange(s + i), S::arrange(o + i);
  }
}

// All features of the block for T tokens.
template <class S, int T>
static void words_tiles(const char* w, int64_t stride, int64_t features, const char* x, int64_t xs,
                        int64_t k, int64_t depth, const TileFactors& f, float* c, int64_t cs,
                        LinesAhead& ahead) {
  constexpr int64_t kTile = S::kVectors * 8, kBytes = kTile / 8 * code_block(S::kCode).bytes *
                                                      (8 / code_block(S::kCode).elements);
  for (int64_t i = 0; i < features; i += kTile) {
    const TileFactors here{f.groups, f.size, f.scales + i, f.offsets + i};
    const char* from = w + line_bytes(S::kCode, i);
    alignas(32) char tail[S::kDepth / S::kInputs * kBytes];
    int64_t step = stride;
    if (features - i < kTile) {
      memset(tail, 0, sizeof tail);
      for (int64_t l = 0; l < ceil_div(depth, S::kInputs); ++l) {
        memcpy(tail + l * kBytes, from + l * stride, size_t(line_bytes(S::kCode, features - i)));
      }
      from = tail, step = kBytes;
    }
    words_tile<S, T>(from, step, x, xs, k, depth, here, c + i, cs, ahead);
  }
}
template <class S, int T>
CPUMOE_INLINE void words_block(const Block& b, const WeightView& w) {
  if (b.load) load_block<S>(b, w);
  const char* next = b.lines + b.ahead[0];
  const int64_t bytes = line_bytes(S::kCode, b.features);
  LinesAhead ahead{next, next + bytes, bytes, b.ahead[0] == 0 ? 0 : b.stride};
  const TileFactors f{b.groups, b.size, b.scales, b.offsets};
  words_tiles<S, T>(b.lines, b.stride, b.features, b.x, b.xs, b.k, b.depth, f, b.c, b.cs, ahead);
}

struct Avx2 {
  using Grid = const WeightView&;
  static constexpr int64_t kDepth = 128, kMostFeatures = kFeatures;
  CPUMOE_INLINE int64_t pitch(int64_t) { return kFeatures; }
};

CPUMOE_INLINE __m256i high_halves(__m256i v) { return codes::low_nibbles(_mm256_srli_epi16(v, 4)); }

// GPTQ: a word holds neighbouring inputs of one feature. S: how its codes are split and added.
template <class S>
struct Gptq : S, Avx2 {
  static constexpr float kCountedFrom = S::kZero;
  static constexpr int kVectors = 2, kTokens = 4;
  CPUMOE_INLINE void arrange(float*) {}
  CPUMOE_INLINE void restore(float*, int64_t) {}
  template <int T>
  CPUMOE_INLINE void tokens(const Block& b, const WeightView& w) {
    words_block<Gptq, T>(b, w);
  }

  template <int T>
  CPUMOE_INLINE void add_group(__m256 sums[T][2], const char* w, int64_t stride, int64_t first,
                               int64_t count, const char* a, int64_t xs, LinesAhead& ahead) {
    __m256i p[T][2];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) p[t][0] = p[t][1] = _mm256_setzero_si256();
    const int begin = int(first / S::kInputs), lines = int(count / S::kInputs);
    const auto line = [&](int i) __attribute__((always_inline)) {
      LinesAhead::step(ahead);
      __m256i codes[2][S::kParts];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        S::split(load_codes(w + (i - begin) * stride + 32 * h), codes[h]);
      }
#pragma GCC unroll 2
      for (int part = 0; part < S::kParts; ++part) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          int32_t four;
          memcpy(&four, a + t * xs + S::vector(i, part) * 32, 4);
          const __m256i x = _mm256_set1_epi32(four);
          p[t][0] = S::add(p[t][0], codes[0][part], x);
          p[t][1] = S::add(p[t][1], codes[1][part], x);
        }
      }
    };
    constexpr int kWholeGroup = int(kActGroup / S::kInputs);
    if (begin == 0 && lines == kWholeGroup) {
#pragma GCC unroll 8
      for (int i = 0; i < kWholeGroup; ++i) line(i);
    } else {
      for (int i = begin; i < begin + lines; ++i) line(i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 scale =
          _mm256_broadcast_ss(reinterpret_cast<const float*>(a + t * xs + Spans::kScale));
      sums[t][0] = _mm256_fmadd_ps(S::total(p[t][0]), scale, sums[t][0]);
      sums[t][1] = _mm256_fmadd_ps(S::total(p[t][1]), scale, sums[t][1]);
    }
  }
};

struct Nibbles {
  using Order = Pairs;
  static constexpr Code kCode = Code::u4_gptq;
  static constexpr int64_t kInputs = 8;
  static constexpr float kZero = 0;
  static constexpr int kParts = 2;  // even inputs, odd inputs
  CPUMOE_INLINE void split(__m256i word, __m256i codes[2]) {
    codes[0] = codes::low_nibbles(word);
    codes[1] = high_halves(word);
  }
  // The vector of a span that holds the activations of line i of a group.
  static constexpr int vector(int i, int part) { return i / 2 * 4 + part * 2 + i % 2; }
  CPUMOE_INLINE __m256i add(__m256i sum, __m256i codes, __m256i a) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, a));
  }
  CPUMOE_INLINE __m256 total(__m256i sum) {
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
};
struct Bytes {
  using Order = Quads;
  static constexpr Code kCode = Code::u8_gptq;
  static constexpr int64_t kInputs = 4;
  static constexpr float kZero = 128;
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

// AWQ: a word holds eight features of one input. Bytes of two lines side by side are pairs of
// inputs: 16 features to a register, in 16-bit sums of sum((q - 8) a), at most 8 * 127 * 32.
struct Awq : Avx2 {
  using Order = Quads;
  static constexpr Code kCode = Code::u4_awq;
  static constexpr int64_t kInputs = 1;
  static constexpr float kCountedFrom = 8;
  static constexpr int kVectors = 8, kTokens = 2;
  // Sums of 16 features: those of low nibbles, 0 4 1 5 of two words, then 2 6 3 7.
  CPUMOE_INLINE void arrange(float* p) {
    const __m256 a = _mm256_load_ps(p), b = _mm256_load_ps(p + 8);
    const __m256 x = _mm256_permute2f128_ps(a, b, 0x20), y = _mm256_permute2f128_ps(a, b, 0x31);
    _mm256_store_ps(p, _mm256_unpacklo_ps(x, y));
    _mm256_store_ps(p + 8, _mm256_unpackhi_ps(x, y));
  }
  CPUMOE_INLINE void restore(float* sums, int64_t features) {
    for (float* p = sums; p < sums + features; p += 16) {
      const __m256 a = _mm256_load_ps(p), b = _mm256_load_ps(p + 8);
      const __m256 x = _mm256_shuffle_ps(a, b, 0x88), y = _mm256_shuffle_ps(a, b, 0xdd);
      _mm256_store_ps(p, _mm256_permute2f128_ps(x, y, 0x20));
      _mm256_store_ps(p + 8, _mm256_permute2f128_ps(x, y, 0x31));
    }
  }
  template <int T>
  CPUMOE_INLINE void tokens(const Block& b, const WeightView& w) {
    words_block<Awq, T>(b, w);
  }

  template <int T>
  CPUMOE_INLINE void add_group(__m256 sums[T][8], const char* w, int64_t stride, int64_t first,
                               int64_t count, const char* a, int64_t xs, LinesAhead& ahead) {
    __m256i p[T][4];
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {  // minus eight times the sum of the codes
      int16_t all[2], head[2];
      memcpy(all, a + t * xs + Spans::kMinusAll, 4);
      memcpy(head, a + t * xs + Spans::kMinusFirst, 4);
      const int whole = all[0] + all[1], half = head[0] + head[1];
      const int minus = first != 0 ? whole - half : count == kActGroup / 2 ? half : whole;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) p[t][i] = _mm256_set1_epi16(short(8 * minus));
    }
    const auto add_pair = [&](int64_t e, __m256i one, __m256i two) __attribute__((always_inline)) {
      LinesAhead::step(ahead);
      const __m256i low[2] = {codes::low_nibbles(one), codes::low_nibbles(two)},
                    high[2] = {high_halves(one), high_halves(two)};
      const __m256i pairs[4] = {
          _mm256_unpacklo_epi8(low[0], low[1]), _mm256_unpacklo_epi8(high[0], high[1]),
          _mm256_unpackhi_epi8(low[0], low[1]), _mm256_unpackhi_epi8(high[0], high[1])};
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        const char* two = a + t * xs + (e >> 2) * 32 + (e & 3);
        const __m256i x = _mm256_broadcastw_epi16(_mm_loadu_si16(two));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          p[t][i] = _mm256_add_epi16(p[t][i], _mm256_maddubs_epi16(pairs[i], x));
      }
    };
    int64_t e = first;
    for (; e + 4 <= first + count; e += 4, w += 4 * stride) {
      add_pair(e, load_codes(w), load_codes(w + stride));
      add_pair(e + 2, load_codes(w + 2 * stride), load_codes(w + 3 * stride));
    }
    for (; e < first + count; e += 2, w += 2 * stride) {
      const bool both = e + 1 < first + count;
      add_pair(e, load_codes(w), both ? load_codes(w + stride) : _mm256_setzero_si256());
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      const __m256 scale =
          _mm256_broadcast_ss(reinterpret_cast<const float*>(a + t * xs + Spans::kScale));
      // p[t][2 u + h]: words 2u, 2u + 1 in the lower half and 2u + 4, 2u + 5 in the upper one.
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int lower = i / 2 * 2 + i % 2, upper = lower + 4;
        const __m256i l = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(p[t][i]));
        const __m256i u = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(p[t][i], 1));
        sums[t][lower] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(l), scale, sums[t][lower]);
        sums[t][upper] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(u), scale, sums[t][upper]);
      }
    }
  }
};

}  // namespace cpumoe::CPUMOE_NS
