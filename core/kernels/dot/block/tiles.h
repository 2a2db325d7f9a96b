// The register tiles of shape `block` and the walks around them, for weights that somebody decodes
// block by block to fp32 (or pairs of bf16), for any width of vectors V (vec/floats.h). Included by
// ISA files only.
// rows:    tokens in lanes (24 of them), weights broadcast, tile n_major.
// columns: features in lanes (three vectors), activations broadcast, tile m_major.
#pragma once
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/floats.h"

namespace cpumoe::CPUMOE_NS {

constexpr int64_t kDepth = 256;    // inputs per block
constexpr int64_t kRows = 96;      // features per block, rows: 96 KiB of decoded weights
constexpr int64_t kColumns = 192;  // features per block, columns: 192 KiB

// Features per decoded panel, columns.
template <class V>
constexpr int64_t kPanel = 3 * V::kLanes;
template <class V>
constexpr int64_t kPanelFloats = kPanel<V> * kDepth + 16;  // the 16 keep panels apart in L1's sets
// Tokens of a tile of columns: of 16 registers 12 are sums, of 32 they are 24.
template <class V>
constexpr int kTileTokens = V::kLanes == 16 ? 8 : 4;

// Sums in a tile: from zero at first, then from what is there.
template <class V>
struct Sums {
  bool first;
  __attribute__((always_inline)) typename V::F start(const float* c) const {
    return first ? V::zero() : V::load(c);
  }
  __attribute__((always_inline)) void put(float* c, typename V::F sum, int) const {
    V::store(c, sum);
  }
};

// c[r * cs + kLanes p + lane] from sums over depth of lanes[p * ls + k * kLaneStep + lane] *
// x[r * row + k * step]. fetch(k) is called once every 8 steps to fetch what comes after. It has to
// be inlined: GCC sees no effect in a function that only prefetches and drops calls of it.
template <class V, int P, int R, int64_t kLaneStep, class To, class Fetch>
CPUMOE_INLINE void multiply(const float* lanes, int64_t ls, const float* x, int64_t row,
                            int64_t step, int64_t depth, float* c, int64_t cs, const To& to,
                            const Fetch& fetch) {
  typename V::F acc[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) acc[r][p] = to.start(c + r * cs + V::kLanes * p);
  }
  const auto one = [&](int64_t k) __attribute__((always_inline)) {
    typename V::F v[P];
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) v[p] = V::load(lanes + p * ls + k * kLaneStep);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const typename V::F s = V::broadcast(x[r * row + k * step]);
#pragma GCC unroll 12
      for (int p = 0; p < P; ++p) acc[r][p] = V::products(v[p], s, acc[r][p]);
    }
  };
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    fetch(k);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) one(k + i);
  }
  for (; k < depth; ++k) one(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) to.put(c + r * cs + V::kLanes * p, acc[r][p], p);
  }
}

// Weights of the caller's next slice, as far as a kernel may fetch them.
CPUMOE_INLINE WeightView next_slice(const DotArgs& a) {
  WeightView w = *a.w;
  w.data = a.next;
  return w;
}

// ---- rows

// P panels of tokens with all rows of the block, R at a time. fetch(r, k): see block_rows.
template <int P, int R, class Fetch>
static void rows_panels(const float* x, int64_t xs, const float* w, int64_t rows, int64_t depth,
                        float* c, int64_t cs, bool first, const Fetch& fetch) {
  const Sums<Floats8> to{first};
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    const auto ahead = [&fetch, r](int64_t k)
                           __attribute__((always_inline)) { fetch.template rows<R>(r, k); };
    multiply<Floats8, P, R, 8>(x, xs, w + r * kDepth, kDepth, 1, depth, c + r * cs, cs, to, ahead);
  }
  const auto none = [](int64_t) {};
  for (; r < rows; ++r) {
    multiply<Floats8, P, 1, 8>(x, xs, w + r * kDepth, kDepth, 1, depth, c + r * cs, cs, to, none);
  }
}

