// Many tokens: a block of weights is decoded to fp32 once and multiplied with all tokens.
// rows:    tokens in lanes (24 of them), weights broadcast, tile n_major.
// columns: features in lanes (24 of them), activations broadcast, tile m_major.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/codes_avx2.h"

namespace cpumoe::avx2 {
namespace {

constexpr int64_t kDepth = 256;     // inputs per block
constexpr int64_t kRows = 96;       // features per block, rows: 96 KiB of decoded weights
constexpr int64_t kColumns = 192;   // features per block, columns: 192 KiB
constexpr int64_t kPanel = 24;      // features per decoded panel, columns

// c[r * cs + 8 p + lane] += sum over depth of lanes[p * ls + k * kLaneStep + lane] *
// scalars[r * kScalarRow + k * kScalarStep]; `first` starts from zero. P * R <= 12 accumulators.
template <int P, int R, int64_t kLaneStep, int64_t kScalarRow, int64_t kScalarStep>
void multiply(const float* lanes, int64_t ls, const float* scalars, int64_t depth, float* c,
              int64_t cs, bool first) {
  __m256 acc[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      acc[r][p] = first ? _mm256_setzero_ps() : _mm256_load_ps(c + r * cs + 8 * p);
    }
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    __m256 v[P];
    for (int p = 0; p < P; ++p) v[p] = _mm256_loadu_ps(lanes + p * ls + k * kLaneStep);
    for (int r = 0; r < R; ++r) {
      const __m256 s = _mm256_broadcast_ss(scalars + r * kScalarRow + k * kScalarStep);
      for (int p = 0; p < P; ++p) acc[r][p] = _mm256_fmadd_ps(v[p], s, acc[r][p]);
    }
  }
  for (int r = 0; r < R; ++r) {
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

// P panels of tokens with all rows of the block, R at a time.
template <int P, int R>
void rows_panels(const float* x, int64_t xs, const float* w, int64_t rows, int64_t depth, float* c,
                 int64_t cs, bool first) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    multiply<P, R, 8, kDepth, 1>(x, xs, w + r * kDepth, depth, c + r * cs, cs, first);
  }
  for (; r < rows; ++r) {
    multiply<P, 1, 8, kDepth, 1>(x, xs, w + r * kDepth, depth, c + r * cs, cs, first);
  }
}

template <class W>
void rows(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes, xs = Panels8::pos(8, 0, w.k);
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kRows) {
    const int64_t rows = min64(kRows, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode_rows<W>(static_cast<const char*>(w.data) + n * stride + k * W::kBytes, stride, rows,
                     depth, block);
      for (int64_t m = a.m0; m < a.m1;) {
        const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
        float* c = a.c + (n - a.n0) * a.c_stride + (m - a.m0);
        const int64_t panels = ceil_div(a.m1 - m, 8);
        if (panels == 1) {
          rows_panels<1, 12>(x, xs, block, rows, depth, c, a.c_stride, k == 0), m += 8;
        } else if (panels == 2 || panels == 4) {
          rows_panels<2, 6>(x, xs, block, rows, depth, c, a.c_stride, k == 0), m += 16;
        } else {
          rows_panels<3, 4>(x, xs, block, rows, depth, c, a.c_stride, k == 0), m += 24;
        }
      }
      k += kDepth;
    } while (k < w.k);
  }
}

// ---- columns

// Panels of 24 features, input after input; features past the last are zero.
template <class W>
void decode_columns(const char* w, int64_t stride, int64_t features, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; ++k) {
    const char* p = w + k * stride;
    int64_t f = 0;
    const auto place = [&] { return out + (f / kPanel) * kPanel * kDepth + k * kPanel + f % kPanel; };
    for (; f + 8 <= features; f += 8) _mm256_store_ps(place(), W::load8(p + f * W::kBytes));
    for (; f < features; ++f) *place() = load_as_float(p + f * W::kBytes, W::kCode, 0);
    for (; f % 8 != 0; ++f) *place() = 0;
  }
}

template <int P>
void columns_tokens(const float* w, const float* x, int64_t tokens, int64_t depth, float* c,
                    int64_t cs, bool first) {
  if (tokens >= 4) return multiply<P, 4, kPanel, 1, 8>(w, 8, x, depth, c, cs, first);
  if (tokens == 3) return multiply<P, 3, kPanel, 1, 8>(w, 8, x, depth, c, cs, first);
  if (tokens == 2) return multiply<P, 2, kPanel, 1, 8>(w, 8, x, depth, c, cs, first);
  multiply<P, 1, kPanel, 1, 8>(w, 8, x, depth, c, cs, first);
}

template <class W>
void columns(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes;
  float* block = static_cast<float*>(a.scratch);
  for (int64_t n = a.n0; n < a.n1; n += kColumns) {
    const int64_t features = min64(kColumns, a.n1 - n);
    int64_t k = 0;
    do {
      const int64_t depth = min64(kDepth, w.k - k);
      decode_columns<W>(static_cast<const char*>(w.data) + k * stride + n * W::kBytes, stride,
                        features, depth, block);
      for (int64_t f = 0; f < features; f += kPanel) {
        const float* panel = block + f * kDepth;
        const int64_t vectors = min64(3, ceil_div(features - f, 8));
        for (int64_t m = a.m0; m < a.m1; m += 4) {
          const float* x = static_cast<const float*>(a.act) + Panels8::pos(m, k, w.k);
          float* c = a.c + (m - a.m0) * a.c_stride + (n - a.n0 + f);
          const int64_t tokens = a.m1 - m;
          if (vectors == 3) {
            columns_tokens<3>(panel, x, tokens, depth, c, a.c_stride, k == 0);
          } else if (vectors == 2) {
            columns_tokens<2>(panel, x, tokens, depth, c, a.c_stride, k == 0);
          } else {
            columns_tokens<1>(panel, x, tokens, depth, c, a.c_stride, k == 0);
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

size_t scratch_block(int64_t, int64_t, int64_t) { return size_t(kColumns * kDepth) * 4; }

}  // namespace cpumoe::avx2
