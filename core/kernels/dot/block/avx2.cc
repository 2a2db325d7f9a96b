// Many tokens: a block of weights is decoded to fp32 once and multiplied with all tokens.
// rows:    tokens in lanes (24 of them), weights broadcast, tile n_major.
// columns: features in lanes (24 of them), activations broadcast, tile m_major.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

constexpr int64_t kDepth = 256;    // inputs per block
constexpr int64_t kRows = 96;      // features per block, rows: 96 KiB of decoded weights
constexpr int64_t kColumns = 192;  // features per block, columns: 192 KiB
constexpr int64_t kPanel = 24;     // features per decoded panel, columns

constexpr int64_t kPanelFloats = kPanel * kDepth + 16;  // the 16 keep panels apart in L1's sets

// c[r * cs + 8 p + lane] += sum over depth of lanes[p * ls + k * kLaneStep + lane] *
// scalars[r * kScalarRow + k * kScalarStep]; `first` starts from zero. P * R <= 12 accumulators.
// fetch(k) is called once every 8 steps to fetch what comes after this block.
template <int P, int R, int64_t kLaneStep, int64_t kScalarRow, int64_t kScalarStep, class Fetch>
CPUMOE_INLINE void multiply(const float* lanes, int64_t ls, const float* scalars, int64_t depth,
                            float* c, int64_t cs, bool first, const Fetch& fetch) {
  __m256 acc[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) {
      acc[r][p] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + r * cs + 8 * p);
    }
  }
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    __m256 v[P];
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) v[p] = _mm256_loadu_ps(lanes + p * ls + k * kLaneStep);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m256 s = _mm256_broadcast_ss(scalars + r * kScalarRow + k * kScalarStep);
#pragma GCC unroll 12
      for (int p = 0; p < P; ++p) acc[r][p] = _mm256_fmadd_ps(v[p], s, acc[r][p]);
    }
  };
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    fetch(k);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) step(k + i);
  }
  for (; k < depth; ++k) step(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) _mm256_store_ps(c + r * cs + 8 * p, acc[r][p]);
  }
}

// ---- rows

template <class W>
void decode_rows(const char* w, int64_t stride, int64_t rows, int64_t depth, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const char* p = w + r * stride;
    float* o = out + r * kDepth;
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) _mm256_store_ps(o + k, W::load8(p + k * W::kBytes));
    for (; k < depth; ++k) o[k] = load_as_float(p + k * W::kBytes, W::kCode, 0);
  }
}

// P panels of tokens with all rows of the block, R at a time. next: the same rows of the block to
// fetch, or null.
template <class W, int P, int R>
void rows_panels(const float* x, int64_t xs, const float* w, int64_t rows, int64_t depth, float* c,
                 int64_t cs, bool first, const char* next, int64_t stride) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    const char* from = next != nullptr ? next + r * stride : nullptr;
    // 8 inputs of every row a call: for 2-byte codes a quarter of the rows, a whole line of each.
    const auto fetch = [=](int64_t k) __attribute__((always_inline)) {
      if (from == nullptr) return;
      constexpr int kEvery = 8 / int(W::kBytes);
      const int64_t phase = (k >> 3) % kEvery, line = (k >> 3) / kEvery * 64;
#pragma GCC unroll 12
      for (int i = 0; i < R; i += kEvery) {
        _mm_prefetch(from + (i + phase) * stride + line, _MM_HINT_T1);
      }
    };
    multiply<P, R, 8, kDepth, 1>(x, xs, w + r * kDepth, depth, c + r * cs, cs, first, fetch);
  }
  const auto none = [](int64_t) {};
  for (; r < rows; ++r) {
    multiply<P, 1, 8, kDepth, 1>(x, xs, w + r * kDepth, depth, c + r * cs, cs, first, none);
  }
}

template <class W>
void rows(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Panels8::pos(8, 0, w.k);
  const char* base = static_cast<const char*>(w.data);
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    const int64_t rows = min64(kRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode_rows<W>(base + n * stride + k * W::kBytes, stride, rows, depth, block);
      const char* next = k + kDepth < w.k   ? base + n * stride + (k + kDepth) * W::kBytes
                         : n + kRows < a.n1 ? base + (n + kRows) * stride
                                            : nullptr;
      for (int64_t m = a.m0; m < a.m1; next = nullptr) {
        const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
        float* c = a.c + (n - a.n0) * a.c_stride + (m - a.m0);
        const int64_t panels = ceil_div(a.m1 - m, 8);
        const bool first = k == 0;
        if (panels == 1) {
          rows_panels<W, 1, 12>(x, xs, block, rows, depth, c, a.c_stride, first, next, stride);
          m += 8;
        } else if (panels == 2 || panels == 4) {
          rows_panels<W, 2, 6>(x, xs, block, rows, depth, c, a.c_stride, first, next, stride);
          m += 16;
        } else {
          rows_panels<W, 3, 4>(x, xs, block, rows, depth, c, a.c_stride, first, next, stride);
          m += 24;
        }
      }
      k += kDepth;
    } while (k < w.k);
  }
}