// decode(n, rows, k, depth, out): weights [n, n + rows) x [k, k + depth) to out[r * kDepth + i].
// Fetch{w, n, rows, k}: what comes after this block, to be fetched while it is multiplied; nothing
// for n < 0. Its rows<R>(r, i) is called for every R rows r and every 8 inputs i.
template <class Fetch, class Decode>
CPUMOE_INLINE void block_rows(const DotArgs& a, const Decode& decode) {
  const WeightView& w = *a.w;
  const WeightView next = next_slice(a);
  const int64_t xs = Panels8::pos(8, 0, w.k);
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    const int64_t rows = min64(kRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode(n, rows, k, depth, block);
      Fetch fetch = k + kDepth < w.k   ? Fetch{w, n, k + kDepth}
                    : n + kRows < a.n1 ? Fetch{w, n + kRows, 0}
                                       : Fetch{next, a.next != nullptr ? 0 : -1, 0};
      for (int64_t m = a.m0; m < a.m1; fetch = Fetch{w, -1, 0}) {
        const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
        float* c = a.c + (n - a.n0) * a.c_stride + (m - a.m0);
        const int64_t panels = ceil_div(a.m1 - m, 8);
        const bool first = k == 0;
        if (panels == 1) {
          rows_panels<1, 12>(x, xs, block, rows, depth, c, a.c_stride, first, fetch);
          m += 8;
        } else if (panels == 2 || panels == 4) {
          rows_panels<2, 6>(x, xs, block, rows, depth, c, a.c_stride, first, fetch);
          m += 16;
        } else {
          rows_panels<3, 4>(x, xs, block, rows, depth, c, a.c_stride, first, fetch);
          m += 24;
        }
      }
      k += kDepth;
    } while (k < w.k);
  }
}

// ---- columns

// P vectors of features of a panel with R tokens or, where there are fewer, with as many.
template <class V, int P, int R, class To, class Fetch>
CPUMOE_INLINE void columns_tokens(const float* w, const float* x, int64_t row, int64_t step,
                                  int64_t tokens, int64_t depth, float* c, int64_t cs,
                                  const To& to, const Fetch& fetch) {
  if constexpr (R > 1) {
    if (tokens < R)
      return columns_tokens<V, P, R - 1>(w, x, row, step, tokens, depth, c, cs, to, fetch);
  }
  multiply<V, P, R, kPanel<V>>(w, V::kLanes, x, row, step, depth, c, cs, to, fetch);
}
template <class V, int P, class X, class To, class Fetch>
static void columns_panel(const float* w, const float* x, int64_t row, int64_t tokens,
                          int64_t depth, float* c, int64_t cs, const To& to, const Fetch& fetch) {
  columns_tokens<V, P, kTileTokens<V>>(w, x, X::kRow != 0 ? X::kRow : row, X::kStep, tokens, depth,
                                       c, cs, to, fetch);
}

// Activations of a tile: input k of token m at(a, m, k), the next token kRow floats (0: row()
// floats) and the next step of inputs kStep floats behind it.
struct PanelX {
  static constexpr int64_t kRow = 1, kStep = 8, kInputs = 1;
  CPUMOE_INLINE const float* at(const DotArgs& a, int64_t m, int64_t k) {
    return static_cast<const float*>(a.act) + Panels8::pos(m, k, a.w->k);
  }
  CPUMOE_INLINE int64_t row(const DotArgs&) { return kRow; }
};

// A panel, of which `features` from n on are wanted, with all tokens, summed as `to` says.
// fetch_of(m, x): what is called every 8 steps of the tile of tokens from m on.
template <class V, class X, class To, class FetchOf>
CPUMOE_INLINE void panel_tokens(const DotArgs& a, const float* panel, int64_t n, int64_t features,
                                int64_t k, int64_t depth, const To& to, const FetchOf& fetch_of) {
  const int64_t vectors = ceil_div(features, V::kLanes), steps = ceil_div(depth, X::kInputs);
  const int64_t row = X::row(a);
  for (int64_t m = a.m0; m < a.m1; m += kTileTokens<V>) {
    const float* x = X::at(a, m, k);
    float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0);
    const auto fetch = fetch_of(m, x);
    const int64_t tokens = a.m1 - m;
    if (vectors >= 3) {
      columns_panel<V, 3, X>(panel, x, row, tokens, steps, c, a.c_stride, to, fetch);
    } else if (vectors == 2) {
      columns_panel<V, 2, X>(panel, x, row, tokens, steps, c, a.c_stride, to, fetch);
    } else {
      columns_panel<V, 1, X>(panel, x, row, tokens, steps, c, a.c_stride, to, fetch);
    }
  }
}

// Where feature f (a multiple of 8) of input k of a block of columns lies: panels of features,
// input after input.
template <class V>
CPUMOE_INLINE float* columns_at(float* block, int64_t f, int64_t k) {
  constexpr int64_t kFeatures = kPanel<V>;
  return block + f / kFeatures * kPanelFloats<V> + k * kFeatures + f % kFeatures;
}

template <class Fetch>
struct FetchPanel {
  Fetch fetch;
  int64_t f;
  __attribute__((always_inline)) void operator()(int64_t k) const { fetch.panel(f, k); }
};

