// Activations in spans and in lines (layouts.h), rounded as quantize.h says, bit for bit.
#include <immintrin.h>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::avx2 {
namespace {

struct Bytes16 {
  alignas(16) int8_t at[16];
};
// Which of 16 inputs each byte holds; the same for the first and the last 16 of a group.
template <class Order>
constexpr Bytes16 inputs_of() {
  Bytes16 b{};
  for (int e = 0; e < 16; ++e) b.at[Order::vector(e) * 4 + Order::byte(e)] = int8_t(e);
  return b;
}

CPUMOE_INLINE void put(char* p, int32_t v) { memcpy(p, &v, 4); }
CPUMOE_INLINE void put(char* p, float v) { memcpy(p, &v, 4); }

// Where 32 codes in order and their scale go: inputs k, a multiple of 32, and on.
template <class Order>
struct InSpans {
  using Layout = Spans;
  CPUMOE_INLINE void store(char* line, int64_t k, __m256i codes, float scale) {
    static constexpr Bytes16 kInputs = inputs_of<Order>();
    char* lane = line + k / Spans::kInputs * Spans::kBytes +
                 Order::lane(int(k / kActGroup % Spans::kGroups)) * 4;
    const __m128i inputs = _mm_load_si128(reinterpret_cast<const __m128i*>(kInputs.at));
    codes = _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(inputs));
    alignas(32) int32_t fours[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(fours), codes);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) put(lane + v * 32, fours[v]);
    // s16 sums of codes 0, 1 and 2, 3 of each vector, then of four vectors.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
    const __m128i first = _mm256_castsi256_si128(pairs), last = _mm256_extracti128_si256(pairs, 1);
    const __m128i zero = _mm_setzero_si128(), all = _mm_add_epi16(first, last);
    put(lane + Spans::kMinusAll, _mm_cvtsi128_si32(_mm_sub_epi16(zero, all)));
    put(lane + Spans::kMinusFirst, _mm_cvtsi128_si32(_mm_sub_epi16(zero, first)));
    const __m128i ones = _mm_set1_epi16(1);
    const int32_t a = _mm_cvtsi128_si32(_mm_madd_epi16(first, ones)),
                  b = _mm_cvtsi128_si32(_mm_madd_epi16(last, ones));
    put(lane + Spans::kScale, scale);
    put(lane + Spans::kSum, scale * float(a + b));
    put(lane + Spans::kFirstSum, scale * float(a));
    put(lane + Spans::kLastSum, scale * float(b));
  }
};

template <int kCodes>
struct InLines {
  using Layout = Lines<kCodes>;
  CPUMOE_INLINE void store(char* line, int64_t k, __m256i codes, float scale) {
    constexpr int64_t kBytes = 32 / kCodes;  // of a plane
    const int64_t group = k % Layout::kInputs / kActGroup;
    char* chunk = line + k / Layout::kInputs * Layout::kBytes;
    // Sums of eight neighbours: those of the codes plus 128, less 1024.
    const __m256i eights = _mm256_sub_epi64(
        _mm256_set1_epi64x(1024),
        _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256()));
    alignas(32) int64_t minus[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(minus), eights);
    alignas(32) char planes[32];
    const __m128i order = kCodes == 2
                              ? _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
                              : _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    codes = _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(order));
    codes = kCodes == 2 ? _mm256_permute4x64_epi64(codes, 0xd8)
                        : _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_store_si256(reinterpret_cast<__m256i*>(planes), codes);
#pragma GCC unroll 4
    for (int j = 0; j < kCodes; ++j)
      memcpy(chunk + 64 * j + group * kBytes, planes + j * kBytes, size_t(kBytes));
#pragma GCC unroll 4
    for (int64_t i = 0; i < Layout::kLanes; ++i) {
      const int64_t lane = (group * Layout::kLanes + i) * 4;
      put(chunk + Layout::kScale + lane, scale);
      put(chunk + Layout::kMinus + lane,
          kCodes == 2 ? int32_t(minus[i]) : int32_t(minus[2 * i] + minus[2 * i + 1]));
    }
  }
};

// Rounds 32 inputs.
template <class Place>
CPUMOE_INLINE void write_group(char* line, int64_t k, const __m256 x[4]) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  // Magnitudes as integers keep their order, with infinity and NaNs above all numbers.
  __m256i most = _mm256_and_si256(_mm256_castps_si256(x[0]), magnitude);
#pragma GCC unroll 4
  for (int i = 1; i < 4; ++i) {
    most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
  }
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  const float amax = bits_to_float(uint32_t(_mm_cvtsi128_si32(m)));
  const float inverse = act_inverse(amax);
  __m256i codes = _mm256_setzero_si256();
  if (inverse != 0) {
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], by));
    codes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  Place::store(line, k, codes, act_scale(amax));
}

