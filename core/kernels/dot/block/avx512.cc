// Many tokens, rows of small floats. 16 rows are decoded at a time, 64 bytes of each: turned as
// words of 32 bits, every code of a word then gives 16 features of one input.
#include "kernels/dot/block/tiles.h"
#include "kernels/dot/dot.h"
#include "kernels/dot/small_floats/codes512.h"
#include "kernels/vec/avx2_codes.h"

namespace cpumoe::avx512 {
namespace {

using V = Floats16;
using small_floats::E2m1Codes;
using small_floats::E4m3Codes;

constexpr int64_t kRows = 16, kPiece = 64;  // bytes of a row
constexpr int64_t kGroups = 16;             // of kPart inputs, room for a register of them

// v[j] word i = v[i] word j.
CPUMOE_INLINE void transpose16(__m512i v[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // rows 0..7 and 8..15: quarters 0, 2 and 1, 3
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Scales of 16 rows: of[g] those of group g of the block.
struct Scales {
  alignas(64) float of[kGroups][kRows];
};
static void fill(Scales& s, const WeightView& w, int64_t n, int64_t rows, int64_t k,
                 int64_t depth) {
  const Format& f = *w.format;
  const int64_t first = k / f.scale_cols, count = (k + depth - 1) / f.scale_cols - first + 1;
  const auto load = [&](int64_t line, float* out) {
    codes::load_scales(w.scales, line, first, count, w.global_scale, out);
  };
  alignas(64) float line[kRows][kGroups] = {};
  if (f.scale_rows != 1) {  // n is a multiple of 16
    load(n / f.scale_rows, line[0]);
    for (int64_t g = 0; g < count; ++g) _mm512_store_ps(s.of[g], _mm512_set1_ps(line[0][g]));
    return;
  }
  for (int64_t r = 0; r < rows; ++r) load(n + r, line[r]);
  __m512i v[16];
  for (int r = 0; r < 16; ++r) v[r] = _mm512_load_si512(line[r]);
  transpose16(v);
  for (int g = 0; g < 16; ++g) _mm512_store_si512(s.of[g], v[g]);
}

// A piece of 16 rows, scaled.
template <class D, int64_t kSize, bool kTwice>
__attribute__((noinline)) static void put_codes(const __m512i* words, const float (*scales)[kRows],
                                                float* out) {
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
  const char* line[kRows];
  for (int64_t r = 0; r < kRows; ++r) line[r] = line_at(w, n + min64(r, rows - 1));
  typename D::Nan nan;
  for (int64_t i = 0; i < depth; i += D::kInputs) {
    const int64_t begin = line_bytes(D::kCode, k + i);
    const int64_t bytes = min64(kPiece, line_bytes(D::kCode, w.k) - begin);
    const __mmask64 there = ~uint64_t(0) >> (64 - bytes);
    __m512i v[16];
    for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(there, line[r] + begin);
    transpose16(v);
    alignas(64) __m512i words[16];
    for (int r = 0; r < 16; ++r) {
      D::look(v[r], nan);
      _mm512_store_si512(words + r, v[r]);
    }
    const float(*s)[kRows] = scales.of + i / w.format->scale_cols;
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
  }
  _mm512_mask_storeu_ps(out, D::lanes(nan), _mm512_set1_ps(bits_to_float(0x7fc00000u)));
}

template <class D, int64_t kSize>
void rows(const DotArgs& a) {
  with_subnormals([&] {
    block_panels<V, D::kCode>(
        a, [&](int64_t n, int64_t features, int64_t k, int64_t depth, float* panel) {
          if (depth == 0) return;
          for (int64_t f = 0; f < features; f += kRows) {
            decode16<D, kSize>(*a.w, n + f, min64(kRows, features - f), k, depth,
                               columns_at<V>(panel, f, 0));
          }
        });
  });
}

}  // namespace

void dot_block_rows_e4m3(const DotArgs& a) { rows<E4m3Codes, 64>(a); }
void dot_block_rows_e2m1(const DotArgs& a) {
  if (a.w->format->scale_cols == 16) return rows<E2m1Codes, 16>(a);
  rows<E2m1Codes, 32>(a);
}
size_t scratch_block(int64_t, int64_t, int64_t) { return size_t(kPanelFloats<V>) * 4; }

}  // namespace cpumoe::avx512
