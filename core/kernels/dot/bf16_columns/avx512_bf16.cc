// Class bf16, weights in columns: VDPBF16PS wants the weights of two inputs side by side, so two
// lines of memory are interleaved in registers. Features are in lanes; pairs of inputs are
// broadcast; every sum is one chain over the pairs of inputs.
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/dot/stream/lines_ahead.h"

namespace cpumoe::avx512_bf16 {
namespace {

constexpr int64_t kLanes = 16;  // features of a register of sums

// Lane i takes weight i of the first line and weight i of the second.
alignas(64) constexpr int32_t kInterleave[kLanes] = {
    0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
    0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f};

// Up to 32 features of two lines as two registers of pairs.
struct Pairs32 {
  __m512bh v[2];
};
// rows: of the two lines, 1 leaves zeros for the second. Only the features of `mask` are read.
CPUMOE_INLINE Pairs32 load_pairs(const char* w, int64_t stride, int64_t rows, __mmask32 mask) {
  const __m512i a = _mm512_maskz_loadu_epi16(mask, w);
  const __m512i b = rows > 1 ? _mm512_maskz_loadu_epi16(mask, w + stride) : _mm512_setzero_si512();
  const __m512i low = _mm512_load_si512(kInterleave);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x100010));
  return {{(__m512bh)_mm512_permutex2var_epi16(a, low, b),
           (__m512bh)_mm512_permutex2var_epi16(a, high, b)}};
}
CPUMOE_INLINE __mmask32 first_features(int64_t count) {
  return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
}
CPUMOE_INLINE __m512bh broadcast_pair(const char* x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// ---- one to four tokens: bound by memory. Blocks of a few lines of memory; sums lie in the tile
// between blocks. Lines are asked for twice, one and two blocks ahead.

constexpr int kStreamLines = 8;

// V registers of features, R lines of memory, T tokens.
template <int T, int V, int R>
CPUMOE_INLINE void stream_tile(const char* w, int64_t stride, __mmask32 mask, const char* x,
                               int64_t xs, float* c, int64_t cs, bool first, LinesAhead ahead[2]) {
  __m512 acc[T][V];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      acc[t][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + t * cs + v * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r += 2) {
    for (int i = r; i < R && i < r + 2; ++i) {
      LinesAhead::step(ahead[0]);
      LinesAhead::step(ahead[1]);
    }
    const Pairs32 p = load_pairs(w + r * stride, stride, R - r, mask);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m512bh xt = broadcast_pair(x + t * xs + r * 2);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[t][v] = _mm512_dpbf16_ps(acc[t][v], p.v[v], xt);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + t * cs + v * kLanes, acc[t][v]);
  }
}

// All features, R lines of memory, T tokens.
template <int T, int R>
CPUMOE_INLINE void stream_block(const char* w, int64_t stride, int64_t features, const char* x,
                                int64_t xs, float* c, int64_t cs, bool first,
                                LinesAhead ahead[2]) {
  int64_t f = 0;
  for (; f + 32 <= features; f += 32) {
    stream_tile<T, 2, R>(w + f * 2, stride, ~__mmask32(0), x, xs, c + f, cs, first, ahead);
  }
  const __mmask32 mask = first_features(features - f);
  if (features - f > kLanes) {
    stream_tile<T, 2, R>(w + f * 2, stride, mask, x, xs, c + f, cs, first, ahead);
  } else if (f < features) {
    stream_tile<T, 1, R>(w + f * 2, stride, mask, x, xs, c + f, cs, first, ahead);
  }
}

// All features of the slice for T tokens from m on.
template <int T>
static void stream_tokens(const DotArgs& a, int64_t m) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * 2, xs = Bf16Rows::line(w.k) * 2, features = a.n1 - a.n0;
  const char* base = static_cast<const char*>(w.data) + a.n0 * 2;
  const char* x = static_cast<const char*>(a.act) + m * xs;
  float* c = a.c + (m - a.m0) * a.c_stride;
  const auto block = [&](int64_t k, auto walk) __attribute__((always_inline)) {
    LinesAhead ahead[2] = {lines_from(a, 2, kStreamLines, k + 2 * kStreamLines),
                           lines_from(a, 2, kStreamLines, k + kStreamLines)};
    walk(base + k * stride, stride, features, x + k * 2, xs, c, a.c_stride, k == 0, ahead);
  };
  int64_t k = 0;
  for (; k + kStreamLines <= w.k; k += kStreamLines) block(k, stream_block<T, kStreamLines>);
  for (; k + 2 <= w.k; k += 2) block(k, stream_block<T, 2>);
  if (k < w.k) block(k, stream_block<T, 1>);
  if (w.k == 0) {
    for (int t = 0; t < T; ++t) memset(c + t * a.c_stride, 0, size_t(features) * sizeof(float));
  }
}

// ---- more tokens: pairs are written to scratch block by block, panels of 64 features. A panel
// stays in L1 while all tokens pass, six at a time.

