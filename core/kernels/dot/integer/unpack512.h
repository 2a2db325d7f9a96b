// Bits to codes in the lanes of a span: what unpack.h declares, two vectors of the layout at once.
// Words and dwords move across a whole register in one permutation. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "kernels/dot/integer/math.h"

namespace cpumoe::CPUMOE_NS {

template <class T>
struct Lanes512 {
  alignas(64) T at[64 / sizeof(T)];
  CPUMOE_INLINE __m512i load(const Lanes512& l) { return _mm512_load_si512(l.at); }
};
using Words = Lanes512<int16_t>;
using Dwords = Lanes512<int32_t>;

template <class Order>
constexpr int group_of(int lane) {
  for (int g = 0; g < 8; ++g) {
    if (Order::lane(g) == lane) return g;
  }
  return 0;
}
// f(group, half) for the lanes of both halves.
template <class Order, class F>
constexpr Dwords by_group(const F& f) {
  Dwords d{};
  for (int i = 0; i < 16; ++i) d.at[i] = f(group_of<Order>(i % 8), i / 8);
  return d;
}

CPUMOE_INLINE Codes everywhere(int byte) { return _mm512_set1_epi8(char(byte)); }
CPUMOE_INLINE Codes low_nibbles(Codes v) { return _mm512_and_si512(v, everywhere(15)); }
CPUMOE_INLINE Codes high_nibbles(Codes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
CPUMOE_INLINE Codes flip(Codes v, int bits) { return _mm512_xor_si512(v, everywhere(bits)); }
CPUMOE_INLINE Codes look_up(const int8_t table[16], Codes nibbles) {
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), nibbles);
}
// v | (bits & mask)
CPUMOE_INLINE Codes or_masked(Codes v, Codes bits, int mask) {
  return _mm512_ternarylogic_epi32(v, bits, everywhere(mask), 0xf8);
}

// Eight groups, kStep bytes apart, in as few loads as hold them: loads that straddle lines of the
// cache are what limits a stream (1.8 cycles each on Zen 4, a permutation 1). A word that starts at an
// odd byte comes from a load that does. Nothing past 8 * kStep is read.
template <int kStep>
struct Loads {
  static constexpr bool kOdd = kStep % 2 != 0;
  static constexpr int kCount = kOdd || kStep == 34 ? 4 : kStep == 16 ? 2 : 3;
  static constexpr int start(int i) {
    const int last = 8 * kStep - 64;
    if (kOdd) return i == 0 ? 1 : i == 1 ? last - 15 : i == 2 ? 18 : last;
    return kStep == 34 ? 68 * i : i == kCount - 1 ? last : 64 * i;
  }
  // The first load that holds the word at this byte.
  static constexpr int holding(int at) {
    int i = 0;
    while (at < start(i) || at + 2 > start(i) + 64 || (at - start(i)) % 2 != 0) ++i;
    return i;
  }
};
template <int kStep, int kAt, int kWords>
struct Pick {
  using L = Loads<kStep>;
  static constexpr int byte(int i) {  // of word i of the result
    const int lane = kWords == 1 ? i % 8 : i / 2 % 8;
    const int word = kWords == 1 ? 0 : kWords == 2 ? i % 2 : i / 16 * 2 + i % 2;
    const int at = kAt + group_of<Quads>(lane) * kStep + 2 * word;
    return L::kOdd && at == 0 ? 1 : at;  // no load holds byte 0 then
  }
  static constexpr Words words() {
    Words w{};
    for (int i = 0; i < 32; ++i) {
      const int load = L::holding(byte(i));
      w.at[i] = int16_t(load % 2 * 32 + (byte(i) - L::start(load)) / 2);
    }
    return w;
  }
  static constexpr uint32_t last_loads() {  // words from loads 2 and 3
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) mask |= uint32_t(L::holding(byte(i)) >= 2) << i;
    return mask;
  }
};
// kWords = 1: the word at p + kAt of every group, one a lane, in the first 16 bytes. 2: two a lane, in
// both halves. 4: the first two a lane, then the last two.
template <int kStep, int kAt, int kWords>
CPUMOE_INLINE __m512i words_of_groups(const char* p) {
  using P = Pick<kStep, kAt, kWords>;
  static constexpr Words kWord = P::words();
  const auto load = [=](int i) __attribute__((always_inline)) {
    __m512i v = _mm512_loadu_si512(p + P::L::start(i));
    __asm__("" : "+v"(v));  // opaque: GCC would read it again for every permutation
    return v;
  };
  const __m512i at = Words::load(kWord);
  const __m512i some = _mm512_permutex2var_epi16(load(0), at, load(1));
  if constexpr (P::last_loads() == 0) return some;
  if constexpr (P::L::kCount == 3) {
    return _mm512_mask_permutexvar_epi16(some, P::last_loads(), at, load(2));
  } else {
    const __m512i rest = _mm512_permutex2var_epi16(load(2), at, load(3));
    return _mm512_mask_mov_epi16(some, P::last_loads(), rest);
  }
}
template <int kStep, int kAt>
CPUMOE_INLINE __m256 halves_of_blocks(const char* p) {
  return _mm256_cvtph_ps(_mm512_castsi512_si128(words_of_groups<kStep, kAt, 1>(p)));
}

