// Many tokens: a block of rows is unpacked once to bytes and fp32 factors, which stay in L2, and
// multiplied with all tokens, two rows by four tokens in registers. Included by ISA files only.
#pragma once
#include "kernels/dot/dot.h"
#include "kernels/dot/integer/source.h"

namespace cpumoe::CPUMOE_NS {

constexpr int64_t kBlockRows = 32;  // features
constexpr int64_t kBlockSpans = 8;  // 2048 inputs: the spans of four tokens take 14 KiB of L1

template <class S>
constexpr Math block_math(bool halves) {
  Math m = math_of<S>(halves);
  m.counted = m.bytes;
  return m;
}

// A span of one row in the block: 8 vectors of codes, then the factors that its arithmetic has.
template <Math M>
struct Unpacked {
  static constexpr int64_t kFactors = 256;
  static constexpr int64_t kInts = kFactors + kFactorFloats<M> * 4;
  static constexpr int64_t kCounts = !M.counted ? 0 : M.parts == Math::whole ? 1 : 2;
  static constexpr int64_t kLine = sizeof(Codes);
  static constexpr int64_t kBytes =
      (kInts + (M.scaled ? 64 : 0) + 32 * kCounts + kLine - 1) / kLine * kLine;

  CPUMOE_INLINE void load(const char* p, Factors& f) {
    load_factors<M>(reinterpret_cast<const float*>(p + kFactors), f);
    if constexpr (M.scaled) {
      f.c0 = load_lanes(p + kInts);
      f.c1 = load_lanes(p + kInts + 32);
    }
    if constexpr (kCounts >= 1) f.c0 = load_lanes(p + kInts);
    if constexpr (kCounts == 2) f.c1 = load_lanes(p + kInts + 32);
  }
  CPUMOE_INLINE void store(char* p, const Factors& f) {
    float* to = reinterpret_cast<float*>(p + kFactors);
    _mm256_store_ps(to, f.s0);
    if constexpr (M.offset != Math::none) _mm256_store_ps(to + 8, f.o0);
    if constexpr (M.offset == Math::halves) _mm256_store_ps(to + 16, f.o1);
    if constexpr (M.scaled) {
      store_lanes(p + kInts, f.c0);
      store_lanes(p + kInts + 32, f.c1);
    }
  }
};

// A span of any arithmetic: codes, two scales, two offsets and two factors or counts.
constexpr int64_t kMostBytes = 256 + 6 * 32;

// Rows [n, n + rows), spans [first, last).
template <class S, Code C, bool kHalves>
static void unpack_block(const WeightView& w, const Grid& grid, Expand expand, int64_t n,
                         int64_t rows, int64_t first, int64_t last, char* block) {
  constexpr Math M = block_math<S>(kHalves);
  using U = Unpacked<M>;
  static_assert(U::kBytes <= kMostBytes);
  const int64_t bytes = line_bytes(C, w.k), whole = min64(last, bytes / S::kSpanBytes);
  if constexpr (S::kPlain) {
    expand(grid, n, rows, first, last, reinterpret_cast<float*>(block + U::kFactors), U::kBytes / 4,
           kBlockSpans * U::kBytes / 4);
  }
  for (int64_t r = 0; r < rows; ++r) {
    char* to = block + r * kBlockSpans * U::kBytes;
    const char* row = static_cast<const char*>(w.data) + (n + r) * line_bytes(C, w.stride);
    for (int64_t i = first; i < last; ++i, to += U::kBytes) {
      alignas(32) char part[S::kSpanBytes];
      const char* p = row + i * S::kSpanBytes;
      if (i >= whole) {
        copy_span<S>(p, bytes - i * S::kSpanBytes, part);
        p = part;
      }
      Codes v[kRegisters];
      decode_span<S>(p, v);
#pragma GCC unroll 8
      for (int j = 0; j < kRegisters; ++j) store_register(to + sizeof(Codes) * j, v[j]);
      if constexpr (M.counted) {
        Factors f;
        count_negatives<M>(v, f);
        store_lanes(to + U::kInts, f.c0);
        if constexpr (U::kCounts == 2) store_lanes(to + U::kInts + 32, f.c1);
      }
      if constexpr (!S::kPlain) {
        Factors f;
        S::factors(p, f);
        U::store(to, f);
      }
    }
  }
}

// The codes that will be unpacked next, fetched into L2 line by line while this block is in use.
struct Fetch {
  const char* at;
  const char* row_end;
  int64_t row_bytes, stride, rows;  // rows left; 0: nothing to fetch
  template <int kLines>
  CPUMOE_INLINE void step(Fetch& f) {
    if (f.rows <= 0) return;
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) _mm_prefetch(f.at + 64 * i, _MM_HINT_T1);
    f.at += 64 * kLines;
    if (f.at < f.row_end) return;
    f.row_end += f.stride;
    f.at = f.row_end - f.row_bytes;
    --f.rows;
  }
};

