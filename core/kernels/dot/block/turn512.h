// Rows of small floats to panels of features: 16 rows are decoded at a time, 64 bytes of each,
// turned as words of 32 bits. Every code of a word then gives 16 features of one input. Included by
// ISA files with AVX-512.
#pragma once
#include <immintrin.h>

#include "formats/format.h"
#include "kernels/vec/avx2_codes.h"

namespace cpumoe::CPUMOE_NS {

constexpr int64_t kTurned = 16, kPiece = 64;  // bytes of a row
constexpr int64_t kGroups = 16;  // of the inputs of a panel, room for a register of them

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
  alignas(64) float of[kGroups][kTurned];
};
// Of rows [n, n + rows) and inputs [k, k + depth), depth > 0.
static void fill(Scales& s, const WeightView& w, int64_t n, int64_t rows, int64_t k,
                 int64_t depth) {
  const Format& f = *w.format;
  const int64_t first = k / f.scale_cols, count = (k + depth - 1) / f.scale_cols - first + 1;
  const auto load = [&](int64_t line, float* out) {
    codes::load_scales(w.scales, line, first, count, w.global_scale, out);
  };
  alignas(64) float line[kTurned][kGroups] = {};
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

// piece(i, words): inputs k + i on of rows [n, n + rows), for every kInputs of `depth`. Word w of
// a row in lane r of words[w]; zeros behind the line, any row again behind the last.
template <Code kCode, int64_t kInputs, class Piece>
CPUMOE_INLINE void turn_rows(const WeightView& w, int64_t n, int64_t rows, int64_t k,
                             int64_t depth, const Piece& piece) {
  const char* line[kTurned];
  for (int64_t r = 0; r < kTurned; ++r) line[r] = line_at(w, n + min64(r, rows - 1));
  for (int64_t i = 0; i < depth; i += kInputs) {
    const int64_t begin = line_bytes(kCode, k + i);
    const int64_t bytes = min64(kPiece, line_bytes(kCode, w.k) - begin);
    const __mmask64 there = ~uint64_t(0) >> (64 - bytes);
    __m512i v[16];
    for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(there, line[r] + begin);
    transpose16(v);
    alignas(64) __m512i words[16];  // else GCC keeps what becomes of them on the stack
    for (int r = 0; r < 16; ++r) _mm512_store_si512(words + r, v[r]);
    piece(i, words);
  }
}

}  // namespace cpumoe::CPUMOE_NS
