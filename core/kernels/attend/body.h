// softmax(scale Q K^T) V of one KV head, for every ISA file that has the 8 lanes of vec/avx2.h. The
// including file defines the 16 lanes of the products before, as `Lanes`. Static, so that each file
// keeps its own copy.
#pragma once
#include <immintrin.h>

#include <cfloat>

#include "kernels/attend/attend.h"
#include "kernels/vec/avx2_lanes.h"
#include "kernels/vec/math.h"

namespace cpumoe::CPUMOE_NS {
namespace {

// Up to this many rows K and V are converted in registers; beyond, once per block into scratch.
constexpr int64_t kDirectRows = 8;

// Bytes of one block of K per (panel, k) step of the V product, and the other way round.
// Prefetching one step at a time brings the next operand in just in time: 7 -> 12 GB/s from memory
// with 4 rows (Zen 4).
template <Code C>
constexpr int64_t kStep = 16 * (C == Code::f32 ? 4 : 2);

// c[MR, 16 NP] (+)= a[MR, k] b[k, 16 NP]. Serves both products: K blocks and V rows are both 16
// lanes wide, `ldb` elements from one k to the next, `panel` elements between 16-lane panels.
// `next`: when kAhead, one step of it is prefetched per panel and k.
template <int MR, int NP, Code C, bool kAhead>
CPUMOE_INLINE void tile(const float* a, int64_t lda, const void* b, int64_t ldb, int64_t b0,
                        int64_t panel, int64_t k, float* c, int64_t ldc, bool add,
                        const char* next) {
  // The unrolling is asked for: GCC keeps an array of accumulators in memory otherwise.
  Lanes::V acc[MR][NP];
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      acc[m][p] = add ? Lanes::load<Code::f32>(c, m * ldc + 16 * p) : Lanes::zero();
    }
  }
  for (int64_t i = 0; i < k; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      const Lanes::V v = Lanes::load<C>(b, b0 + i * ldb + p * panel);
      if (kAhead) _mm_prefetch(next + (p * k + i) * kStep<C>, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) acc[m][p] = Lanes::fma(a + m * lda + i, v, acc[m][p]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) Lanes::store(c + m * ldc + 16 * p, acc[m][p]);
  }
}

struct Product {
  const float* a;
  int64_t lda, rows;
  const void* b;
  int64_t ldb, panel, panels, k;
  float* c;
  int64_t ldc;
  bool add;
  const char* next;  // what the next product reads
};

template <int MR, int NP, Code C, bool kAhead>
void panels_of(const Product& s, int64_t m, int64_t p) {
  tile<MR, NP, C, kAhead>(s.a + m * s.lda, s.lda, s.b, s.ldb, p * s.panel, s.panel, s.k,
                          s.c + m * s.ldc + 16 * p, s.ldc, s.add, s.next + p * s.k * kStep<C>);
}

// One or two rows alone take several panels at once, to have eight chains of additions in flight.
template <Code C, bool kAhead>
void product(const Product& s) {
  int64_t p = 0;
  if (s.rows == 1) {
    for (; p + 4 <= s.panels; p += 4) panels_of<1, 4, C, kAhead>(s, 0, p);
  } else if (s.rows == 2) {
    for (; p + 2 <= s.panels; p += 2) panels_of<2, 2, C, kAhead>(s, 0, p);
  }
  for (; p < s.panels; ++p) {
    for (int64_t m = 0; m < s.rows;) {
      const int64_t take = Lanes::rows(s.rows - m);
      switch (take) {
        case 1:
          panels_of<1, 1, C, kAhead>(s, m, p);
          break;
        case 2:
          panels_of<2, 1, C, kAhead>(s, m, p);
          break;
        case 3:
          panels_of<3, 1, C, kAhead>(s, m, p);
          break;
        case 4:
          panels_of<4, 1, C, kAhead>(s, m, p);
          break;
        case 5:
          panels_of<5, 1, C, kAhead>(s, m, p);
          break;
        case 6:
          panels_of<6, 1, C, kAhead>(s, m, p);
          break;
        default:
          panels_of<Lanes::kMostRows, 1, C, kAhead>(s, m, p);
          break;
      }
      m += take;
    }
  }
}