// decode(n, features, k, depth, block): weights to columns_at; features past the last up to whole
// vectors are finite or not, and used by nobody.
// Fetch{w, n, k} as for rows; its panel(f, i) is called for every panel and every 8 inputs i.
template <class V, class Fetch, class Decode>
CPUMOE_INLINE void block_columns(const DotArgs& a, const Decode& decode) {
  const WeightView& w = *a.w;
  const WeightView next = next_slice(a);
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kColumns) {
    const int64_t features = min64(kColumns, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode(n, features, k, depth, block);
      const Fetch after = k + kDepth < w.k      ? Fetch{w, n, k + kDepth}
                          : n + kColumns < a.n1 ? Fetch{w, n + kColumns, 0}
                                                : Fetch{next, a.next != nullptr ? 0 : -1, 0};
      for (int64_t f = 0; f < features; f += kPanel<V>) {
        panel_tokens<V, PanelX>(a, columns_at<V>(block, f, 0), n + f, features - f, k, depth,
                                Sums<V>{k == 0}, [&](int64_t m, const float*) {
                                  return FetchPanel<Fetch>{m == a.m0 ? after : Fetch{w, -1, 0}, f};
                                });
      }
      k += kDepth;
    } while (k < w.k);
  }
}

// For weights that are decoded panel by panel: the panel stays in L1 while all tokens pass, kPart
// inputs of all tokens in L2 while kColumns features do.
constexpr int64_t kPart = 128;

// Asks for the next panel in even steps while this one is multiplied, and for the inputs that come
// after those in use. One type for all codes.
struct FetchPart {
  struct Lines {
    const char* from;
    int64_t stride;  // bytes from row to row
    int shift;       // of each 2^shift lines of 64 bytes
    __attribute__((always_inline)) void get(int64_t i) const {
      const int64_t row = i >> shift;
      _mm_prefetch(from + row * stride + ((i - (row << shift)) << 6), _MM_HINT_T1);
    }
  };
  Lines w, x;
  int64_t first, end, each;  // lines of w: a share of them, so many a call
  int64_t x_first;
  __attribute__((always_inline)) void operator()(int64_t k) const {
    x.get(x_first + k / 8);
    for (int64_t i = first + k / 8 * each, to = min64(i + each, end); i < to; ++i) w.get(i);
  }
};

// S says
//   kCode, X                           the code and the activations
//   decode(n, features, k, depth, to)  weights to columns_at(to, 0, 0), of X::kInputs a step
//   sums(n, features, k)               what becomes of the sums over a part
template <class V, class S>
CPUMOE_INLINE void block_panels(const DotArgs& a, const S& source) {
  using X = typename S::X;
  constexpr CodeBlock kBlock = code_block(S::kCode);
  constexpr int64_t kLines = kPart / kBlock.elements * kBlock.bytes / 64;
  constexpr int64_t kCalls = kPart / X::kInputs / 8;  // of fetch in a tile
  constexpr int64_t kXLine = X::kRow != 0 ? kPart * kTileTokens<V> : kPart / X::kInputs;  // floats
  const WeightView& w = *a.w;
  const int64_t stride = line_bytes(S::kCode, w.stride);
  const int64_t turns = ceil_div(a.m1 - a.m0, kTileTokens<V>);
  const int64_t share = ceil_div(kPanel<V> * kLines, max64(turns, 1));
  float* panel = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kColumns) {
    const int64_t end = min64(n + kColumns, a.n1);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kPart, w.k - k);
      for (int64_t f = n; f < end; f += kPanel<V>) {
        const int64_t features = min64(kPanel<V>, end - f);
        source.decode(f, features, k, depth, panel);
        const bool more = k + kPart < w.k;
        const char* after = f + features < end  ? line_at(w, f + features) + line_bytes(S::kCode, k)
                            : more              ? line_at(w, n) + line_bytes(S::kCode, k + kPart)
                            : end < a.n1        ? line_at(w, end)
                            : a.next != nullptr ? static_cast<const char*>(a.next)
                                                : line_at(w, n);
        const auto fetch_of = [&](int64_t m, const float* x) {
          const int64_t first = (m - a.m0) / kTileTokens<V> * share;
          const float* next_x = more ? x + kXLine : x;
          return FetchPart{{after, stride, __builtin_ctzll(kLines)},
                           {reinterpret_cast<const char*>(next_x), X::row(a) * 4,
                            __builtin_ctzll(kXLine / 16)},
                           first, first + share, ceil_div(share, kCalls),
                           (f - n) / kPanel<V> * kCalls};
        };
        panel_tokens<V, X>(a, panel, f, features, k, depth, source.sums(f, features, k), fetch_of);
      }
      k += kPart;
    } while (k < w.k);
  }
}

// Scratch of either layout.
template <class V>
constexpr size_t kBlockBytes = size_t(kColumns / kPanel<V> * kPanelFloats<V>) * 4;

}  // namespace cpumoe::CPUMOE_NS
