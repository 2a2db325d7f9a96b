// Writing packed activations (gathered tokens, tiles of the intermediate) and storing output tiles.
// Every loop has a scalar form for edges; both write the same bits.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

// Inputs [k0, k1) of one token into its line, and the zeros behind the last of `inputs`.
// src: input k0.
template <class L, class S>
CPUMOE_INLINE void write_line(float* line, int64_t k0, int64_t k1, int64_t inputs,
                              const char* src) {
  int64_t k = k0;
  const auto one = [&] {
    line[L::pos(0, k, inputs)] = load_as_float(src + (k - k0) * S::kBytes, S::kCode, 0);
  };
  for (; k < k1 && (k & 15) != 0; ++k) one();
  for (; k + 16 <= k1; k += 16) {
    const char* p = src + (k - k0) * S::kBytes;
    __m256 a = S::load8(p), b = S::load8(p + 8 * S::kBytes);
    if constexpr (L::kEvenOdd) to_even_odd(a, b);
    _mm256_storeu_ps(line + k, a);
    _mm256_storeu_ps(line + k + 8, b);
  }
  for (; k < k1; ++k) one();
  if (k1 != inputs) return;
  for (; k < round_up(inputs, 16); ++k) line[L::pos(0, k, inputs)] = 0;
}

template <class L, class S>
void pack_lines(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    write_line<L, S>(static_cast<float*>(a.dst) + L::pos(m, 0, inputs), 0, inputs, inputs,
                     static_cast<const char*>(a.src.data) + row * a.src.stride * S::kBytes);
  }
}

template <class L>
void mid_lines(const StoreMidArgs& a) {
  float* dst = static_cast<float*>(a.dst);
  for (int64_t m = a.m0; m < a.m1; ++m) {
    float* line = dst + L::pos(m, 0, a.k);
    if (a.order == TileOrder::m_major) {
      const float* tile = a.tile + (m - a.m0) * a.stride;
      write_line<L, F32>(line, a.n0, a.n1, a.k, reinterpret_cast<const char*>(tile));
      continue;
    }
    const float* tile = a.tile + (m - a.m0);
    for (int64_t n = a.n0; n < a.n1; ++n) line[L::pos(0, n, a.k)] = tile[(n - a.n0) * a.stride];
    if (a.n1 != a.k) continue;
    for (int64_t n = a.k; n < round_up(a.k, 16); ++n) line[L::pos(0, n, a.k)] = 0;
  }
}

// Inputs [k0, k1) of up to 8 tokens (null rows: zeros) into a panel. rows[i]: input k0 of token i.
template <class S>
CPUMOE_INLINE void write_panel(float* panel, int64_t k0, int64_t k1, const char* const rows[8]) {
  int64_t k = k0;
  for (; k + 8 <= k1; k += 8) {
    __m256 v[8];
    for (int i = 0; i < 8; ++i) {
      v[i] = rows[i] != nullptr ? S::load8(rows[i] + (k - k0) * S::kBytes) : _mm256_setzero_ps();
    }
    transpose8(v);
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(panel + (k + i) * 8, v[i]);
  }
  for (; k < k1; ++k) {
    for (int i = 0; i < 8; ++i) {
      panel[k * 8 + i] =
          rows[i] != nullptr ? load_as_float(rows[i] + (k - k0) * S::kBytes, S::kCode, 0) : 0;
    }
  }
}

template <class S>
void pack_panels(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; m += 8) {
    const char* rows[8];
    for (int64_t i = 0; i < 8; ++i) {
      if (m + i >= a.m) {
        rows[i] = nullptr;
        continue;
      }
      const int64_t row = a.index != nullptr ? a.index[m + i] : m + i;
      rows[i] = static_cast<const char*>(a.src.data) + row * a.src.stride * S::kBytes;
    }
    write_panel<S>(static_cast<float*>(a.dst) + Panels8::pos(m, 0, inputs), 0, inputs, rows);
  }
}

// One output row: out (+)= scale * (tile + bias), each operation rounded by itself.
CPUMOE_INLINE __m256 finish(__m256 v, const float* bias, const float* scale, const float* add) {
  if (bias != nullptr) v = _mm256_add_ps(v, _mm256_loadu_ps(bias));
  if (scale != nullptr) v = _mm256_mul_ps(v, _mm256_broadcast_ss(scale));
  if (add != nullptr) v = _mm256_add_ps(_mm256_loadu_ps(add), v);
  return v;
}
CPUMOE_INLINE float finish(float v, const float* bias, const float* scale, const float* add) {
  if (bias != nullptr) v = v + *bias;
  if (scale != nullptr) v = v * *scale;
  if (add != nullptr) v = *add + v;
  return v;
}

}  // namespace

