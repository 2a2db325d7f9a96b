// Words of packed codes, columns: a line holds all features of one or more inputs, so that a register
// of it times broadcast activations are sums of many features, and nothing is summed across lanes.
// Included by ISA files only.
#pragma once
#include "kernels/dot/dot.h"
#include "kernels/dot/integer/grid_values.h"
#include "kernels/dot/integer/math.h"
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::CPUMOE_NS {

constexpr int64_t kDepth = 128;      // inputs of a block
constexpr int64_t kFeatures = 1536;  // of a slice whose factors and sums stay near
constexpr int64_t kMostGroups = kDepth / 16;

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

// Scales and offsets of up to kFeatures features for the groups of a block.
struct BlockFactors {
  int64_t groups, size;  // inputs that share a factor
  float* scales;         // [group][kFeatures]
  float* offsets;
};

template <Code C>
CPUMOE_INLINE void load_factors(const WeightView& w, float counted_from, int64_t n,
                                int64_t features, int64_t group, float* scales, float* offsets) {
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

// A source of words:
//   Order, kCode, kInputs    of its activations (layouts.h); inputs of a line
//   kCountedFrom             the number of code 0
//   kVectors, kTokens        registers of sums of a tile (8 features each); most tokens at a time
//   add_group<T>(sums, w, stride, first, count, a, xs, ahead)
//                            sums[t][v] += scale * integer sum over inputs first .. first + count - 1
//                            of a group of activations, from line w on; a: the group's lane
//   arrange(p), restore(p)   16 features at p into the order of the sums, and back

// Inputs [k, k + depth) of a block, a tile of features, T tokens. c: their sums; f.scales and
// f.offsets moved to the first feature.
template <class S, int T>
CPUMOE_INLINE void words_tile(const char* w, int64_t stride, const char* x, int64_t xs, int64_t k,
                              int64_t depth, const BlockFactors& f, float* c, int64_t cs,
                              Ahead& ahead) {
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

// All features of the slice for T tokens.
template <class S, int T>
static void words_tokens(const char* w, int64_t stride, int64_t features, const char* x, int64_t xs,
                         int64_t k, int64_t depth, const BlockFactors& f, float* c, int64_t cs,
                         Ahead& ahead) {
  constexpr int64_t kTile = S::kVectors * 8, kBytes = kTile / 8 * code_block(S::kCode).bytes *
                                                      (8 / code_block(S::kCode).elements);
  for (int64_t i = 0; i < features; i += kTile) {
    const BlockFactors here{f.groups, f.size, f.scales + i, f.offsets + i};
    const char* from = w + line_bytes(S::kCode, i);
    alignas(32) char tail[kDepth / S::kInputs * kBytes];
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

template <class S>
static void words(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = line_bytes(S::kCode, w.stride), xs = Spans::line_bytes(w.k);
  const int64_t size = w.format->scale_cols;
  float* scratch = static_cast<float*>(a.scratch);
  BlockFactors f{0, min64(size, kDepth), scratch, scratch + kMostGroups * kFeatures};
  for (int64_t n = a.n0; n < a.n1; n += kFeatures) {
    const int64_t features = min64(kFeatures, a.n1 - n), cs = a.c_stride;
    float* c = a.c + (n - a.n0);
    if (w.k == 0) {
      for (int64_t m = a.m0; m < a.m1; ++m) memset(c + (m - a.m0) * cs, 0, size_t(features) * 4);
      continue;
    }
    for (int64_t k = 0; k < w.k; k += kDepth) {
      const int64_t depth = min64(kDepth, w.k - k);
      f.groups = ceil_div(depth, f.size);
      if (k % size == 0 || size < kDepth) {
        for (int64_t g = 0; g < f.groups; ++g) {
          float *s = f.scales + g * kFeatures, *o = f.offsets + g * kFeatures;
          load_factors(w, S::kCountedFrom, n, features, (k + g * f.size) / size, s, o);
          for (int64_t i = 0; i < features; i += 16) S::arrange(s + i), S::arrange(o + i);
        }
      }
      const char* p =
          static_cast<const char*>(w.data) + k / S::kInputs * stride + line_bytes(S::kCode, n);
      const int64_t bytes = line_bytes(S::kCode, features);
      const char* next = k + 2 * kDepth <= w.k ? p + kDepth / S::kInputs * stride : p;
      Ahead ahead{next, next + bytes, bytes, stride};
      for (int64_t m = a.m0; m < a.m1;) {
        const char* x = static_cast<const char*>(a.act) + m * xs;
        float* tile = c + (m - a.m0) * cs;
        const int64_t left = a.m1 - m;
        if (left >= 4 && S::kTokens == 4) {
          words_tokens<S, S::kTokens>(p, stride, features, x, xs, k, depth, f, tile, cs, ahead);
          m += S::kTokens;
        } else if (left >= 2) {
          words_tokens<S, 2>(p, stride, features, x, xs, k, depth, f, tile, cs, ahead), m += 2;
        } else {
          words_tokens<S, 1>(p, stride, features, x, xs, k, depth, f, tile, cs, ahead), m += 1;
        }
        ahead = {p, p + bytes, bytes, 0};
      }
    }
    for (int64_t m = a.m0; m < a.m1; ++m) {
      for (int64_t i = 0; i < features; i += 16) S::restore(c + (m - a.m0) * cs + i);
    }
  }
}

}  // namespace cpumoe::CPUMOE_NS