// Inputs [k0, k1) of one token, k0 a multiple of 32; k1 likewise or the last of `inputs`, behind
// which the span or chunk is filled with zeros. read(k, i): inputs k + 8 i .. of the group at k.
template <class Place, class Read, class One>
CPUMOE_INLINE void write_line(char* line, int64_t k0, int64_t k1, int64_t inputs, const Read& read,
                              const One& one) {
  int64_t k = k0;
  for (; k + kActGroup <= k1; k += kActGroup) {
    const __m256 x[4] = {read(k), read(k + 8), read(k + 16), read(k + 24)};
    write_group<Place>(line, k, x);
  }
  if (k < k1) {
    alignas(32) float part[kActGroup] = {};
    for (int64_t i = k; i < k1; ++i) part[i - k] = one(i);
    const __m256 x[4] = {_mm256_load_ps(part), _mm256_load_ps(part + 8), _mm256_load_ps(part + 16),
                         _mm256_load_ps(part + 24)};
    write_group<Place>(line, k, x);
    k += kActGroup;
  }
  if (k1 != inputs) return;
  for (; k < round_up(inputs, Place::Layout::kInputs); k += kActGroup)
    Place::store(line, k, _mm256_setzero_si256(), 0.0f);
}

template <class Place, class S>
void pack(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  char* dst = static_cast<char*>(a.dst);
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    const char* x = static_cast<const char*>(a.src.data) + row * a.src.stride * S::kBytes;
    write_line<Place>(
        dst + m * Place::Layout::line_bytes(inputs), 0, inputs, inputs,
        [=](int64_t k) __attribute__((always_inline)) { return S::load8(x + k * S::kBytes); },
        [=](int64_t k) __attribute__((always_inline)) {
          return load_as_float(x + k * S::kBytes, S::kCode, 0);
        });
  }
}
template <class Place>
CPUMOE_INLINE void pack_any(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack<Place, F32>(a);
  if (a.src.code == Code::f16) return pack<Place, F16>(a);
  pack<Place, BF16>(a);
}

template <class Place>
void mid(const StoreMidArgs& a) {
  char* dst = static_cast<char*>(a.dst);
  const bool n_major = a.order == TileOrder::n_major;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* tile =
        a.tile + (m - a.m0) * (n_major ? 1 : a.stride) - a.n0 * (n_major ? a.stride : 1);
    char* line = dst + m * Place::Layout::line_bytes(a.k);
    if (n_major) {
      const int64_t s = a.stride;
      const auto read = [=](int64_t n) __attribute__((always_inline)) {
        const float* p = tile + n * s;
        return _mm256_setr_ps(p[0], p[s], p[2 * s], p[3 * s], p[4 * s], p[5 * s], p[6 * s],
                              p[7 * s]);
      };
      write_line<Place>(line, a.n0, a.n1, a.k, read, [=](int64_t n) { return tile[n * s]; });
    } else {
      write_line<Place>(
          line, a.n0, a.n1, a.k, [=](int64_t n) { return _mm256_loadu_ps(tile + n); },
          [=](int64_t n) { return tile[n]; });
    }
  }
}

}  // namespace

void pack_int8_quads(const PackArgs& a) { pack_any<InSpans<Quads>>(a); }
void pack_int8_quads_high(const PackArgs& a) { pack_any<InSpans<QuadsHigh>>(a); }
void pack_int8_pairs(const PackArgs& a) { pack_any<InSpans<Pairs>>(a); }
void pack_int8_fours(const PackArgs& a) { pack_any<InSpans<Fours>>(a); }
void pack_int8_lines2(const PackArgs& a) { pack_any<InLines<2>>(a); }
void pack_int8_lines4(const PackArgs& a) { pack_any<InLines<4>>(a); }

void mid_int8_quads(const StoreMidArgs& a) { mid<InSpans<Quads>>(a); }
void mid_int8_quads_high(const StoreMidArgs& a) { mid<InSpans<QuadsHigh>>(a); }
void mid_int8_pairs(const StoreMidArgs& a) { mid<InSpans<Pairs>>(a); }
void mid_int8_fours(const StoreMidArgs& a) { mid<InSpans<Fours>>(a); }
void mid_int8_lines2(const StoreMidArgs& a) { mid<InLines<2>>(a); }
void mid_int8_lines4(const StoreMidArgs& a) { mid<InLines<4>>(a); }

}  // namespace cpumoe::avx2