// s.b read as code C: in place for few rows, else through an fp32 copy of its `count` elements.
template <Code C>
void product_any(Product s, int64_t count, float* copy) {
  if (s.rows <= kDirectRows) {
    product<C, true>(s);
    return;
  }
  if (C == Code::f32) {
    product<C, false>(s);
    return;
  }
  for (int64_t i = 0; i < count; i += 8) _mm256_storeu_ps(copy + i, load8<C>(s.b, i));
  s.b = copy;
  product<Code::f32, false>(s);
}

CPUMOE_INLINE float max_lanes(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
CPUMOE_INLINE float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// softcap * tanh(s / softcap), from tanh(z) = 2 sigmoid(2 z) - 1.
CPUMOE_INLINE __m256 cap(__m256 s, float softcap) {
  const __m256 two = _mm256_set1_ps(2.0f);
  const __m256 z = _mm256_mul_ps(s, _mm256_set1_ps(2.0f / softcap));
  const __m256 t = _mm256_sub_ps(mul_sigmoid<Vec>(two, z, _mm256_setzero_ps()), _mm256_set1_ps(1));
  return _mm256_mul_ps(t, _mm256_set1_ps(softcap));
}

// Turns one row of scores into exp(score - top); lanes outside [lo, hi) become 0. Raises *top to
// the row's new maximum and brings acc and *sum to it. An operand order of max that keeps `best`
// ignores NaN scores: exp then carries the NaN.
void softmax_row(float* s, int64_t lanes, int64_t lo, int64_t hi, float softcap, float* top,
                 float* sum, float* acc, int64_t acc_lanes) {
  if (lo >= hi) {
    for (int64_t j = 0; j < lanes; j += 8) _mm256_storeu_ps(s + j, _mm256_setzero_ps());
    return;
  }
  const __m256 none = _mm256_set1_ps(-__builtin_inff());
  __m256 best = _mm256_set1_ps(*top);
  for (int64_t j = 0; j < lanes; j += 8) {
    __m256 v = _mm256_loadu_ps(s + j);
    if (softcap > 0) v = cap(v, softcap);
    if (j < lo || j + 8 > hi) {
      const __m256i out = _mm256_or_si256(
          lane_mask(max64(lo - j, 0)),
          _mm256_xor_si256(lane_mask(min64(max64(hi - j, 0), 8)), _mm256_set1_epi32(-1)));
      v = _mm256_blendv_ps(v, none, _mm256_castsi256_ps(out));
    }
    _mm256_storeu_ps(s + j, v);
    best = _mm256_max_ps(v, best);
  }
  const float higher = max_lanes(best);
  if (higher > *top) {
    const __m256 shrink = exp<Vec>(_mm256_set1_ps(*top - higher));
    for (int64_t d = 0; d < acc_lanes; d += 8) {
      _mm256_storeu_ps(acc + d, _mm256_mul_ps(_mm256_loadu_ps(acc + d), shrink));
    }
    *sum *= _mm256_cvtss_f32(shrink);
    *top = higher;
  }
  const __m256 base = _mm256_set1_ps(*top);
  __m256 total = _mm256_setzero_ps();
  for (int64_t j = 0; j < lanes; j += 8) {
    const __m256 p = exp<Vec>(_mm256_sub_ps(_mm256_loadu_ps(s + j), base));
    _mm256_storeu_ps(s + j, p);
    total = _mm256_add_ps(total, p);
  }
  *sum += sum_lanes(total);
}

// copy[key][lanes] <- the first `dim` elements of the keys [0, 16 panels) of K blocks, as fp32; the
// lanes past them are 0. Eight keys by eight elements at a time are turned in registers.
template <Code C>
void turn_keys(const void* keys, int64_t head_dim, int64_t panels, int64_t dim, int64_t lanes,
               float* copy) {
  for (int64_t key = 0; key < panels * kKeyBlock; key += 8) {
    const int64_t from = key / kKeyBlock * kKeyBlock * head_dim + key % kKeyBlock;
    for (int64_t d = 0; d < lanes; d += 8) {
      __m256 v[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        v[i] = d + i < dim ? load8<C>(keys, from + (d + i) * kKeyBlock) : _mm256_setzero_ps();
      }
      transpose8(v);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(copy + (key + i) * lanes + d, v[i]);
    }
  }
}

// Where a call's rows live in its scratch (attend_scratch_bytes).
struct Rows {
  float *q, *acc, *scores, *copy, *top, *sum;
};

void finish(const AttendArgs& a, const Rows& w, int64_t lanes) {
  for (int64_t r = 0; r < a.tokens * a.group; ++r) {
    const float* acc = w.acc + r * lanes;
    if (a.out != nullptr) {
      float* out = a.out + r / a.group * a.out_stride + r % a.group * a.value_dim;
      const __m256 sum = _mm256_set1_ps(w.sum[r]);
      for (int64_t d = 0; d < a.value_dim; d += 8) {
        Vec::store(out + d, _mm256_div_ps(_mm256_loadu_ps(acc + d), sum), a.value_dim - d);
      }
    } else {
      float* state = a.state + r * state_stride(a.value_dim);
      for (int64_t d = 0; d < lanes; d += 8) {
        _mm256_storeu_ps(state + d, _mm256_loadu_ps(acc + d));
      }
      state[lanes] = w.top[r];
      state[lanes + 1] = w.sum[r];
    }
  }
}

template <Code C>
void attend(const AttendArgs& a) {
  constexpr int64_t kBytes = C == Code::f32 ? 4 : 2;
  const int64_t rows = a.tokens * a.group, q_lanes = value_stride(a.head_dim);
  const int64_t lanes = value_stride(a.value_dim);
  Rows w;
  w.q = static_cast<float*>(a.scratch);
  w.acc = w.q + rows * q_lanes;
  w.scores = w.acc + rows * lanes;
  w.copy = w.scores + rows * kScoreBlock;
  w.top = w.copy + kScoreBlock * max64(q_lanes, lanes);
  w.sum = w.top + round_up(rows, 16);

  const __m256 scale = _mm256_set1_ps(a.scale);
  for (int64_t r = 0; r < rows; ++r) {
    const float* q = a.q + r / a.group * a.q_stride + r % a.group * a.head_dim;
    for (int64_t d = 0; d < q_lanes; d += 8) {
      const int64_t n = max64(a.head_dim - d, 0);
      _mm256_storeu_ps(w.q + r * q_lanes + d, _mm256_mul_ps(Vec::load(q + d, n), scale));
    }
    for (int64_t d = 0; d < lanes; d += 8) {
      _mm256_storeu_ps(w.acc + r * lanes + d, _mm256_setzero_ps());
    }
    w.top[r] = a.sinks != nullptr ? a.sinks[r % a.group] : -FLT_MAX;
    w.sum[r] = a.sinks != nullptr ? 1.0f : 0.0f;
  }

  const char* keys = static_cast<const char*>(a.k_cache);
  const char* values = static_cast<const char*>(a.v_cache);
  const bool shared = values == nullptr;
  const auto keys_at = [&](int64_t l) {
    return keys + slab_shift(a.slabs, l) + within_slab(a.slabs, l) * a.head_dim * kBytes;
  };
  const int64_t end = min64(a.key1, a.position + a.tokens);
  for (int64_t block = a.key0; block < end; block += kScoreBlock) {
    if (a.window > 0 && block + kScoreBlock <= a.position - a.window + 1) continue;
    const int64_t count = min64(kScoreBlock, end - block);
    const int64_t panels = ceil_div(count, kKeyBlock), panel = kKeyBlock * a.head_dim;
    const char* const key = keys_at(block);
    // Shared: V's product reads the turned copy; what comes next from memory is the next K block.
    const char* const value = shared ? keys_at(block + kScoreBlock)
                                     : values + slab_shift(a.slabs, block) +
                                           within_slab(a.slabs, block) * lanes * kBytes;
    product_any<C>({w.q, q_lanes, rows, key, kKeyBlock, panel, panels, a.head_dim, w.scores,
                    kScoreBlock, false, value},
                   panels * panel, w.copy);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t last = a.position + r / a.group;
      const int64_t hi = min64(count, last + 1 - block);
      const int64_t lo = a.window > 0 ? max64(last - a.window + 1 - block, 0) : 0;
      softmax_row(w.scores + r * kScoreBlock, panels * kKeyBlock, lo, hi, a.softcap, w.top + r,
                  w.sum + r, w.acc + r * lanes, lanes);
    }
    const bool ends = block + kScoreBlock >= end && a.next != nullptr;
    const char* const after =
        ends ? static_cast<const char*>(a.next) : keys_at(block + kScoreBlock);
    Product weighted{w.scores, kScoreBlock, rows,  value, lanes, 16,
                     lanes / 16, count,     w.acc, lanes, true,  after};
    if (shared) {
      turn_keys<C>(key, a.head_dim, panels, a.value_dim, lanes, w.copy);
      weighted.b = w.copy;
      product<Code::f32, false>(weighted);
    } else {
      product_any<C>(weighted, count * lanes, w.copy);
    }
  }
  finish(a, w, lanes);
}

