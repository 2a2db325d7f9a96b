// Writing rows_scaled, rows_scaled64 and rows_scaled128.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

// One group: `count` values at x (zeros behind them up to kChunk).
template <class L>
CPUMOE_INLINE void write_group(float* line, int64_t k, int64_t count, int64_t inputs,
                               const float* x) {
  const int64_t padded = round_up(count, L::kChunk);
  __m256i amax = _mm256_setzero_si256();
  for (int64_t i = 0; i < padded; i += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_load_ps(x + i));
    amax = _mm256_max_epu32(amax, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(amax), _mm256_extracti128_si256(amax, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  const int32_t e = L::exponent(uint32_t(_mm_cvtsi128_si32(half)));
  const __m256 power = _mm256_set1_ps(L::power(e));
  const __m256i steps = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                           _mm256_set1_epi32(int(L::kStep)));
  for (int64_t i = 0; i < padded; i += 8) {
    const int64_t at = i % L::kChunk;  // lanes at % kLanes on of input at / kLanes
    const float* from = x + (i - at) + at % L::kLanes * L::kStep + at / L::kLanes;
    const __m256 v = _mm256_i32gather_ps(from, steps, 4);
    _mm256_storeu_ps(line + k + i, _mm256_mul_ps(v, power));
  }
  line[L::factor(0, k / L::kGroup, inputs)] = L::power(120 - e);
}

// Inputs [k0, k1) of a token by get(k, count, out), 8 or fewer at a time, out zero before.
template <class L, class Get>
CPUMOE_INLINE void write_scaled(float* line, int64_t k0, int64_t k1, int64_t inputs,
                                const Get& get) {
  for (int64_t k = k0; k < k1; k += L::kGroup) {
    alignas(32) float x[L::kGroup] = {};
    const int64_t count = min64(L::kGroup, k1 - k);
    for (int64_t i = 0; i < count; i += 8) get(k + i, min64(8, count - i), x + i);
    write_group<L>(line, k, count, inputs, x);
  }
  if (k1 != inputs) return;
  const int64_t end = L::factor(0, ceil_div(inputs, L::kGroup), inputs);
  for (int64_t i = end; i < L::line(inputs); ++i) line[i] = 0;
}

template <class L, class S>
void pack_scaled(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    const char* src = static_cast<const char*>(a.src.data) + row * a.src.stride * S::kBytes;
    const auto get = [src](int64_t k, int64_t count, float* out) {
      if (count == 8) return _mm256_store_ps(out, S::load8(src + k * S::kBytes));
      for (int64_t i = 0; i < count; ++i)
        out[i] = load_as_float(src + (k + i) * S::kBytes, S::kCode, 0);
    };
    float* line = static_cast<float*>(a.dst) + m * L::line(inputs);
    write_scaled<L>(line, 0, inputs, inputs, get);
  }
}

template <class L>
void pack(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack_scaled<L, F32>(a);
  if (a.src.code == Code::f16) return pack_scaled<L, F16>(a);
  pack_scaled<L, BF16>(a);
}

template <class L>
void mid(const StoreMidArgs& a) {
  const bool n_major = a.order == TileOrder::n_major;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* tile = a.tile + (m - a.m0) * (n_major ? 1 : a.stride);
    const int64_t step = n_major ? a.stride : 1;
    const auto get = [=](int64_t k, int64_t count, float* out) {
      for (int64_t i = 0; i < count; ++i) out[i] = tile[(k - a.n0 + i) * step];
    };
    write_scaled<L>(static_cast<float*>(a.dst) + m * L::line(a.k), a.n0, a.n1, a.k, get);
  }
}

}  // namespace

void pack_rows_scaled(const PackArgs& a) { pack<RowsScaled>(a); }
void pack_rows_scaled64(const PackArgs& a) { pack<RowsScaled64>(a); }
void pack_rows_scaled128(const PackArgs& a) { pack<RowsScaled128>(a); }
void mid_rows_scaled(const StoreMidArgs& a) { mid<RowsScaled>(a); }
void mid_rows_scaled64(const StoreMidArgs& a) { mid<RowsScaled64>(a); }
void mid_rows_scaled128(const StoreMidArgs& a) { mid<RowsScaled128>(a); }

}  // namespace cpumoe::avx2