constexpr int64_t kDepth = 192;     // inputs of a block
constexpr int64_t kColumns = 192;   // features of a block
constexpr int64_t kPanel = 64;      // features
constexpr int64_t kPairBytes = kPanel * 4;
constexpr int64_t kPanelBytes = kDepth / 2 * kPairBytes;
constexpr int64_t kTileTokens = 6;

// Weights [n, n + features) x [k, k + depth): pair i of feature f to f / kPanel * kPanelBytes + i *
// kPairBytes + f % kPanel * 4. What is past the last feature or input is zero.
static void write_pairs(const char* w, int64_t stride, int64_t features, int64_t depth,
                        char* block) {
  for (int64_t k = 0; k < depth; k += 2, block += kPairBytes, w += 2 * stride) {
    for (int64_t f = 0; f < features; f += 32) {
      const Pairs32 p =
          load_pairs(w + f * 2, stride, depth - k, first_features(features - f));
      char* to = block + f / kPanel * kPanelBytes + f % kPanel * 4;
      _mm512_store_si512(to, (__m512i)p.v[0]);
      _mm512_store_si512(to + 64, (__m512i)p.v[1]);
    }
  }
}

// V registers of features x T tokens over `pairs` pairs. fetch: null, or lines of memory to be
// asked for, one for each input.
template <int V, int T>
static void pairs_tile(const char* w, const char* x, int64_t xs, int64_t pairs, float* c,
                       int64_t cs, bool first, const char* fetch, int64_t stride) {
  __m512 acc[T][V];
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      acc[t][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + t * cs + v * kLanes);
    }
  }
  for (int64_t i = 0; i < pairs; ++i, w += kPairBytes, x += 4) {
    if (fetch != nullptr) {
#pragma GCC unroll 2
      for (int line = 0; line < 2; ++line, fetch += stride) {
#pragma GCC unroll 2
        for (int v = 0; v < V; v += 2) _mm_prefetch(fetch + v * 32, _MM_HINT_T1);
      }
    }
    __m512bh p[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) p[v] = (__m512bh)_mm512_load_si512(w + v * 64);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      __m512bh xt = broadcast_pair(x + t * xs);
      __asm__("" : "+v"(xt));  // else GCC reads it once per register of features
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[t][v] = _mm512_dpbf16_ps(acc[t][v], p[v], xt);
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + t * cs + v * kLanes, acc[t][v]);
  }
}

template <int V, class... Args>
CPUMOE_INLINE void pairs_tokens(int64_t tokens, Args... args) {
  if (tokens == 1) return pairs_tile<V, 1>(args...);
  if (tokens == 2) return pairs_tile<V, 2>(args...);
  if (tokens == 3) return pairs_tile<V, 3>(args...);
  if (tokens == 4) return pairs_tile<V, 4>(args...);
  if (tokens == 5) return pairs_tile<V, 5>(args...);
  pairs_tile<V, 6>(args...);
}

}  // namespace

void dot_bf16_stream_columns_bf16(const DotArgs& a) {
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      stream_tokens<1>(a, m), m += 1;
    } else if (left == 2) {
      stream_tokens<2>(a, m), m += 2;
    } else if (left == 3) {
      stream_tokens<3>(a, m), m += 3;
    } else {
      stream_tokens<4>(a, m), m += 4;
    }
  }
}

void dot_bf16_pairs_columns_bf16(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * 2, xs = Bf16Rows::line(w.k) * 2;
  const char* base = static_cast<const char*>(w.data);
  char* block = static_cast<char*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kColumns) {
    const int64_t features = min64(kColumns, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      write_pairs(base + k * stride + n * 2, stride, features, depth, block);
      const char* after = k + kDepth < w.k      ? base + (k + kDepth) * stride + n * 2
                          : n + kColumns < a.n1 ? base + (n + kColumns) * 2
                                                : nullptr;
      for (int64_t f = 0; f < features;) {
        const char* panel = block + f / kPanel * kPanelBytes + f % kPanel * 4;
        const bool whole = features - f >= kPanel;
        for (int64_t m = a.m0; m < a.m1; m += kTileTokens) {
          const int64_t tokens = min64(kTileTokens, a.m1 - m);
          const char* x = static_cast<const char*>(a.act) + m * xs + k * 2;
          float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0 + f);
          const char* fetch = m == a.m0 && after != nullptr ? after + f * 2 : nullptr;
          const int64_t pairs = ceil_div(depth, 2);
          if (whole) {
            pairs_tokens<4>(tokens, panel, x, xs, pairs, c, a.c_stride, k == 0, fetch, stride);
          } else {
            pairs_tokens<1>(tokens, panel, x, xs, pairs, c, a.c_stride, k == 0, fetch, stride);
          }
        }
        f += whole ? kPanel : kLanes;
      }
      k += kDepth;
    } while (k < w.k);
  }
}
size_t scratch_bf16_pairs(int64_t, int64_t, int64_t) {
  return size_t(kColumns / kPanel * kPanelBytes);
}

}  // namespace cpumoe::avx512_bf16
