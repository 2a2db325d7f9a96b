#include "kernels/vec/avx2_lanes.h"

namespace cpumoe::avx512 {
namespace {

// 16 fp32 lanes of the products, and how many of `left` rows share what is loaded: the 8 query
// heads of a KV head meet each key converted once.
struct Lanes {
  using V = __m512;
  static constexpr int64_t kMostRows = 8;
  CPUMOE_INLINE int64_t rows(int64_t left) { return left > 8 ? kMostRows : left == 7 ? 4 : left; }
  CPUMOE_INLINE V zero() { return _mm512_setzero_ps(); }
  template <Code C>
  CPUMOE_INLINE V load(const void* p, int64_t i) {
    const char* at = static_cast<const char*>(p) + i * (C == Code::f32 ? 4 : 2);
    if constexpr (C == Code::f32) return _mm512_loadu_ps(at);
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (C == Code::f16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  CPUMOE_INLINE V fma(const float* x, V v, V sum) {
    return _mm512_fmadd_ps(_mm512_set1_ps(*x), v, sum);
  }
  CPUMOE_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
};

}  // namespace
}  // namespace cpumoe::avx512

#include "kernels/attend/body.h"
