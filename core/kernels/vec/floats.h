// Registers of fp32 lanes by width, for templates that are written once for all. Included by ISA
// files only; Floats16 and Pairs16 exist where the flags have AVX-512 and its bf16.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::CPUMOE_NS {

struct Floats8 {
  using F = __m256;
  static constexpr int64_t kLanes = 8;
  CPUMOE_INLINE F zero() { return _mm256_setzero_ps(); }
  CPUMOE_INLINE F broadcast(float v) { return _mm256_set1_ps(v); }
  CPUMOE_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  CPUMOE_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  CPUMOE_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  CPUMOE_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  CPUMOE_INLINE F products(F w, F x, F sum) { return fma(w, x, sum); }
  CPUMOE_INLINE float sum(F v) { return sum8(v); }
  // Keeps the compiler from loading v again for each of its uses.
  CPUMOE_INLINE void keep(F& v) { __asm__("" : "+x"(v)); }
};

#ifdef __AVX512F__
struct Floats16 {
  using F = __m512;
  static constexpr int64_t kLanes = 16;
  CPUMOE_INLINE F zero() { return _mm512_setzero_ps(); }
  CPUMOE_INLINE F broadcast(float v) { return _mm512_set1_ps(v); }
  CPUMOE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  CPUMOE_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  CPUMOE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  CPUMOE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  CPUMOE_INLINE F products(F w, F x, F sum) { return fma(w, x, sum); }
  CPUMOE_INLINE float sum(F v) {
    return sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  CPUMOE_INLINE void keep(F& v) { __asm__("" : "+v"(v)); }
};
#endif
#ifdef __AVX512BF16__
// Lanes are sums; weights and activations come as pairs of bf16 in one lane.
struct Pairs16 : Floats16 {
  CPUMOE_INLINE F products(F w, F x, F sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
  }
};
#endif

// Calls f with subnormals as numbers: a caller that lives with them as zeros gets that back after.
template <class Function>
CPUMOE_INLINE void with_subnormals(const Function& f) {
  constexpr unsigned kFlushes = 0x8040u;
  const unsigned control = _mm_getcsr();
  if ((control & kFlushes) != 0) _mm_setcsr(control & ~kFlushes);
  f();
  if ((control & kFlushes) != 0) _mm_setcsr(control);
}

}  // namespace cpumoe::CPUMOE_NS