// c[t * cs + r] (+)= R rows x T tokens over `spans` of the block.
template <Math M, int R, int T, int kLines>
CPUMOE_INLINE void block_tile(const char* block, int64_t spans, const char* x, int64_t xs, float* c,
                              int64_t cs, bool first, Fetch& fetch) {
  using U = Unpacked<M>;
  constexpr int64_t kRow = kBlockSpans * U::kBytes;
  __m256 acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < spans; ++i, block += U::kBytes, x += Spans::kBytes) {
    Fetch::step<kLines>(fetch);
    add_span<M, R, T>(
        acc,
        [=](int r, int i) __attribute__((always_inline)) {
          return load_register(block + r * kRow + i * int(sizeof(Codes)));
        },
        [=](int r) __attribute__((always_inline)) {
          Factors f;
          U::load(block + r * kRow, f);
          return f;
        },
        x, xs);
  }
  __m256 v[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = i / R < T ? acc[i % R][i / R < T ? i / R : 0] : _mm256_setzero_ps();
  alignas(32) float sums[8];
  _mm256_store_ps(sums, sum_lanes(v));
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      c[t * cs + r] = first ? sums[t * R + r] : c[t * cs + r] + sums[t * R + r];
    }
  }
}

template <Math M, int T, int kLines>
static void block_tokens(const char* block, int64_t rows, int64_t spans, const char* x, int64_t xs,
                         float* c, int64_t cs, bool first, Fetch& fetch) {
  constexpr int64_t kRow = kBlockSpans * Unpacked<M>::kBytes;
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    block_tile<M, 2, T, kLines>(block + r * kRow, spans, x, xs, c + r, cs, first, fetch);
  }
  if (r < rows)
    block_tile<M, 1, T, kLines>(block + r * kRow, spans, x, xs, c + r, cs, first, fetch);
}

template <class S, Code C, bool kHalves>
static void block_all(const DotArgs& a) {
  constexpr Math M = block_math<S>(kHalves);
  constexpr int kLines = int((2 * S::kSpanBytes + 63) / 64);  // of two rows' span
  const WeightView& w = *a.w;
  const int64_t xs = Spans::line_bytes(w.k), all = ceil_div(w.k, Spans::kInputs);
  const int64_t stride = line_bytes(C, w.stride), bytes = line_bytes(C, w.k);
  const char* base = static_cast<const char*>(w.data);
  char* block = static_cast<char*>(a.scratch);
  Grid grid;
  Expand expand = nullptr;
  if constexpr (S::kPlain) {
    grid = make_grid<S>(w, kHalves);
    expand = expand_for<M>(w);
  }
  for (int64_t n = a.n0; n < a.n1; n += kBlockRows) {
    const int64_t rows = min64(kBlockRows, a.n1 - n);
    float* c = a.c + (n - a.n0);
    int64_t first = 0;
    do {
      const int64_t last = min64(all, first + kBlockSpans);
      unpack_block<S, C, kHalves>(w, grid, expand, n, rows, first, last, block);
      const bool next_rows = last == all;
      const int64_t span = next_rows ? 0 : last, n_next = next_rows ? n + kBlockRows : n;
      const int64_t width = min64(bytes - span * S::kSpanBytes, kBlockSpans * S::kSpanBytes);
      const char* at = base + n_next * stride + span * S::kSpanBytes;
      Fetch fetch{at, at + width, width, stride, max64(0, min64(kBlockRows, a.n1 - n_next))};
      for (int64_t m = a.m0; m < a.m1;) {
        const char* x = static_cast<const char*>(a.act) + m * xs + first * Spans::kBytes;
        float* tile = c + (m - a.m0) * a.c_stride;
        const int64_t left = a.m1 - m, spans = last - first, cs = a.c_stride;
        const bool start = first == 0;
        if (left == 1) {
          block_tokens<M, 1, kLines>(block, rows, spans, x, xs, tile, cs, start, fetch), m += 1;
        } else if (left == 2) {
          block_tokens<M, 2, kLines>(block, rows, spans, x, xs, tile, cs, start, fetch), m += 2;
        } else if (left == 3) {
          block_tokens<M, 3, kLines>(block, rows, spans, x, xs, tile, cs, start, fetch), m += 3;
        } else {
          block_tokens<M, 4, kLines>(block, rows, spans, x, xs, tile, cs, start, fetch), m += 4;
        }
        fetch.rows = 0;
      }
      first = last;
    } while (first < all);
  }
}
template <class S, Code C>
static void block(const DotArgs& a) {
  if (S::kPlain && a.w->format->scale_cols == 16) return block_all<S, C, S::kPlain>(a);
  block_all<S, C, false>(a);
}

#define CPUMOE_INT_BLOCK(code, source) \
  void dot_int_block_rows_##code(const DotArgs& a) { block<source, Code::code>(a); }

}  // namespace cpumoe::CPUMOE_NS
