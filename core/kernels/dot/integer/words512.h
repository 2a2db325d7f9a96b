// Sources of words (words.h) with VNNI, 16 sums to a register. Included by ISA files only.
#pragma once
#include "kernels/dot/integer/word_factors512.h"

namespace cpumoe::CPUMOE_NS {

CPUMOE_INLINE __m512i load_words(const char* p, __mmask16 mask) {
  return _mm512_maskz_loadu_epi32(mask, p);
}
CPUMOE_INLINE __m512i dword_in_all(const char* p) { return _mm512_set1_epi32(int(word(p))); }
CPUMOE_INLINE __m512 float_in_all(const char* p) {
  return _mm512_set1_ps(codes::load_bits<float>(p));
}

// A block is done in steps: the inputs of a group of activations that share a factor, all of them
// or half of them.
struct Step {
  const char* x;         // the lane of the group of activations
  int64_t first, count;  // inputs of that group
  int64_t g;             // the factor
  bool ends;             // it
};
template <class S, int T>
struct Steps {
  int64_t count = 0;
  Step at[S::kDepth / kLeastGroup];
  float totals[S::kDepth / kLeastGroup][T];  // of each factor: scaled sums of activations

  explicit Steps(const Block& b) {
    int64_t i = 0;
    for (int64_t g = 0; g < b.groups; ++g) {
      for (int t = 0; t < T; ++t) totals[g][t] = 0;
      const int64_t end = min64(b.depth, (g + 1) * b.size);
      while (i < end) {
        const int64_t first = i % kActGroup, inputs = min64(end - i, kActGroup - first);
        const int64_t group = (b.k + i) / kActGroup;
        const char* x = b.x + group / Spans::kGroups * Spans::kBytes +
                        S::Order::lane(int(group % Spans::kGroups)) * 4;
        const int64_t sum = b.size >= kActGroup ? Spans::kSum
                            : first == 0        ? Spans::kFirstSum
                                                : Spans::kLastSum;
        for (int t = 0; t < T; ++t) totals[g][t] += codes::load_bits<float>(x + t * b.xs + sum);
        i += inputs;
        at[count++] = {x, first, inputs, g, i == end};
      }
    }
  }
};

template <int T, int H>
struct Sums {
  __m512i v[T][H];
};
// Static: a member would be a symbol that the linker may give to every CPU.
template <class S, int T>
static void add_block(const Block& b, const Grid512& grid) {
  S::template add_block<T>(b, grid);
}

template <class S>
struct Vnni {
  template <int T>
  CPUMOE_INLINE void tokens(const Block& b, const Grid512& grid) {
    cpumoe::CPUMOE_NS::add_block<S, T>(b, grid);
  }
  using Grid = Grid512;
  static constexpr int64_t kMostFeatures = int64_t(1) << 40;
  CPUMOE_INLINE int64_t pitch(int64_t n) { return round_up(n, kMostLanes); }
  static constexpr int kTokens = 4;
};

// GPTQ: a word holds neighbouring inputs of one feature. S: how its codes are split.
template <class S>
struct Gptq : S, Vnni<Gptq<S>> {
  static constexpr int64_t kDepth = 64;
  static constexpr int kRegisters = 2;  // of 16 features, of a tile

  CPUMOE_INLINE void arrange(const __m512 v[8], float* to) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) _mm512_storeu_ps(to + 16 * j, v[j]);
  }
  CPUMOE_INLINE void restore(float*, int64_t) {}

  // p + line `at` of a group of activations.
  template <int T, int H>
  CPUMOE_INLINE Sums<T, H> line(Sums<T, H> p, const Block& b, const char* w, __mmask16 mask,
                                const char* x, int at) {
    __m512i codes[H][S::kParts];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      ask(b, w + 64 * h);
      S::split(load_words(w + 64 * h, h == H - 1 ? mask : __mmask16(~0)), codes[h]);
    }
