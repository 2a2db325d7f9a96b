// Class bf16, weights in rows: VDPBF16PS takes 32 weights and 32 activations as they lie in memory.
// Nothing is decoded and nothing is written for a second pass over a weight.
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx512.h"

namespace cpumoe::avx512_bf16 {
namespace {

constexpr int64_t kStep = 32;  // inputs of a register

CPUMOE_INLINE __m512bh load_step(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
// The first `count` (1..32) inputs, zeros behind them; other bytes are not read.
CPUMOE_INLINE __m512bh load_part(const char* p, int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), p);
}

// ---- one to four tokens: bound by memory. One row after the other, one chain of sums for each
// token: its latency of 6 cycles a line paces loads just above the speed of memory. With two rows
// or two chains they overrun the prefetches (1 token at 60 GB/s: 67 % of read bandwidth, not 90 %).

constexpr int64_t kStreamRows = 8;  // that take one span of inputs after the other
// Bytes fetched into L2 ahead of their use. With little else to load it is every second line, the
// hardware takes the other one; else every line, and once more at half the distance, because the
// CPU drops a prefetch when too many are under way.
template <bool kTwice>
constexpr int64_t kStreamAhead = kTwice ? 16384 : 12288;

// Inputs of a span: those of two to four tokens are at most half of L1. Those of one token may fill
// it: spans that leave more of it free are slower.
template <int T>
constexpr int64_t kStreamSpan = T == 1 ? 16384 : T == 2 ? 4096 : 2048;
constexpr int64_t kShortRow = 4096;  // inputs: those of one token leave most of L1 to the weights

// One row times T tokens over a span. sums: a register a token, to start from and to leave sums in.
template <int T, bool kTwice>
CPUMOE_INLINE void stream_span(const char* w, const char* x, int64_t xs, int64_t inputs, bool first,
                               __m512* sums, const char* far, const char* near) {
  __m512 acc[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) acc[t] = first ? _mm512_setzero_ps() : sums[t];
  const auto step = [&](int64_t k, __m512bh v) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      acc[t] = _mm512_dpbf16_ps(acc[t], v, load_step(x + t * xs + k * 2));
    }
  };
  if (!kTwice) far -= reinterpret_cast<uintptr_t>(far) % 128;  // pairs of lines as memory has them
  int64_t k = 0;
  for (; k + 2 * kStep <= inputs; k += 2 * kStep) {
    _mm_prefetch(far + k * 2, _MM_HINT_T1);
    if (kTwice) {
      _mm_prefetch(far + k * 2 + 64, _MM_HINT_T1);
      _mm_prefetch(near + k * 2, _MM_HINT_T1);
      _mm_prefetch(near + k * 2 + 64, _MM_HINT_T1);
    }
    step(k, load_step(w + k * 2));
    step(k + kStep, load_step(w + (k + kStep) * 2));
  }
  for (; k < inputs; k += kStep) step(k, load_part(w + k * 2, min64(inputs - k, kStep)));
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) sums[t] = acc[t];
}

// All features of the slice for T tokens from m on.
template <int T, bool kTwice = true>
static void stream_tokens(const DotArgs& a, int64_t m) {
  constexpr int64_t kSpan = kStreamSpan<T>;
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * 2, xs = Bf16Rows::line(w.k) * 2;
  const char* base = static_cast<const char*>(w.data);
  const char* x = static_cast<const char*>(a.act) + m * xs;
  float* c = a.c + (m - a.m0) * a.c_stride;
  const bool spans = w.k > kSpan;
  // Where row `row` of the block from n on lies, of this slice or of the next one.
  const auto line = [&](int64_t n, int64_t row) {
    if (n + row < a.n1) return base + (n + row) * stride;
    if (a.next != nullptr) return static_cast<const char*>(a.next) + (n + row - a.n1) * stride;
    return base + n * stride;
  };
  __m512 sums[kStreamRows * T];
  for (int64_t n = a.n0; n < a.n1; n += kStreamRows) {
    const int64_t rows = min64(kStreamRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t inputs = min64(kSpan, w.k - k);
      const auto pieces_ahead = [&](int64_t r, int64_t pieces) {  // what is used so much later
        int64_t row = r + pieces, at = k;
        if (spans && row >= rows) {
          at = k + kSpan < w.k ? k + kSpan : 0;
          row = at == 0 ? row - rows + kStreamRows : min64(row - rows, rows - 1);
        }
        return line(n, row) + at * 2;
      };
      const int64_t far = max64(2, kStreamAhead<kTwice> / max64(64, inputs * 2));
      for (int64_t r = 0; r < rows; ++r) {
        stream_span<T, kTwice>(base + (n + r) * stride + k * 2, x + k * 2, xs, inputs, k == 0,
                               sums + r * T, pieces_ahead(r, far), pieces_ahead(r, far / 2));
      }
      k += kSpan;
    } while (k < w.k);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      store_sums(sums + t, T, rows, c + t * a.c_stride + (n - a.n0));
    }
  }
}

// ---- more tokens: four rows by six tokens in registers. A block of rows stays in L2 while all
// tokens pass, six tokens' inputs in L1 while its rows do.