// The first byte of every block, one a lane.
template <int kStep>
CPUMOE_INLINE __m256i first_bytes(const char* p) {
  const __m128i words = _mm512_castsi512_si128(words_of_groups<kStep, 0, 1>(p));
  const __m128i bytes = _mm_insert_epi8(_mm_and_si128(words, _mm_set1_epi16(255)), p[0], 0);
  return _mm256_cvtepu16_epi32(bytes);
}

template <int kStep, int kAt>
CPUMOE_INLINE void bytes_of_groups(const char* p, Codes w[4]) {
  __m512i v[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {  // groups 2j, 2j + 1
    const char* a = p + kAt + 2 * j * kStep;
    v[j] = kStep == 32 ? load_register(a)
                       : _mm512_inserti64x4(_mm512_castsi256_si512(load_codes(a)),
                                            load_codes(a + kStep), 1);
  }
  const __m512i even = _mm512_setr_epi64(0, 8, 4, 12, 1, 9, 5, 13);
  const __m512i odd = _mm512_setr_epi64(2, 10, 6, 14, 3, 11, 7, 15);
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  w[0] = _mm512_permutex2var_epi64(a, even, c);
  w[1] = _mm512_permutex2var_epi64(b, even, d);
  w[2] = _mm512_permutex2var_epi64(a, odd, c);
  w[3] = _mm512_permutex2var_epi64(b, odd, d);
}

template <int kStep, int kAt>
CPUMOE_INLINE void nibbles_of_groups(const char* p, Codes w[4]) {
  const __m512i a = words_of_groups<kStep, kAt, 4>(p), b = words_of_groups<kStep, kAt + 8, 4>(p);
  w[0] = low_nibbles(a);
  w[1] = low_nibbles(b);
  w[2] = high_nibbles(a);
  w[3] = high_nibbles(b);
}
CPUMOE_INLINE void nibbles_in_order(const char* p, Codes w[4]) {
  const __m512i a = words_of_groups<16, 0, 4>(p), b = words_of_groups<16, 8, 4>(p);
  w[0] = low_nibbles(a);
  w[1] = high_nibbles(a);
  w[2] = low_nibbles(b);
  w[3] = high_nibbles(b);
}

// Lanes 0..3: the low nibbles of 32 bytes each, lanes 4..7: the high ones.
CPUMOE_INLINE void nibbles_of_pairs(const char* p, Codes w[4]) {
  const __m512i a = load_register(p), b = load_register(p + 64);
  const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 0, 8, 16, 24, 1, 9, 17, 25, 1, 9, 17, 25);
  const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i at = _mm512_add_epi32(first, _mm512_set1_epi32(2 * i));
    w[i] = low_nibbles(_mm512_srlv_epi32(_mm512_permutex2var_epi32(a, at, b), shift));
  }
}

// Likewise, but the high ones where they lie, 16 times as much (scales_and_minima<true>).
CPUMOE_INLINE void nibbles_in_place(const char* p, Codes w[4]) {
  const __m512i a = load_register(p), b = load_register(p + 64);
  const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 0, 8, 16, 24, 1, 9, 17, 25, 1, 9, 17, 25);
  const __m512i mask = _mm512_mask_set1_epi32(everywhere(15), 0xf0f0, int(0xf0f0f0f0));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i at = _mm512_add_epi32(first, _mm512_set1_epi32(2 * i));
    w[i] = _mm512_and_si512(_mm512_permutex2var_epi32(a, at, b), mask);
  }
}

