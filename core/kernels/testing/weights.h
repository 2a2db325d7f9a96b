// Random weights of any format: codes, scales and zero points in buffers that end at guard pages,
// and what a rounding error of them may be measured by.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats/format.h"
#include "formats/gguf.h"
#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"

namespace cpumoe::testing {

// A GGUF block: where its fp16 factors and its codes lie. mxfp4: one e8m0 byte instead of fp16.
struct BlockMap {
  int half[2] = {-1, -1};              // offsets, -1: none
  int codes[2][2] = {{0, 0}, {0, 0}};  // [begin, end) of up to two runs
};
inline BlockMap block_map(Code c) {
  switch (c) {
    case Code::q8_0:
      return {{0, -1}, {{2, 34}, {0, 0}}};
    case Code::q4_0:
    case Code::iq4_nl:
      return {{0, -1}, {{2, 18}, {0, 0}}};
    case Code::q4_1:
      return {{0, 2}, {{4, 20}, {0, 0}}};
    case Code::q5_0:
      return {{0, -1}, {{2, 22}, {0, 0}}};
    case Code::q5_1:
      return {{0, 2}, {{4, 24}, {0, 0}}};
    case Code::q2_k:
      return {{80, 82}, {{16, 80}, {0, 0}}};
    case Code::q3_k:
      return {{108, -1}, {{0, 96}, {0, 0}}};
    case Code::q4_k:
    case Code::q5_k:
      return {{0, 2}, {{16, code_block(c).bytes}, {0, 0}}};
    case Code::q6_k:
      return {{208, -1}, {{0, 192}, {0, 0}}};
    case Code::iq4_xs:
      return {{0, -1}, {{8, 136}, {0, 0}}};
    default:  // gguf_mxfp4
      return {{-1, -1}, {{1, 17}, {0, 0}}};
  }
}

struct WeightOptions {
  int64_t gap = 0;  // elements between lines, rounded up to whole blocks
  Code scales = Code::f32, zeros = Code::u8;
  float global_scale = 1;
};

// Owns what `view` points to.
struct RandomWeights {
  GuardedBuffer codes, scales, zeros;
  WeightView view;
};

// `count` bytes: random ones, or (a line in four) only those at the ends of some code's range.
inline void fill_bytes(char* p, int64_t count, Rng& rng) {
  constexpr uint8_t kEnds[] = {0x00, 0xff, 0x80, 0x7f, 0x08, 0xf7, 0xf0, 0x0f};
  const bool ends = rng.below(4) == 0;
  for (int64_t i = 0; i < count; ++i)
    p[i] = char(ends ? kEnds[rng.below(8)] : uint8_t(rng.next() >> 33));
}

// Elements of a line of codes, finite in every code.
inline void fill_codes(char* p, Code c, int64_t elements, Rng& rng) {
  if (is_float(c)) return fill_random(p, c, elements, 1, rng);
  const int64_t bytes = line_bytes(c, elements), block = code_block(c).bytes;
  fill_bytes(p, bytes, rng);
  if (c == Code::e4m3 || c == Code::e8m0) {
    for (int64_t i = 0; i < bytes; ++i) {
      if ((p[i] & 0x7f) == 0x7f) p[i] = char(p[i] ^ 1);
    }
  }
  if (!is_gguf(c)) return;
  const BlockMap map = block_map(c);
  for (int64_t b = 0; b < bytes; b += block) {
    for (const int at : map.half) {
      const float f = rng.below(9) == 0 ? 0.0f : rng.uniform(-0.05f, 0.05f);
      if (at >= 0) store_from_float(p + b + at, Code::f16, 0, f);
    }
    if (map.half[0] < 0) p[b] = char(115 + rng.below(12));
  }
}

// A matrix of scales or zero points whose last byte is followed by a guard page.
inline GuardedBuffer fill_grid(MatrixView& m, Code c, int64_t rows, int64_t cols, int64_t gap,
                               bool zeros, Rng& rng) {
  const int64_t block = code_block(c).elements;
  m = {nullptr, c, rows, cols, round_up(cols + gap, block)};
  GuardedBuffer buffer(size_t((rows - 1) * line_bytes(c, m.stride) + line_bytes(c, cols)));
  m.data = buffer.data();
  for (int64_t r = 0; r < rows; ++r) {
    char* p = buffer.data() + r * line_bytes(c, m.stride);
    if (zeros) {
      fill_bytes(p, line_bytes(c, cols), rng);
      continue;
    }
    for (int64_t i = 0; i < cols; ++i) {
      if (is_float(c)) {
        store_from_float(p, c, i, rng.below(9) == 0 ? 0.0f : rng.uniform(-0.1f, 0.1f));
      } else {  // e8m0: about 2^-16 .. 2^4; e4m3: any finite one
        p[i] = char(c == Code::e8m0 ? 111 + rng.below(20) : int64_t(rng.next() % 127));
        if (c == Code::e4m3 && rng.below(2) != 0) p[i] = char(p[i] | 0x80);
      }
    }
  }
  return buffer;
}

// The next K (rows) or N (columns) that the format can hold.
inline int64_t whole_inputs(const Format& f, Layout layout, int64_t k) {
  const CodeBlock b = code_block(f.code);
  if (layout == Layout::columns) return round_up(k, b.lines);
  return is_gguf(f.code) ? round_up(k, b.elements) : k;
}

// n x k weights; k as whole_inputs gives it. Every value is finite.
inline RandomWeights random_weights(const Format& f, Layout layout, int64_t n, int64_t k,
                                    const WeightOptions& o, Rng& rng) {
  const CodeBlock b = code_block(f.code);
  const bool rows = layout == Layout::rows;
  const int64_t length = rows ? k : n, lines = ceil_div(rows ? n : k, b.lines);
  WeightView w{&f, layout, n, k, round_up(length + o.gap, b.elements)};
  const int64_t step = line_bytes(f.code, w.stride), bytes = line_bytes(f.code, length);
  GuardedBuffer codes(lines == 0 ? 0 : size_t((lines - 1) * step + bytes));
  for (int64_t i = 0; i < lines; ++i) {
    fill_codes(codes.data() + i * step, f.code, length, rng);
  }
  w.data = codes.data();
  GuardedBuffer scales(0), zeros(0);
  if (f.scaled() && n > 0 && k > 0) {
    const int64_t along = ceil_div(n, f.scale_rows), across = ceil_div(k, f.scale_cols);
    const int64_t r = rows ? along : across, c = rows ? across : along;
    scales = fill_grid(w.scales, o.scales, r, c, o.gap, false, rng);
    if (f.stored_zeros()) zeros = fill_grid(w.zeros, o.zeros, r, c, o.gap, true, rng);
    w.global_scale = o.global_scale;
  }
  return {std::move(codes), std::move(scales), std::move(zeros), w};
}

// Makes W[n, k] a NaN, with whatever shares its scale. False where the code has no NaN.
inline bool set_nan(RandomWeights& w, int64_t n, int64_t k) {
  const WeightView& v = w.view;
  const Format& f = *v.format;
  const bool rows = v.layout == Layout::rows;
  const float nan = NAN;
  if (f.scaled()) {
    const int64_t a = n / f.scale_rows, b = k / f.scale_cols;
    char* p = w.scales.data() + (rows ? a : b) * line_bytes(v.scales.code, v.scales.stride);
    const int64_t i = rows ? b : a;
    if (is_float(v.scales.code)) {
      store_from_float(p, v.scales.code, i, nan);
    } else {
      p[i] = char(0xff);
    }
    return true;
  }
  const int64_t line = rows ? n : k, i = rows ? k : n;
  const CodeBlock b = code_block(f.code);
  char* p = w.codes.data() + line / b.lines * line_bytes(f.code, v.stride);
  if (is_float(f.code)) {
    store_from_float(p, f.code, i, nan);
  } else if (f.code == Code::e4m3) {
    p[i] = char(0xff);
  } else if (is_gguf(f.code) && block_map(f.code).half[0] >= 0) {
    store_from_float(p + i / b.elements * b.bytes + block_map(f.code).half[0], Code::f16, 0, nan);
  } else {
    return false;
  }
  return true;
}

// What roundings of W[n, k] are relative to, for k in [0, K): with s the scale, q the code and z
// the zero point (or minimum over s), |s q| + |s z|, as they may enter a sum apart; unsigned codes
// without a minimum of their own also |s| times the middle of their range, from which they may be
// counted (8 for all codes of up to 4 bits).
inline std::vector<double> weight_parts(const WeightView& w, int64_t n) {
  const Format& f = *w.format;
  const CodeBlock b = code_block(f.code);
  std::vector<double> out(static_cast<size_t>(w.k));
  std::vector<float> base(static_cast<size_t>(w.k), 0.0f);
  if (is_gguf(f.code)) {  // the same line with every code 0
    const int64_t bytes = line_bytes(f.code, w.k);
    std::vector<char> line(line_at(w, n), line_at(w, n) + bytes);
    const BlockMap map = block_map(f.code);
    for (int64_t at = 0; at < bytes; at += b.bytes) {
      for (const auto& run : map.codes)
        std::memset(line.data() + at + run[0], 0, size_t(run[1] - run[0]));
    }
    WeightView zero = w;
    zero.data = line.data();
    if (w.k > 0) decode_line(zero, 0, 0, w.k, base.data());
  }
  const bool rows = w.layout == Layout::rows;
  const bool bytes = f.code == Code::u8 || f.code == Code::u8_gptq;
  for (int64_t k = 0; k < w.k; ++k) {
    double scale = 0, zero = double(base[size_t(k)]), middle = 0;
    if (f.scaled()) {
      const int64_t along = n / f.scale_rows, across = k / f.scale_cols;
      const int64_t r = rows ? along : across, c = rows ? across : along;
      scale = double(scale_at(w.scales, r, c) * w.global_scale);
      if (f.zeros != ZeroRule::none) middle = bytes ? 128 : 8;
      if (f.zeros == ZeroRule::middle) zero = -middle * scale;
      if (f.stored_zeros()) zero = -double(zero_at(w.zeros, r, c) + 1) * scale;
    }
    out[size_t(k)] = std::fabs(double(decode_weight(w, n, k)) - zero) + std::fabs(zero) +
                     middle * std::fabs(scale);
  }
  return out;
}

}  // namespace cpumoe::testing