void pack_rows(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack_lines<Rows, F32>(a);
  if (a.src.code == Code::f16) return pack_lines<Rows, F16>(a);
  pack_lines<Rows, BF16>(a);
}
void pack_rows_even_odd(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack_lines<RowsEvenOdd, F32>(a);
  if (a.src.code == Code::f16) return pack_lines<RowsEvenOdd, F16>(a);
  pack_lines<RowsEvenOdd, BF16>(a);
}
void pack_panels8(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack_panels<F32>(a);
  if (a.src.code == Code::f16) return pack_panels<F16>(a);
  pack_panels<BF16>(a);
}

void mid_rows(const StoreMidArgs& a) { mid_lines<Rows>(a); }
void mid_rows_even_odd(const StoreMidArgs& a) { mid_lines<RowsEvenOdd>(a); }

void mid_panels8(const StoreMidArgs& a) {
  float* dst = static_cast<float*>(a.dst);
  int64_t m = a.m0;
  while (m < a.m1) {
    float* panel = dst + Panels8::pos(m & ~int64_t(7), 0, a.k);
    const int64_t end = min64(a.m1, (m & ~int64_t(7)) + 8);  // tokens [m, end) of this panel
    const bool whole = (m & 7) == 0 && (end == m + 8 || end == a.m);
    const float* tile = a.tile + (m - a.m0) * (a.order == TileOrder::m_major ? a.stride : 1);
    if (whole && a.order == TileOrder::m_major) {
      const char* rows[8];
      for (int64_t i = 0; i < 8; ++i) {
        rows[i] = m + i < end ? reinterpret_cast<const char*>(tile + i * a.stride) : nullptr;
      }
      write_panel<F32>(panel, a.n0, a.n1, rows);
    } else if (whole && end == m + 8) {
      for (int64_t n = a.n0; n < a.n1; ++n) {
        _mm256_storeu_ps(panel + n * 8, _mm256_loadu_ps(tile + (n - a.n0) * a.stride));
      }
    } else {
      const int64_t step = a.order == TileOrder::m_major ? a.stride : 1;
      const int64_t line = a.order == TileOrder::m_major ? 1 : a.stride;
      for (int64_t n = a.n0; n < a.n1; ++n) {
        float* lanes = panel + n * 8;
        for (int64_t i = m; i < end; ++i) {
          lanes[i & 7] = tile[(n - a.n0) * line + (i - m) * step];
        }
        if (end != a.m) continue;
        for (int64_t i = end; i < round_up(end, 8); ++i) lanes[i & 7] = 0;
      }
    }
    m = end;
  }
}

void out_m_major(const StoreOutArgs& a) {
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* tile = a.tile + (m - a.m0) * a.stride;
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    float* out = a.out + row * a.out_stride + a.n0;
    const float* scale = a.scale != nullptr ? a.scale + m : nullptr;
    const int64_t len = a.n1 - a.n0;
    int64_t n = 0;
    for (; n + 8 <= len; n += 8) {
      const float* bias = a.bias != nullptr ? a.bias + n : nullptr;
      const float* add = a.accumulate ? out + n : nullptr;
      _mm256_storeu_ps(out + n, finish(_mm256_loadu_ps(tile + n), bias, scale, add));
    }
    for (; n < len; ++n) {
      const float* bias = a.bias != nullptr ? a.bias + n : nullptr;
      out[n] = finish(tile[n], bias, scale, a.accumulate ? out + n : nullptr);
    }
  }
}

void out_n_major(const StoreOutArgs& a) {
  const int64_t len = a.n1 - a.n0;
  for (int64_t m = a.m0; m < a.m1; m += 8) {
    const int64_t tokens = min64(8, a.m1 - m);
    const float* tile = a.tile + (m - a.m0);
    float* out[8];
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t row = a.index != nullptr ? a.index[m + i] : m + i;
      out[i] = a.out + row * a.out_stride + a.n0;
    }
    int64_t n = 0;
    for (; n + 8 <= len && tokens == 8; n += 8) {
      __m256 v[8];
      for (int i = 0; i < 8; ++i) v[i] = _mm256_loadu_ps(tile + (n + i) * a.stride);
      transpose8(v);
      for (int i = 0; i < 8; ++i) {
        const float* bias = a.bias != nullptr ? a.bias + n : nullptr;
        const float* scale = a.scale != nullptr ? a.scale + m + i : nullptr;
        const float* add = a.accumulate ? out[i] + n : nullptr;
        _mm256_storeu_ps(out[i] + n, finish(v[i], bias, scale, add));
      }
    }
    for (; n < len; ++n) {
      for (int64_t i = 0; i < tokens; ++i) {
        const float* bias = a.bias != nullptr ? a.bias + n : nullptr;
        const float* scale = a.scale != nullptr ? a.scale + m + i : nullptr;
        out[i][n] =
            finish(tile[n * a.stride + i], bias, scale, a.accumulate ? out[i] + n : nullptr);
      }
    }
  }
}

}  // namespace cpumoe::avx2
