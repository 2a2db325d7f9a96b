// Plain quantised codes to fp32, eight at a time, and their scales and zero points. What
// decode_line (formats/format.h) computes, bit for bit, but for the sign of a zero and the payload
// of a NaN.
// Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "formats/format.h"

namespace cpumoe::CPUMOE_NS::codes {

// Every code offers
//   kBytes8             bytes of 8 elements
//   load8(p, line)      8 elements in order, as numbers; `line` of a block that spans several
CPUMOE_INLINE __m128i load_low8(const char* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
CPUMOE_INLINE __m256i spread_bits(uint32_t bits, __m256i shifts, int mask) {
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(bits)), shifts),
                          _mm256_set1_epi32(mask));
}
CPUMOE_INLINE __m256i shifts_of(int step) {
  return _mm256_setr_epi32(0, step, 2 * step, 3 * step, 4 * step, 5 * step, 6 * step, 7 * step);
}
template <class T>
CPUMOE_INLINE T load_bits(const char* p) {
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}

struct S8 {
  static constexpr Code kCode = Code::s8;
  static constexpr int64_t kBytes8 = 8;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_low8(p)));
  }
};
struct U8 {
  static constexpr Code kCode = Code::u8;
  static constexpr int64_t kBytes8 = 8;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_low8(p)));
  }
};
struct U4 {
  static constexpr Code kCode = Code::u4;
  static constexpr int64_t kBytes8 = 4;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    return _mm256_cvtepi32_ps(spread_bits(load_bits<uint32_t>(p), shifts_of(4), 15));
  }
};
struct U3 {
  static constexpr Code kCode = Code::u3;
  static constexpr int64_t kBytes8 = 3;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    const uint32_t bits = load_bits<uint16_t>(p) | uint32_t(uint8_t(p[2])) << 16;
    return _mm256_cvtepi32_ps(spread_bits(bits, shifts_of(3), 7));
  }
};
struct U2 {
  static constexpr Code kCode = Code::u2;
  static constexpr int64_t kBytes8 = 2;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    return _mm256_cvtepi32_ps(spread_bits(load_bits<uint16_t>(p), shifts_of(2), 3));
  }
};
struct E2M1 {
  static constexpr Code kCode = Code::e2m1;
  static constexpr int64_t kBytes8 = 4;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i u = _mm256_srlv_epi32(_mm256_set1_epi32(load_bits<int32_t>(p)), shifts_of(4));
    const __m256 sign =
        _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(u, 28)), _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, u), sign);  // takes three bits of u
  }
};
// fp16 bits of the value times 2^-8; NaN codes (0x7f, 0xff) become +-480.
CPUMOE_INLINE __m128i e4m3_to_half_bits(__m128i bytes) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  return _mm_and_si128(wide, _mm_set1_epi16(int16_t(0xbf80)));
}
struct E4M3 {
  static constexpr Code kCode = Code::e4m3;
  static constexpr int64_t kBytes8 = 8;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    const __m128i half = e4m3_to_half_bits(load_low8(p));
    const __m256 v = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256));
    const __m128i largest = _mm_set1_epi16(0x3f80);
    const __m256i nan =
        _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(_mm_and_si128(half, largest), largest));
    return _mm256_or_ps(v, _mm256_castsi256_ps(nan));
  }
};
// Powers of two; 0xff is NaN.
struct E8M0 {
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    const __m256i e = _mm256_cvtepu8_epi32(load_low8(p));
    const __m256i least = _mm256_set1_epi32(0x400000), all = _mm256_set1_epi32(255);
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi32(e, all), least);
    const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(e, 23), nan);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, least));
  }
};
// Eight 32-bit words of neighbouring features; input `line` of each.
struct U4Gptq {
  static constexpr Code kCode = Code::u4_gptq;
  static constexpr int64_t kBytes8 = 32;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t line) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i codes = _mm256_srl_epi32(words, _mm_cvtsi32_si128(int(line) * 4));
    return _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
  }
};
struct U8Gptq {
  static constexpr Code kCode = Code::u8_gptq;
  static constexpr int64_t kBytes8 = 32;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t line) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i codes = _mm256_srl_epi32(words, _mm_cvtsi32_si128(int(line) * 8));
    return _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(255)));
  }
};
struct U4Awq {
  static constexpr Code kCode = Code::u4_awq;
  static constexpr int64_t kBytes8 = 4;
  CPUMOE_INLINE __m256 load8(const char* p, int64_t) {
    const __m256i shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
    return _mm256_cvtepi32_ps(spread_bits(load_bits<uint32_t>(p), shifts, 15));
  }
};

