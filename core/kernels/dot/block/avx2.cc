// Many tokens, 16- and 32-bit weights.
#include "kernels/dot/block/tiles.h"
#include "kernels/dot/dot.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

using V = Floats8;

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

template <class W>
struct FetchRows {
  const char* from;
  int64_t stride;
  FetchRows(const WeightView& w, int64_t n, int64_t k)
      : from(n < 0 ? nullptr : static_cast<const char*>(w.data) + (n * w.stride + k) * W::kBytes),
        stride(w.stride * W::kBytes) {}
  // 8 inputs of every row a call: for 2-byte codes a quarter of the rows, a whole line of each.
  // Inlined, as GCC drops calls of functions that do nothing but prefetch.
  template <int R>
  __attribute__((always_inline)) void rows(int64_t r, int64_t k) const {
    if (from == nullptr) return;
    constexpr int kEvery = 8 / int(W::kBytes);
    const int64_t phase = (k >> 3) % kEvery, line = (k >> 3) / kEvery * 64;
#pragma GCC unroll 12
    for (int i = 0; i < R; i += kEvery) {
      _mm_prefetch(from + (r + i + phase) * stride + line, _MM_HINT_T1);
    }
  }
};

template <class W>
void rows(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes;
  const char* base = static_cast<const char*>(w.data);
  block_rows<FetchRows<W>>(a, [&](int64_t n, int64_t rows, int64_t k, int64_t depth, float* out) {
    decode_rows<W>(base + n * stride + k * W::kBytes, stride, rows, depth, out);
  });
}

template <class W>
void decode_columns(const char* w, int64_t stride, int64_t features, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; ++k) {
    const char* p = w + k * stride;
    float* o = columns_at<V>(out, 0, k);
    int64_t left = features;
    for (; left >= kPanel<V>; left -= kPanel<V>, p += kPanel<V> * W::kBytes, o += kPanelFloats<V>) {
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

template <class W>
struct FetchColumns {
  const char* from;
  int64_t stride;
  FetchColumns(const WeightView& w, int64_t n, int64_t k)
      : from(n < 0 ? nullptr : static_cast<const char*>(w.data) + (k * w.stride + n) * W::kBytes),
        stride(w.stride * W::kBytes) {}
  __attribute__((always_inline)) void panel(int64_t f, int64_t k) const {
    if (from == nullptr) return;
    const char* p = from + f * W::kBytes + k * stride;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      _mm_prefetch(p + i * stride, _MM_HINT_T1);
      if (W::kBytes == 4) _mm_prefetch(p + i * stride + 64, _MM_HINT_T1);
    }
  }
};

template <class W>
void columns(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t stride = w.stride * W::kBytes;
  const char* base = static_cast<const char*>(w.data);
  block_columns<V, FetchColumns<W>>(
      a, [&](int64_t n, int64_t features, int64_t k, int64_t depth, float* out) {
        decode_columns<W>(base + k * stride + n * W::kBytes, stride, features, depth, out);
      });
}

}  // namespace

void dot_block_rows_f32(const DotArgs& a) { rows<F32>(a); }
void dot_block_rows_f16(const DotArgs& a) { rows<F16>(a); }
void dot_block_rows_bf16(const DotArgs& a) { rows<BF16>(a); }
void dot_block_columns_f32(const DotArgs& a) { columns<F32>(a); }
void dot_block_columns_f16(const DotArgs& a) { columns<F16>(a); }
void dot_block_columns_bf16(const DotArgs& a) { columns<BF16>(a); }

size_t scratch_block(int64_t, int64_t, int64_t) { return kBlockBytes<V>; }

}  // namespace cpumoe::avx2
