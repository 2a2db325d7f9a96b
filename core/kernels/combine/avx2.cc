#include "kernels/combine/combine.h"
#include "kernels/vec/avx2_lanes.h"

namespace cpumoe::avx2 {

// Elements i..i + n - 1 of p, n in 1..8; lanes past n are zero.
template <Code C>
CPUMOE_INLINE __m256 load_lanes(const void* p, int64_t i, int64_t n) {
  if (n >= 8) return load8<C>(p, i);
  constexpr int64_t kSize = C == Code::f32 ? 4 : 2;
  alignas(32) char bytes[32] = {};
  memcpy(bytes, static_cast<const char*>(p) + i * kSize, size_t(n * kSize));
  return load8<C>(bytes, 0);
}

template <Code C>
static void combine_as(const CombineArgs& a) {
  // Four vectors at a time: each row is met in runs of two cache lines.
  for (int64_t i = 0; i < a.len; i += 32) {
    __m256 sum[4];
    int64_t n[4];
    for (int64_t v = 0; v < 4; ++v) {
      n[v] = max64(0, min64(8, a.len - i - v * 8));
      sum[v] =
          a.accumulate && n[v] > 0 ? load_lanes<C>(a.out, i + v * 8, n[v]) : _mm256_setzero_ps();
    }
    for (int64_t r = 0; r < a.count; ++r) {
      const float* row = a.rows + (a.index ? a.index[r] : r) * a.row_stride + i;
      for (int64_t v = 0; v < 4; ++v) {
        if (n[v] > 0) sum[v] = _mm256_add_ps(sum[v], Vec::load(row + v * 8, n[v]));
      }
    }
    for (int64_t v = 0; v < 4; ++v) {
      if (n[v] > 0) store_lanes<C>(a.out, i + v * 8, sum[v], n[v]);
    }
  }
}

void combine(const CombineArgs& a) {
  if (a.out_code == Code::f32) return combine_as<Code::f32>(a);
  if (a.out_code == Code::f16) return combine_as<Code::f16>(a);
  combine_as<Code::bf16>(a);
}

}  // namespace cpumoe::avx2
