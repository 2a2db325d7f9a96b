// Many tokens, rows of small floats, class fp32.
#include "kernels/dot/block/tiles.h"
#include "kernels/dot/block/turn512.h"
#include "kernels/dot/dot.h"
#include "kernels/dot/small_floats/codes512.h"

namespace cpumoe::avx512 {
namespace {

using V = Floats16;
using small_floats::E2m1Codes;
using small_floats::E4m3Codes;

// A piece of 16 rows, scaled.
template <class D, int64_t kSize, bool kTwice>
__attribute__((noinline)) static void put_codes(const __m512i* words,
                                                const float (*scales)[kTurned], float* out) {
  constexpr int kPer = int(D::kInputs / 16);  // codes of a word
  const __m512 unit = _mm512_set1_ps(0x1p120f);
  for (int i = 0; i < 16; ++i, out += kPer * kPanel<V>) {
    const typename D::Bits bits = D::bits(_mm512_load_si512(words + i));
    __m512 scale = _mm512_load_ps(scales[i * kPer / kSize]);
    if (!kTwice) scale = _mm512_mul_ps(scale, unit);
    const auto put = [&]<int J>() __attribute__((always_inline)) {
      __m512 x = D::template vector<J>(bits);
      if (kTwice) x = _mm512_mul_ps(x, unit);
      _mm512_store_ps(out + J * kPanel<V>, _mm512_mul_ps(x, scale));
    };
    put.template operator()<0>();
    put.template operator()<1>();
    put.template operator()<2>();
    put.template operator()<3>();
    if constexpr (kPer == 8) {
      put.template operator()<4>();
      put.template operator()<5>();
      put.template operator()<6>();
      put.template operator()<7>();
    }
  }
}

// Rows [n, n + rows) and inputs [k, k + depth) to a panel from `out` on.
template <class D, int64_t kSize>
static void decode16(const WeightView& w, int64_t n, int64_t rows, int64_t k, int64_t depth,
                     float* out) {
  Scales scales;
  fill(scales, w, n, rows, k, depth);
  typename D::Nan nan;
  turn_rows<D::kCode, D::kInputs>(w, n, rows, k, depth, [&](int64_t i, const __m512i* words) {
    for (int j = 0; j < 16; ++j) D::look(_mm512_load_si512(words + j), nan);
    const float(*s)[kTurned] = scales.of + i / w.format->scale_cols;
    bool twice = false;
    for (int64_t g = 0; g < D::kInputs / kSize; ++g) {
      const __m512 a = _mm512_abs_ps(_mm512_load_ps(s[g]));
      twice |= _mm512_cmp_ps_mask(a, _mm512_set1_ps(64), _CMP_GE_OQ) != 0;
    }
    if (twice) {
      put_codes<D, kSize, true>(words, s, out + i * kPanel<V>);
    } else {
      put_codes<D, kSize, false>(words, s, out + i * kPanel<V>);
    }
  });
  _mm512_mask_storeu_ps(out, D::lanes(nan), _mm512_set1_ps(bits_to_float(0x7fc00000u)));
}

template <class D, int64_t kSize>
struct Source {
  static constexpr Code kCode = D::kCode;
  using X = PanelX;
  const WeightView& w;
  void decode(int64_t n, int64_t features, int64_t k, int64_t depth, float* panel) const {
    if (depth == 0) return;
    for (int64_t f = 0; f < features; f += kTurned) {
      decode16<D, kSize>(w, n + f, min64(kTurned, features - f), k, depth,
                         columns_at<V>(panel, f, 0));
    }
  }
  Sums<V> sums(int64_t, int64_t, int64_t k) const { return {k == 0}; }
};

template <class D, int64_t kSize>
void rows(const DotArgs& a) {
  with_subnormals([&] { block_panels<V>(a, Source<D, kSize>{*a.w}); });
}

}  // namespace

void dot_block_rows_e4m3(const DotArgs& a) { rows<E4m3Codes, 64>(a); }
void dot_block_rows_e2m1(const DotArgs& a) {
  if (a.w->format->scale_cols == 16) return rows<E2m1Codes, 16>(a);
  rows<E2m1Codes, 32>(a);
}
size_t scratch_block(int64_t, int64_t, int64_t) { return size_t(kPanelFloats<V>) * 4; }

}  // namespace cpumoe::avx512