// Elements i .. i + 7 (i a multiple of 8) of a line of `length`; past its end unspecified codes,
// whose bytes are not touched.
template <class W>
CPUMOE_INLINE __m256 load8_of(const char* line, int64_t i, int64_t length, int64_t in_block) {
  const char* p = line + i / 8 * W::kBytes8;
  if (i + 8 <= length) return W::load8(p, in_block);
  alignas(32) char tail[32] = {};
  memcpy(tail, p, size_t(line_bytes(W::kCode, length) - i / 8 * W::kBytes8));
  return W::load8(tail, in_block);
}

template <class W>
CPUMOE_INLINE void load_scales8(const char* p, int64_t count, float global, float one(uint8_t),
                                float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_mul_ps(W::load8(p + i, 0), _mm256_set1_ps(global)));
  for (; i < count; ++i) out[i] = one(uint8_t(p[i])) * global;
}
// Scales `count` from column c0 on of one row, times `global`.
CPUMOE_INLINE void load_scales(const MatrixView& m, int64_t row, int64_t c0, int64_t count,
                               float global, float* out) {
  const char* p = static_cast<const char*>(m.data) + line_bytes(m.code, row * m.stride + c0);
  switch (m.code) {
    case Code::f32:
      for (int64_t i = 0; i < count; ++i) out[i] = load_bits<float>(p + i * 4) * global;
      return;
    case Code::f16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = _cvtsh_ss(load_bits<uint16_t>(p + i * 2)) * global;
      }
      return;
    case Code::bf16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = to_float(bf16{load_bits<uint16_t>(p + i * 2)}) * global;
      }
      return;
    case Code::e8m0:
      return load_scales8<E8M0>(p, count, global, e8m0_to_float, out);
    default:
      return load_scales8<E4M3>(p, count, global, e4m3_to_float, out);
  }
}

// Zero points likewise; the ones implied by the code where the format stores none.
CPUMOE_INLINE void load_zeros(const WeightView& w, int64_t row, int64_t c0, int64_t count,
                              float* out) {
  const MatrixView& m = w.zeros;
  if (!w.format->stored_zeros()) {
    const Code c = w.format->code;
    const bool tiny = c == Code::u3 || c == Code::u2;
    const float middle = c == Code::u8 ? 128 : !tiny ? 8 : c == Code::u3 ? 4 : 2;
    const float zero = w.format->zeros == ZeroRule::middle ? middle : 0.0f;
    for (int64_t i = 0; i < count; ++i) out[i] = zero;
    return;
  }
  const float plus = w.format->zeros == ZeroRule::stored_less_one ? 1.0f : 0.0f;
  const uint8_t* p = static_cast<const uint8_t*>(m.data) + row * line_bytes(m.code, m.stride);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t c = c0 + i;
    uint32_t z;
    switch (m.code) {
      case Code::u8:
        z = p[c];
        break;
      case Code::u4:
        z = uint32_t(p[c / 2]) >> (c % 2 * 4) & 15;
        break;
      case Code::u2:
        z = uint32_t(p[c / 4]) >> (c % 4 * 2) & 3;
        break;
      default: {  // u4_awq: feature 2i of a word lies in nibble i, 2i + 1 in nibble 4 + i
        const int64_t nibble = c % 8 / 2 + c % 2 * 4;
        z = load_bits<uint32_t>(reinterpret_cast<const char*>(p) + c / 8 * 4) >> (nibble * 4) & 15;
      }
    }
    out[i] = float(z) + plus;
  }
}

}  // namespace cpumoe::CPUMOE_NS::codes
