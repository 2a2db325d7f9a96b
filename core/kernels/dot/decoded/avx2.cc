// Quantised weights in class fp32: decoded to fp32 as decode_line rounds them, then multiplied as
// any fp32 weight. `block` decodes a block once for all tokens, `decoded` a part of a row for up to
// four.
#include "kernels/dot/block/tiles.h"
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_codes.h"
#include "kernels/vec/avx2_decode.h"
#include "kernels/vec/avx2_gguf.h"

namespace cpumoe::avx2 {
namespace {

using namespace codes;

// ---- a part of a line, rows: inputs [k, k + depth), k a multiple of kDepth

constexpr int64_t kGroups = kDepth / 16;  // groups of inputs in a part, the smallest being of 16

using DecodeRow = void (*)(const WeightView& w, int64_t n, int64_t k, int64_t depth, float* out);

template <class W>
void plain_row(const WeightView& w, int64_t n, int64_t k, int64_t depth, float* out) {
  const Format& f = *w.format;
  const int64_t size = f.scale_cols, line = n / f.scale_rows;
  const int64_t count = ceil_div(depth, size);
  float scales[kGroups], zeros[kGroups];
  load_scales(w.scales, line, k / size, count, w.global_scale, scales);
  load_zeros(w, line, k / size, count, zeros);
  const char* p = line_at(w, n);
  for (int64_t g = 0, i = 0; g < count; ++g) {
    const __m256 scale = _mm256_set1_ps(scales[g]), zero = _mm256_set1_ps(zeros[g]);
    const int64_t end = min64((g + 1) * size, depth), whole = i + (end - i) / 8 * 8;
    for (; i < whole; i += 8) {
      const __m256 q = W::load8(p + (k + i) / 8 * W::kBytes8, 0);
      _mm256_store_ps(out + i, _mm256_mul_ps(_mm256_sub_ps(q, zero), scale));
    }
    if (i < end) {  // the end of the line
      const __m256 q = load8_of<W>(p, k + i, w.k, 0);
      _mm256_store_ps(out + i, _mm256_mul_ps(_mm256_sub_ps(q, zero), scale));
    }
  }
}

template <Code C>
void gguf_row(const WeightView& w, int64_t n, int64_t k, int64_t depth, float* out) {
  decode_gguf<C>(line_at(w, n) + line_bytes(C, k), depth, out);
}

// Lines of the block after this one, spread over the calls. One type for all codes, since the
// register tiles are compiled for each.
struct FetchCodes {
  const char* from;
  int64_t stride, row_lines;  // bytes; lines of 64 bytes of a row of the block
  CodeBlock b;
  FetchCodes(const WeightView& w, int64_t n, int64_t k)
      : from(nullptr), b(code_block(w.format->code)) {
    const bool by_row = w.layout == Layout::rows;
    stride = w.stride / b.elements * b.bytes;
    row_lines = ceil_div(kDepth / b.elements * b.bytes, 64);
    if (n < 0) return;
    from = static_cast<const char*>(w.data) + (by_row ? n : k / b.lines) * stride +
           (by_row ? k : n) / b.elements * b.bytes;
  }
  // Inlined, as GCC drops calls of functions that do nothing but prefetch.
  template <int R>
  __attribute__((always_inline)) void rows(int64_t r, int64_t k) const {
    if (from == nullptr) return;
    const int64_t lines = R * row_lines, each = (lines + 31) / 32;  // 32 calls
    for (int64_t line = (k >> 3) * each, end = min64(line + each, lines); line < end; ++line) {
      _mm_prefetch(from + (r + line % R) * stride + line / R * 64, _MM_HINT_T1);
    }
  }
  // 24 features of 8 inputs; a line of 64 bytes holds those of several panels.
  __attribute__((always_inline)) void panel(int64_t f, int64_t k) const {
    if (from == nullptr) return;
    const int64_t begin = f / b.elements * b.bytes;
    const int64_t end = (f + kPanel<Floats8>) / b.elements * b.bytes;
    for (int64_t at = round_up(begin, 64); at < end; at += 64) {
      for (int64_t i = 0; i < 8; i += b.lines) {
        _mm_prefetch(from + (k + i) / b.lines * stride + at, _MM_HINT_T1);
      }
    }
  }
};

void rows_block(const DotArgs& a, DecodeRow row) {
  block_rows<FetchCodes>(a, [&](int64_t n, int64_t rows, int64_t k, int64_t depth, float* out) {
    if (depth == 0) return;
    for (int64_t r = 0; r < rows; ++r) row(*a.w, n + r, k, depth, out + r * kDepth);
  });
}

// ---- up to four tokens: a part of one row after the other

template <int T>
CPUMOE_INLINE void multiply_part(const float* w, const float* x, int64_t xs, int64_t depth,
                                 __m256 lo[T], __m256 hi[T]) {
  for (int64_t i = 0; i < depth; i += 16) {
    const __m256 a = _mm256_load_ps(w + i), b = _mm256_load_ps(w + i + 8);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      lo[t] = _mm256_fmadd_ps(a, _mm256_loadu_ps(x + t * xs + i), lo[t]);
      hi[t] = _mm256_fmadd_ps(b, _mm256_loadu_ps(x + t * xs + i + 8), hi[t]);
    }
  }
}

template <int T>
void rows_tokens(const DotArgs& a, int64_t m, DecodeRow row) {
  constexpr int64_t kAhead = 8192;  // bytes
  const WeightView& w = *a.w;
  const Code code = w.format->code;
  const int64_t xs = Rows::pos(1, 0, w.k), stride = line_bytes(code, w.stride);
  const int64_t ahead = ceil_div(kAhead, max64(stride, 64)) * stride;
  const float* x = static_cast<const float*>(a.act) + Rows::pos(m, 0, w.k);
  float* c = a.c + (m - a.m0) * a.c_stride;
  alignas(32) float part[kDepth];
  for (int64_t n = a.n0; n < a.n1; ++n, ++c) {
    __m256 lo[T], hi[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) lo[t] = hi[t] = _mm256_setzero_ps();
    const char* next = line_at(w, n) + ahead;
    for (int64_t k = 0; k < w.k; k += kDepth) {
      const int64_t depth = min64(kDepth, w.k - k), padded = round_up(depth, 16);
      const int64_t begin = line_bytes(code, k), end = line_bytes(code, k + depth);
      for (int64_t b = begin; b < end; b += 64) _mm_prefetch(next + b, _MM_HINT_T1);
      row(w, n, k, depth, part);
      for (int64_t i = depth; i < padded; ++i) part[i] = 0;
      multiply_part<T>(part, x + k, xs, padded, lo, hi);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) c[t * a.c_stride] = sum8(_mm256_add_ps(lo[t], hi[t]));
  }
}

void rows_decoded(const DotArgs& a, DecodeRow row) {
  for (int64_t m = a.m0; m < a.m1;) {
    const int64_t left = a.m1 - m;
    if (left == 1) {
      rows_tokens<1>(a, m, row), m += 1;
    } else if (left == 2) {
      rows_tokens<2>(a, m, row), m += 2;
    } else if (left == 3) {
      rows_tokens<3>(a, m, row), m += 3;
    } else {
      rows_tokens<4>(a, m, row), m += 4;
    }
  }
}

// ---- columns: features of a line, with scales and zero points of their own

// Of features [n, n + count) and the inputs of group g, one for each feature.
CPUMOE_INLINE void feature_grid(const WeightView& w, int64_t n, int64_t count, int64_t g,
                                float* scales, float* zeros) {
  const int64_t size = w.format->scale_rows;
  if (size == 1) {
    load_scales(w.scales, g, n, count, w.global_scale, scales);
    load_zeros(w, g, n, count, zeros);
    return;
  }
  for (int64_t i = 0; i < count;) {
    const int64_t end = min64(count, (n + i) / size * size + min64(size, n + count) - n);
    load_scales(w.scales, g, (n + i) / size, 1, w.global_scale, scales + i);
    load_zeros(w, g, (n + i) / size, 1, zeros + i);
    for (int64_t j = i + 1; j < end; ++j) scales[j] = scales[i], zeros[j] = zeros[i];
    i = end;
  }
}

template <class W>
void decode_columns(const WeightView& w, int64_t n, int64_t features, int64_t k, int64_t depth,
                    float* block) {
  constexpr int64_t kLines = code_block(W::kCode).lines;
  alignas(32) float scales[kColumns], zeros[kColumns];
  const int64_t size = w.format->scale_cols;
  int64_t group = -1;
  for (int64_t i = k; i < k + depth; ++i) {
    if (i / size != group) {
      group = i / size;
      feature_grid(w, n, features, group, scales, zeros);
    }
    const char* line = line_at(w, i / kLines * kLines);
    for (int64_t f = 0; f < features; f += 8) {
      const __m256 q = load8_of<W>(line, n + f, w.n, i % kLines);
      const __m256 v = _mm256_sub_ps(q, _mm256_load_ps(zeros + f));
      _mm256_store_ps(columns_at<Floats8>(block, f, i - k),
                      _mm256_mul_ps(v, _mm256_load_ps(scales + f)));
    }
  }
}

template <class W>
void columns_block(const DotArgs& a) {
  block_columns<Floats8, FetchCodes>(
      a, [&](int64_t n, int64_t features, int64_t k, int64_t depth, float* block) {
        decode_columns<W>(*a.w, n, features, k, depth, block);
      });
}

}  // namespace

