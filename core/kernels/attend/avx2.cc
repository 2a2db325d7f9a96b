#include "kernels/vec/avx2_lanes.h"

namespace cpumoe::avx2 {
namespace {

// 16 fp32 lanes of the products, and how many of `left` rows share what is loaded: 12 chains of
// additions and what they need fill the 16 registers.
struct Lanes {
  struct V {
    __m256 low, high;
  };
  static constexpr int64_t kMostRows = 6;
  CPUMOE_INLINE int64_t rows(int64_t left) {  // 7 = 4 + 3, 8 = 4 + 4
    return left > 8 ? kMostRows : left > 6 ? 4 : left;
  }
  CPUMOE_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  template <Code C>
  CPUMOE_INLINE V load(const void* p, int64_t i) {
    return {load8<C>(p, i), load8<C>(p, i + 8)};
  }
  CPUMOE_INLINE V fma(const float* x, V v, V sum) {
    const __m256 a = _mm256_broadcast_ss(x);
    return {_mm256_fmadd_ps(a, v.low, sum.low), _mm256_fmadd_ps(a, v.high, sum.high)};
  }
  CPUMOE_INLINE void store(float* p, V v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
  }
};

}  // namespace
}  // namespace cpumoe::avx2

#include "kernels/attend/body.h"