#pragma GCC unroll 2
    for (int part = 0; part < S::kParts; ++part) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m512i a = dword_in_all(x + t * b.xs + S::vector(at, part) * 32);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          p.v[t][h] = _mm512_dpbusd_epi32(p.v[t][h], codes[h][part], a);
        }
      }
    }
    return p;
  }

  // 16 H features from i on; `mask`: of the last 16, where the slice may end.
  template <int T, int H>
  CPUMOE_INLINE void tile(const Block b, int64_t i, __mmask16 mask,
                          const Steps<Gptq, T>& steps) {
    const char* w = b.lines + i * 4;
    __m512 sums[T][H];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) sums[t][h] = _mm512_setzero_ps();
    }
    for (int64_t j = 0; j < steps.count; ++j) {
      const Step& step = steps.at[j];
      const char* x = step.x;
      Sums<T, H> p = {};
      if (step.count == kActGroup) {
#pragma GCC unroll 8
        for (int l = 0; l < int(kActGroup / S::kInputs); ++l) {
          p = line<T, H>(p, b, w + l * b.stride, mask, x, l);
        }
      } else {
        const int begin = int(step.first / S::kInputs);
        for (int l = 0; l < int(step.count / S::kInputs); ++l) {
          p = line<T, H>(p, b, w + l * b.stride, mask, x, begin + l);
        }
      }
      w += step.count / S::kInputs * b.stride;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m512 scale = float_in_all(x + t * b.xs + Spans::kScale);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          sums[t][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(p.v[t][h]), scale, sums[t][h]);
        }
      }
      if (!step.ends) continue;
      const __mmask16 before = b.k == 0 && step.g == 0 ? 0 : 0xffff;  // sums are there already
      const float* scales = b.scales + step.g * b.pitch + i;
      const float* offsets = b.offsets + step.g * b.pitch + i;
      float* c = b.c + i;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t, c += b.cs) {
        const __m512 total = _mm512_set1_ps(steps.totals[step.g][t]);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          __m512 v = _mm512_maskz_loadu_ps(before, c + 16 * h);
          v = _mm512_fmadd_ps(sums[t][h], _mm512_loadu_ps(scales + 16 * h), v);
          v = _mm512_fmadd_ps(_mm512_loadu_ps(offsets + 16 * h), total, v);
          _mm512_storeu_ps(c + 16 * h, v);
          sums[t][h] = _mm512_setzero_ps();
        }
      }
    }
  }

  template <int T>
  CPUMOE_INLINE void add_block(const Block& b, const Grid512& grid) {
    constexpr int H = kRegisters;
    const Steps<Gptq, T> steps(b);
    for (int64_t n = 0; n < b.features; n += kMostLanes) {
      if (b.load) load_factors<Gptq>(b, grid, n);
      const int64_t end = min64(b.features, n + kMostLanes);
      int64_t i = n;
      for (; i + 16 * H <= end; i += 16 * H) tile<T, H>(b, i, __mmask16(~0), steps);
      for (; i < end; i += 16) tile<T, 1>(b, i, first_of_16(end - i), steps);
    }
  }
};

struct Nibbles {
  using Order = Pairs;
  static constexpr Code kCode = Code::u4_gptq;
  static constexpr int64_t kInputs = 8;
  static constexpr int kParts = 2;  // even inputs, odd inputs
  CPUMOE_INLINE void split(__m512i word, __m512i codes[2]) {
    codes[0] = _mm512_and_si512(word, _mm512_set1_epi8(15));
    codes[1] = _mm512_and_si512(_mm512_srli_epi16(word, 4), _mm512_set1_epi8(15));
  }
  // The vector of a span that holds the activations of line i of a group.
  static constexpr int vector(int i, int part) { return i / 2 * 4 + part * 2 + i % 2; }
};
struct Bytes {
  using Order = Quads;
  static constexpr Code kCode = Code::u8_gptq;
  static constexpr int64_t kInputs = 4;
  static constexpr int kParts = 1;
  CPUMOE_INLINE void split(__m512i word, __m512i codes[1]) { codes[0] = word; }
  static constexpr int vector(int i, int) { return i; }
};

// AWQ: a word holds eight features of one input. Bytes of four lines side by side are quads of
// inputs: register q of them has words q, q + 4, q + 8 and q + 12 of a line; its low nibbles
// are features 0 4 1 5 of each word, its high ones 2 6 3 7.
struct Awq : Vnni<Awq> {
  using Order = Quads;
  static constexpr Code kCode = Code::u4_awq;
  static constexpr int64_t kInputs = 1, kDepth = kActGroup;

  // Sums lie as [q][h]: the features that low (h = 0) or high nibbles of register q hold.