// The first n (1..8) elements of code C at `p`, `kKeyBlock` apart.
template <Code C>
CPUMOE_INLINE void scatter(void* p, int64_t i, __m256 v, int64_t n) {
  if constexpr (C == Code::f32) {
    alignas(32) float e[8];
    _mm256_store_ps(e, v);
    for (int64_t j = 0; j < n; ++j) static_cast<float*>(p)[i + j * kKeyBlock] = e[j];
  } else {
    alignas(16) uint16_t e[8];
    store_lanes<C>(e, 0, v, 8);
    for (int64_t j = 0; j < n; ++j) static_cast<uint16_t*>(p)[i + j * kKeyBlock] = e[j];
  }
}

template <Code C>
void append(const AppendArgs& a) {
  const int64_t lanes = value_stride(a.value_dim);
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int64_t l = within_slab(a.slabs, a.position + t);
    const int64_t shift = slab_shift(a.slabs, a.position + t);
    const int64_t key = l / kKeyBlock * kKeyBlock * a.head_dim + l % kKeyBlock;
    char* const k_cache = static_cast<char*>(a.k_cache) + shift;
    for (int64_t d = 0; d < a.head_dim; d += 8) {
      const int64_t n = min64(a.head_dim - d, 8);
      scatter<C>(k_cache, key + d * kKeyBlock, Vec::load(a.k + t * a.stride + d, n), n);
    }
    for (int64_t d = 0; a.v != nullptr && d < a.value_dim; d += 8) {
      const int64_t n = min64(a.value_dim - d, 8);
      store_lanes<C>(static_cast<char*>(a.v_cache) + shift, l * lanes + d,
                     Vec::load(a.v + t * a.stride + d, n), n);
    }
  }
}

}  // namespace

void attend_f32(const AttendArgs& a) { attend<Code::f32>(a); }
void attend_f16(const AttendArgs& a) { attend<Code::f16>(a); }
void attend_bf16(const AttendArgs& a) { attend<Code::bf16>(a); }
void append_f32(const AppendArgs& a) { append<Code::f32>(a); }
void append_f16(const AppendArgs& a) { append<Code::f16>(a); }
void append_bf16(const AppendArgs& a) { append<Code::bf16>(a); }

}  // namespace cpumoe::CPUMOE_NS