void dot_block_rows_e4m3(const DotArgs& a) { rows_block(a, plain_row<E4M3>); }
void dot_block_rows_e2m1(const DotArgs& a) { rows_block(a, plain_row<E2M1>); }
#define CPUMOE_DECODED_ROWS(code, row)                                 \
  void dot_block_rows_##code(const DotArgs& a) { rows_block(a, row); } \
  void dot_decoded_rows_##code(const DotArgs& a) { rows_decoded(a, row); }
CPUMOE_DECODED_ROWS(s8, plain_row<S8>)
CPUMOE_DECODED_ROWS(u8, plain_row<U8>)
CPUMOE_DECODED_ROWS(u4, plain_row<U4>)
CPUMOE_DECODED_ROWS(u3, plain_row<U3>)
CPUMOE_DECODED_ROWS(u2, plain_row<U2>)
CPUMOE_DECODED_ROWS(q8_0, gguf_row<Code::q8_0>)
CPUMOE_DECODED_ROWS(q4_0, gguf_row<Code::q4_0>)
CPUMOE_DECODED_ROWS(q4_1, gguf_row<Code::q4_1>)
CPUMOE_DECODED_ROWS(q5_0, gguf_row<Code::q5_0>)
CPUMOE_DECODED_ROWS(q5_1, gguf_row<Code::q5_1>)
CPUMOE_DECODED_ROWS(q2_k, gguf_row<Code::q2_k>)
CPUMOE_DECODED_ROWS(q3_k, gguf_row<Code::q3_k>)
CPUMOE_DECODED_ROWS(q4_k, gguf_row<Code::q4_k>)
CPUMOE_DECODED_ROWS(q5_k, gguf_row<Code::q5_k>)
CPUMOE_DECODED_ROWS(q6_k, gguf_row<Code::q6_k>)
CPUMOE_DECODED_ROWS(iq4_nl, gguf_row<Code::iq4_nl>)
CPUMOE_DECODED_ROWS(iq4_xs, gguf_row<Code::iq4_xs>)
CPUMOE_DECODED_ROWS(gguf_mxfp4, gguf_row<Code::gguf_mxfp4>)
#undef CPUMOE_DECODED_ROWS

void dot_block_columns_e4m3(const DotArgs& a) { columns_block<E4M3>(a); }
void dot_block_columns_e2m1(const DotArgs& a) { columns_block<E2M1>(a); }
void dot_block_columns_s8(const DotArgs& a) { columns_block<S8>(a); }
void dot_block_columns_u8(const DotArgs& a) { columns_block<U8>(a); }
void dot_block_columns_u4(const DotArgs& a) { columns_block<U4>(a); }
void dot_block_columns_u2(const DotArgs& a) { columns_block<U2>(a); }
void dot_block_columns_u4_gptq(const DotArgs& a) { columns_block<U4Gptq>(a); }
void dot_block_columns_u8_gptq(const DotArgs& a) { columns_block<U8Gptq>(a); }
void dot_block_columns_u4_awq(const DotArgs& a) { columns_block<U4Awq>(a); }

size_t scratch_decoded(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2
