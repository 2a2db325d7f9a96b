// Many tokens, rows of e4m3, class bf16: pairs of inputs in every lane. Scales meet the sums of 128
// products, one for each of 16 features.
#include "kernels/dot/block/tiles.h"
#include "kernels/dot/block/turn512.h"
#include "kernels/dot/dot.h"
#include "kernels/dot/small_floats/pairs512.h"

namespace cpumoe::avx512_bf16 {
namespace {

using V = Pairs16;
using Codes = small_floats::E4m3Pairs<false>;

// Pairs of bf16_rows as floats.
struct RowX {
  static constexpr int64_t kRow = 0, kStep = 1, kInputs = 2;
  CPUMOE_INLINE const float* at(const DotArgs& a, int64_t m, int64_t k) {
    return static_cast<const float*>(a.act) + m * row(a) + k / 2;
  }
  CPUMOE_INLINE int64_t row(const DotArgs& a) { return Bf16Rows::line(a.w->k) / 2; }
};

struct ScaledSums {
  bool first;
  V::F scale[3];
  __attribute__((always_inline)) V::F start(const float*) const { return V::zero(); }
  __attribute__((always_inline)) void put(float* c, V::F sum, int p) const {
    V::store(c, first ? _mm512_mul_ps(sum, scale[p]) : V::fma(sum, scale[p], V::load(c)));
  }
};

struct Source {
  static constexpr Code kCode = Code::e4m3;
  using X = RowX;
  const WeightView& w;
  void decode(int64_t n, int64_t features, int64_t k, int64_t depth, float* panel) const {
    if (depth == 0) return;
    for (int64_t f = 0; f < features; f += kTurned) {
      const int64_t rows = min64(kTurned, features - f);
      turn_rows<kCode, Codes::kInputs>(
          w, n + f, rows, k, depth, [&](int64_t i, const __m512i* words) {
            float* out = columns_at<V>(panel, f, i / 2);
            for (int j = 0; j < 16; ++j, out += 2 * kPanel<V>) {
              const Codes::Bits bits = Codes::bits(_mm512_load_si512(words + j));
              _mm512_store_ps(out, Codes::vector<0>(bits));
              _mm512_store_ps(out + kPanel<V>, Codes::vector<1>(bits));
            }
          });
    }
  }
  ScaledSums sums(int64_t n, int64_t features, int64_t k) const {
    ScaledSums s{k == 0, {V::zero(), V::zero(), V::zero()}};
    if (k == w.k) return s;
    for (int64_t f = 0; f < features; f += kTurned) {
      Scales scales;
      fill(scales, w, n + f, min64(kTurned, features - f), k, 1);
      s.scale[f / kTurned] = _mm512_load_ps(scales.of[0]);
    }
    return s;
  }
};

}  // namespace

void dot_block_rows_e4m3(const DotArgs& a) { block_panels<V>(a, Source{*a.w}); }
size_t scratch_block(int64_t, int64_t, int64_t) { return size_t(kPanelFloats<V>) * 4; }

}  // namespace cpumoe::avx512_bf16