template <int kValue>
CPUMOE_INLINE void or_bits_of_groups(const char* p, Codes w[4]) {
  constexpr Dwords kTurn =
      by_group<Quads>([](int g, int) { return (__builtin_ctz(unsigned(kValue)) - g) & 31; });
  const __m512i bits = _mm512_castsi256_si512(load_codes(p));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i at =
        _mm512_inserti64x4(_mm512_set1_epi32(2 * i), _mm256_set1_epi32(2 * i + 1), 1);
    const __m512i here = _mm512_permutexvar_epi32(at, bits);
    w[i] = or_masked(w[i], _mm512_rolv_epi32(here, Dwords::load(kTurn)), kValue);
  }
}

template <int kStep, int kAt>
CPUMOE_INLINE void or_fifth_bits(const char* p, Codes w[4]) {
  const __m512i bits = words_of_groups<kStep, kAt, 2>(p);
  const __m512i from =
      _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  const __m512i mask =
      _mm512_inserti64x4(_mm512_set1_epi32(0x08040201), _mm256_set1_epi32(int(0x80402010)), 1);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // byte i of a block: vectors 2i and 2i + 1
    const __m512i byte = _mm512_shuffle_epi8(bits, _mm512_add_epi8(from, everywhere(i)));
    w[i] = _mm512_mask_add_epi8(w[i], _mm512_test_epi8_mask(byte, mask), w[i], everywhere(16));
  }
}

CPUMOE_INLINE void two_bits_of_halves(const char* p, Codes w[4]) {
  constexpr Dwords kFrom = by_group<Quads>([](int g, int half) { return g / 4 * 8 + half; });
  constexpr Dwords kShift = by_group<Quads>([](int g, int) { return g % 4 * 2; });
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i at = _mm512_add_epi32(Dwords::load(kFrom), _mm512_set1_epi32(2 * i));
    const __m512i v = _mm512_permutexvar_epi32(at, load_register(p));
    w[i] = _mm512_and_si512(_mm512_srlv_epi32(v, Dwords::load(kShift)), everywhere(3));
  }
}

CPUMOE_INLINE void six_bits(const char* p, Codes w[4]) {
  constexpr Dwords kFrom = by_group<QuadsHigh>([](int g, int half) { return g / 4 * 8 + half; });
  constexpr Dwords kTurn = by_group<QuadsHigh>([](int g, int) { return (4 - g % 4 * 2) & 31; });
  nibbles_of_pairs(p, w);
  const __m512i bits = load_register(p + 128);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i at = _mm512_add_epi32(Dwords::load(kFrom), _mm512_set1_epi32(2 * i));
    const __m512i upper =
        _mm512_rolv_epi32(_mm512_permutexvar_epi32(at, bits), Dwords::load(kTurn));
    w[i] = or_masked(w[i], upper, 0x30);
  }
}

CPUMOE_INLINE void two_bits_in_order(const char* p, Codes w[4]) {
  constexpr Dwords kFrom = by_group<Fours>([](int g, int) { return 2 * g; });
  constexpr Dwords kShift = by_group<Fours>([](int, int half) { return 2 * half; });
  const __m512i bits = load_register(p);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i at = _mm512_add_epi32(Dwords::load(kFrom), _mm512_set1_epi32(i));
    const __m512i v = _mm512_srlv_epi32(_mm512_permutexvar_epi32(at, bits), Dwords::load(kShift));
    w[2 * i] = _mm512_and_si512(v, everywhere(3));
    w[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), everywhere(3));
  }
}