// ---- columns

// Panels of 24 features, input after input; features past the last are zero up to a multiple of 8.
template <class W>
void decode_columns(const char* w, int64_t stride, int64_t features, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; ++k) {
    const char* p = w + k * stride;
    float* o = out + k * kPanel;
    int64_t left = features;
    for (; left >= kPanel; left -= kPanel, p += kPanel * W::kBytes, o += kPanelFloats) {
      _mm256_store_ps(o, W::load8(p));
      _mm256_store_ps(o + 8, W::load8(p + 8 * W::kBytes));
      _mm256_store_ps(o + 16, W::load8(p + 16 * W::kBytes));
    }
    for (; left >= 8; left -= 8, p += 8 * W::kBytes, o += 8) _mm256_store_ps(o, W::load8(p));
    if (left == 0) continue;
    for (int64_t i = 0; i < 8; ++i) {
      o[i] = i < left ? load_as_float(p + i * W::kBytes, W::kCode, 0) : 0;
    }
  }
}

template <class W, int P>
void columns_tokens(const float* w, const float* x, int64_t tokens, int64_t depth, float* c,
                    int64_t cs, bool first, const char* next, int64_t stride) {
  const auto fetch = [=](int64_t k) __attribute__((always_inline)) {
    if (next == nullptr) return;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      _mm_prefetch(next + (k + i) * stride, _MM_HINT_T1);
      if (W::kBytes == 4) _mm_prefetch(next + (k + i) * stride + 64, _MM_HINT_T1);
    }
  };
  if (tokens >= 4) {
    multiply<P, 4, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, fetch);
  } else if (tokens == 3) {
    multiply<P, 3, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, fetch);
  } else if (tokens == 2) {
    multiply<P, 2, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, fetch);
  } else {
    multiply<P, 1, kPanel, 1, 8>(w, 8, x, depth, c, cs, first, fetch);
  }
}

template <class W>
void columns(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes;
  const char* base = static_cast<const char*>(w.data);
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kColumns) {
    const int64_t features = min64(kColumns, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode_columns<W>(base + k * stride + n * W::kBytes, stride, features, depth, block);
      const char* after = k + kDepth < w.k      ? base + (k + kDepth) * stride + n * W::kBytes
                          : n + kColumns < a.n1 ? base + (n + kColumns) * W::kBytes
                                                : nullptr;
      for (int64_t f = 0; f < features; f += kPanel) {
        const float* panel = block + f / kPanel * kPanelFloats;
        const int64_t vectors = min64(3, ceil_div(features - f, 8));
        const char* next = after != nullptr ? after + f * W::kBytes : nullptr;
        for (int64_t m = a.m0; m < a.m1; m += 4, next = nullptr) {
          const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
          float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0 + f);
          const int64_t tokens = a.m1 - m;
          const bool first = k == 0;
          if (vectors == 3) {
            columns_tokens<W, 3>(panel, x, tokens, depth, c, a.c_stride, first, next, stride);
          } else if (vectors == 2) {
            columns_tokens<W, 2>(panel, x, tokens, depth, c, a.c_stride, first, next, stride);
          } else {
            columns_tokens<W, 1>(panel, x, tokens, depth, c, a.c_stride, first, next, stride);
          }
        }
      }
      k += kDepth;
    } while (k < w.k);
  }
}

}  // namespace

void dot_block_rows_f32(const DotArgs& a) { rows<F32>(a); }
void dot_block_rows_f16(const DotArgs& a) { rows<F16>(a); }
void dot_block_rows_bf16(const DotArgs& a) { rows<BF16>(a); }
void dot_block_columns_f32(const DotArgs& a) { columns<F32>(a); }
void dot_block_columns_f16(const DotArgs& a) { columns<F16>(a); }
void dot_block_columns_bf16(const DotArgs& a) { columns<BF16>(a); }

size_t scratch_block(int64_t, int64_t, int64_t) {
  return size_t(kColumns / kPanel * kPanelFloats) * 4;
}

}  // namespace cpumoe::avx2