constexpr int64_t kBlockRows = 32;
constexpr int64_t kBlockInputs = 1024;  // 12 KiB of six tokens beside 8 KiB of four rows in L1
constexpr int64_t kTileTokens = 6;

// Where the block lies that is used next. Its lines are asked for in step with this one's, by all
// groups of tokens in turn: group `turn` of `turns` takes every turns-th tile of rows, so that
// memory has the time of all of them.
struct Ahead {
  const char* at;
  int64_t stride, turn, turns;
};

// c[t * cs + r] (+)= R rows x T tokens over `inputs`.
template <int R, int T, bool kFetch>
CPUMOE_INLINE void block_tile(const char* w, int64_t stride, const char* x, int64_t xs,
                              int64_t inputs, float* c, int64_t cs, bool first, Ahead ahead) {
  __m512 acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) acc[r][t] = _mm512_setzero_ps();
  }
  const auto step = [&](int64_t k, const auto& load) __attribute__((always_inline)) {
    __m512bh v[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) v[r] = load(w + r * stride + k * 2);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      __m512bh xt = load_step(x + t * xs + k * 2);
      __asm__("" : "+v"(xt));  // else GCC reads it once per row
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], v[r], xt);
    }
  };
  int64_t k = 0;
  for (; k + kStep <= inputs; k += kStep) {
    if constexpr (kFetch) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) _mm_prefetch(ahead.at + r * ahead.stride + k * 2, _MM_HINT_T1);
    }
    step(k, [](const char* p) __attribute__((always_inline)) { return load_step(p); });
  }
  if (k < inputs) {
    const int64_t left = inputs - k;
    step(k, [=](const char* p) __attribute__((always_inline)) { return load_part(p, left); });
  }
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
    float* to = c + t * cs;
    const __m128 s = sum_fours(acc[0][t], acc[R > 1 ? 1 : 0][t], acc[R > 2 ? 2 : 0][t],
                               acc[R > 3 ? 3 : 0][t]);
    if constexpr (R == 4) {
      _mm_storeu_ps(to, first ? s : _mm_add_ps(_mm_loadu_ps(to), s));
    } else {
      *to = first ? _mm_cvtss_f32(s) : *to + _mm_cvtss_f32(s);
    }
  }
}

template <int T>
static void block_rows(const char* w, int64_t stride, int64_t rows, const char* x, int64_t xs,
                       int64_t inputs, float* c, int64_t cs, bool first, Ahead ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, ahead.at += 4 * ahead.stride) {
    if (r / 4 % ahead.turns == ahead.turn) {
      block_tile<4, T, true>(w + r * stride, stride, x, xs, inputs, c + r, cs, first, ahead);
    } else {
      block_tile<4, T, false>(w + r * stride, stride, x, xs, inputs, c + r, cs, first, ahead);
    }
  }
  for (; r < rows; ++r, ahead.at += ahead.stride) {
    block_tile<1, T, false>(w + r * stride, stride, x, xs, inputs, c + r, cs, first, ahead);
  }
}

template <class... Args>
CPUMOE_INLINE void block_tokens(int64_t tokens, Args... args) {
  if (tokens == 1) return block_rows<1>(args...);
  if (tokens == 2) return block_rows<2>(args...);
  if (tokens == 3) return block_rows<3>(args...);
  if (tokens == 4) return block_rows<4>(args...);
  if (tokens == 5) return block_rows<5>(args...);
  block_rows<6>(args...);
}

}  // namespace

void dot_bf16_stream_rows_bf16(const DotArgs& a) {
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      a.w->k <= kShortRow ? stream_tokens<1, false>(a, m) : stream_tokens<1>(a, m), m += 1;
    } else if (left == 2) {
      stream_tokens<2>(a, m), m += 2;
    } else if (left == 3) {
      stream_tokens<3>(a, m), m += 3;
    } else {
      stream_tokens<4>(a, m), m += 4;
    }
  }
}
size_t scratch_bf16_stream(int64_t, int64_t, int64_t) { return 0; }

void dot_bf16_block_rows_bf16(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * 2, xs = Bf16Rows::line(w.k) * 2;
  const char* base = static_cast<const char*>(w.data);
  for (int64_t n = a.n0; n < a.n1; n += kBlockRows) {
    const int64_t rows = min64(kBlockRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t inputs = min64(kBlockInputs, w.k - k);
      const char* at = base + n * stride + k * 2;
      Ahead ahead{at, stride, 0, ceil_div(a.m1 - a.m0, kTileTokens)};
      if (k + kBlockInputs < w.k) {
        ahead.at = at + kBlockInputs * 2;
      } else if (n + kBlockRows < a.n1) {
        ahead.at = base + (n + kBlockRows) * stride;
      } else if (a.next != nullptr) {
        ahead.at = static_cast<const char*>(a.next);
      }
      for (int64_t m = a.m0; m < a.m1; m += kTileTokens, ++ahead.turn) {
        const char* x = static_cast<const char*>(a.act) + m * xs + k * 2;
        float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0);
        const int64_t tokens = min64(kTileTokens, a.m1 - m);
        block_tokens(tokens, at, stride, rows, x, xs, inputs, c, a.c_stride, k == 0, ahead);
      }
      k += kBlockInputs;
    } while (k < w.k);
  }
}
size_t scratch_bf16_block(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx512_bf16