CPUMOE_INLINE void three_bits_in_order(const char* p, Codes w[4]) {
  // Eight inputs are 24 bits: those of words 6g and on, then, a byte further, of words 6g + 1 and on.
  const auto index = [](int word) {
    Words at{};
    for (int i = 0; i < 32; ++i) {
      const int from = 6 * group_of<Quads>(i / 2 % 8) + word + i / 16 + i % 2;
      at.at[i] = int16_t(from < 32 ? from : from + 16);  // the second load starts at word 16
    }
    return at;
  };
  constexpr Words kFirst = index(0), kLast = index(3);
  const __m512i a = load_register(p), b = load_register(p + 32);
  const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(8), 1);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i at = Words::load(i == 0 ? kFirst : kLast);
    const __m512i v = _mm512_srlv_epi32(_mm512_permutex2var_epi16(a, at, b), shift);
    // mask ? v : v << n, twice: 12 bits to each half, then 6 to each byte.
    const __m512i twelve =
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xfff), v, _mm512_slli_epi32(v, 4), 0xca);
    const __m512i six = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x3f), twelve,
                                                  _mm512_slli_epi32(twelve, 2), 0xca);
    w[2 * i] = _mm512_and_si512(six, everywhere(7));
    w[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(six, 3), everywhere(7));
  }
}

// 16 signed factors, two of each group in order, as s32 in both halves.
template <class Order>
CPUMOE_INLINE void factors_of_halves(__m128i bytes, Codes& first, Codes& last) {
  constexpr Dwords kFirst = by_group<Order>([](int g, int) { return 2 * g; });
  const __m512i all = _mm512_cvtepi8_epi32(bytes), at = Dwords::load(kFirst);
  first = _mm512_permutexvar_epi32(at, all);
  last = _mm512_permutexvar_epi32(_mm512_add_epi32(at, _mm512_set1_epi32(1)), all);
}

struct Bytes16 {
  alignas(16) int8_t at[16];
  CPUMOE_INLINE __m128i load(const Bytes16& b) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(b.at));
  }
};
// f(group, upper): bytes 0..7 of Quads' lanes, then (upper) bytes 8..15.
template <class F>
constexpr Bytes16 bytes_by_group(const F& f) {
  Bytes16 b{};
  for (int i = 0; i < 16; ++i) b.at[i] = int8_t(f(group_of<Quads>(i % 8), i / 8));
  return b;
}

// d, dmin and the 12 bytes of six-bit scales (lower) and minima (upper) of q4_k and q5_k: six bits
// of a byte, or for groups 4 to 7 a nibble of one below two bits from the top of another. kInPlace:
// scales for the codes of nibbles_in_place.
template <bool kInPlace>
CPUMOE_INLINE void scales_and_minima(const char* p, Factors& f) {
  constexpr Bytes16 kLow =
      bytes_by_group([](int g, int m) { return g < 4 ? 4 + g + 4 * m : 8 + g; });
  constexpr Bytes16 kMask = bytes_by_group([](int g, int) { return g < 4 ? 63 : 15; });
  constexpr Bytes16 kTop = bytes_by_group([](int g, int m) { return g < 4 ? -1 : g + 4 * m; });
  constexpr __mmask16 kHighNibbles = 0xcc00;  // minima of groups 4 to 7
  constexpr __mmask16 kUpper = 0xff00;
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), at = Bytes16::load(kLow);
  const __m128i low = _mm_mask_shuffle_epi8(_mm_shuffle_epi8(v, at), kHighNibbles,
                                            _mm_srli_epi16(v, 4), at);
  const __m128i top = _mm_and_si128(_mm_shuffle_epi8(_mm_srli_epi16(v, 2), Bytes16::load(kTop)),
                                    _mm_set1_epi8(0x30));
  const __m128i codes = _mm_ternarylogic_epi32(top, low, Bytes16::load(kMask), 0xf8);
  const __m512 d = _mm512_permutexvar_ps(
      _mm512_mask_set1_epi32(_mm512_setzero_si512(), kUpper, 1),
      _mm512_castps128_ps512(_mm_cvtph_ps(v)));
  const __m512 all = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)), d);
  f.s0 = _mm512_castps512_ps256(all);
  if (kInPlace) {
    constexpr float kLess = 0x1p-4f;
    f.s0 = _mm256_mul_ps(f.s0, _mm256_setr_ps(1, 1, 1, 1, kLess, kLess, kLess, kLess));
  }
  f.o0 = _mm256_xor_ps(_mm512_extractf32x8_ps(all, 1), _mm256_set1_ps(-0.0f));
}

}  // namespace cpumoe::CPUMOE_NS