  // Quarters of four registers: the i-th of each one into the i-th register.
  CPUMOE_INLINE void turn(__m512 v[4]) {
    const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44),
                 b = _mm512_shuffle_f32x4(v[2], v[3], 0x44),
                 c = _mm512_shuffle_f32x4(v[0], v[1], 0xee),
                 d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_f32x4(a, b, 0x88), v[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    v[2] = _mm512_shuffle_f32x4(c, d, 0x88), v[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  CPUMOE_INLINE void arrange(const __m512 v[8], float* to) {
    const __m512i halves = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      __m512 r[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) r[j] = _mm512_permutexvar_ps(halves, v[p + 2 * j]);
      turn(r);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm512_storeu_ps(to + 64 * p + 16 * j, r[j]);
    }
  }
  CPUMOE_INLINE void restore(float* sums, int64_t features) {
    const __m512i whole = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (const float* end = sums + features; sums < end; sums += kMostLanes) {
      __m512 r[2][4];
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) r[p][j] = _mm512_loadu_ps(sums + 64 * p + 16 * j);
        turn(r[p]);
      }
#pragma GCC unroll 8
      for (int z = 0; z < 8; ++z) {
        _mm512_storeu_ps(sums + 16 * z, _mm512_permutexvar_ps(whole, r[z % 2][z / 2]));
      }
    }
  }

  // p + four inputs (the last of a weight may be fewer) of halves B .. B + H - 1.
  template <int T, int B, int H>
  CPUMOE_INLINE Sums<T * H, 4> four(Sums<T * H, 4> p, const Block& b, const char* w, __mmask16 mask,
                                    const char* x, int64_t inputs) {
    __m512i l[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if (B == 0) ask(b, w + j * b.stride);
      l[j] = j < inputs ? load_words(w + j * b.stride, mask) : _mm512_setzero_si512();
    }
    const __m512i a = _mm512_unpacklo_epi8(l[0], l[1]), c = _mm512_unpacklo_epi8(l[2], l[3]),
                  d = _mm512_unpackhi_epi8(l[0], l[1]), f = _mm512_unpackhi_epi8(l[2], l[3]);
    const __m512i v[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                          _mm512_unpacklo_epi16(d, f), _mm512_unpackhi_epi16(d, f)};
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m512i y = dword_in_all(x + t * b.xs);
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        const __m512i bits = _mm512_set1_epi8(h + B == 0 ? 15 : char(0xf0));
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          __m512i& sums = p.v[t * H + h][q];
          sums = _mm512_dpbusd_epi32(sums, _mm512_and_si512(v[q], bits), y);
        }
      }
    }
    return p;
  }

  // kMostLanes features from i on times T tokens, halves B .. B + H - 1.
  template <int T, int B, int H>
  CPUMOE_INLINE void halves(const Block b, int64_t i, __mmask16 mask,
                            const Steps<Awq, T>& steps) {
    const char* w = b.lines + i / 2;
    for (int64_t j = 0; j < steps.count; ++j) {
      const Step& step = steps.at[j];
      const char* x = step.x;
      Sums<T * H, 4> p = {};
      int64_t e = 0;
      if (step.count == kActGroup) {
#pragma GCC unroll 8
        for (; e < kActGroup; e += 4) {
          p = four<T, B, H>(p, b, w, mask, x + e * 8, 4);
          w += 4 * b.stride;
          __asm__("" : "+r"(w));  // else GCC keeps an address for every line
        }
      } else {
        const char* from = x + step.first * 8;
        for (; e < step.count; e += 4, w += 4 * b.stride) {
          p = four<T, B, H>(p, b, w, mask, from + e * 8, step.count - e);
        }
      }
      // Every step ends its factor here: a block is a group of activations.
      const __mmask16 before = b.k == 0 && step.g == 0 ? 0 : 0xffff;  // sums are there already
      const float* scales = b.scales + step.g * b.pitch + i;
      const float* offsets = b.offsets + step.g * b.pitch + i;
      float* c = b.c + i;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t, c += b.cs) {
        const __m512 whole = float_in_all(x + t * b.xs + Spans::kScale);
        // High nibbles are 16 times as much.
        const __m512 part = _mm512_mul_ps(whole, _mm512_set1_ps(0.0625f));
        const __m512 total = _mm512_set1_ps(steps.totals[step.g][t]);
#pragma GCC unroll 2
        for (int h = B; h < B + H; ++h) {
#pragma GCC unroll 4
          for (int at = 16 * h, q = 0; q < 4; ++q, at += 32) {
            const __m512 sum = _mm512_cvtepi32_ps(p.v[t * H + h - B][q]);
            __m512 v = _mm512_maskz_loadu_ps(before, c + at);
            v = _mm512_fmadd_ps(_mm512_mul_ps(sum, h == 0 ? whole : part),
                                _mm512_loadu_ps(scales + at), v);
            v = _mm512_fmadd_ps(_mm512_loadu_ps(offsets + at), total, v);
            _mm512_storeu_ps(c + at, v);
          }
        }
      }
    }
  }

  template <int T>
  CPUMOE_INLINE void add_block(const Block& b, const Grid512& grid) {
    const Steps<Awq, T> steps(b);
    for (int64_t i = 0; i < b.features; i += kMostLanes) {
      const __mmask16 mask = first_of_16((b.features - i + 7) / 8);
      if (b.load) load_factors<Awq>(b, grid, i);
      if constexpr (T <= 2) {
        halves<T, 0, 2>(b, i, mask, steps);
      } else {
        halves<T, 0, 1>(b, i, mask, steps);
        halves<T, 1, 1>(b, i, mask, steps);
      }
    }
  }
};

}  // namespace cpumoe::CPUMOE_NS
