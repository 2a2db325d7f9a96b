// What weight bytes mean. A Format is a row of formats.inc; a WeightView is bytes with a meaning.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "base/types.h"

namespace cpumoe {

inline constexpr int32_t kWhole = INT32_MAX;  // of a scale grid: one scale for the whole extent

// What is subtracted from an integer code: nothing, the middle 2^(bits - 1) of its range, a stored
// zero point, or a stored one plus 1.
enum class ZeroRule : uint8_t { none, middle, stored, stored_less_one };
enum class Layout : uint8_t { rows, columns };
// What activations are rounded to inside a product. bf16: to nearest even; below 2^-126 they may count
// as zero. int8: per token and 32 inputs, scale max / 127.
enum class ActClass : uint8_t { fp32, bf16, int8 };

inline const char* act_class_name(ActClass c) {
  return c == ActClass::fp32 ? "fp32" : c == ActClass::bf16 ? "bf16" : "int8";
}
const char* zero_rule_name(ZeroRule rule);

struct Format {
  const char* name;
  Code code;
  int32_t scale_rows, scale_cols;  // features and inputs that share a scale; 0: no scales
  ZeroRule zeros;
  ActClass act_class;  // default, where this CPU has kernels for it (class_for, dot.h)

  bool scaled() const { return scale_rows != 0; }
  bool stored_zeros() const { return zeros >= ZeroRule::stored; }
};

// The table, its length, and look-up by name (null when unknown).
const Format* formats(int* count);
const Format* find_format(std::string_view name);

// One weight matrix W[N, K] (N output features, K inputs) that somebody else owns.
// rows:    line n = feature n, its K inputs are contiguous.
// columns: line k = input k, its N features are contiguous.
// A line starts `stride` elements after the one before it (a multiple of the code's block); codes
// whose blocks span several lines keep them side by side, element for element.
//
//   W[n, k] = (code[n, k] - zero[g]) * (scale[g] * global_scale)    g = (n / scale_rows,
//                                                                        k / scale_cols)
// the difference exactly, each product rounded to fp32. Formats without scales: the code alone.
// scales, zeros: [groups of features, groups of inputs] in rows, transposed in columns. Scales are
// f32, f16, bf16, e8m0 or e4m3; zeros u8, u4, u2 or u4_awq.
struct WeightView {
  const Format* format = nullptr;
  Layout layout = Layout::rows;
  int64_t n = 0, k = 0, stride = 0;  // elements
  const void* data = nullptr;
  MatrixView scales = {}, zeros = {};
  float global_scale = 1;
};

// Bytes of `elements` neighbours of a line; of all lines that share blocks with it.
CPUMOE_INLINE int64_t line_bytes(Code c, int64_t elements) {
  const CodeBlock b = code_block(c);
  return ceil_div(elements, b.elements) * b.bytes;
}
// Behind a matrix's last byte.
CPUMOE_INLINE const char* end_of(const MatrixView& m) {
  return static_cast<const char*>(m.data) + (m.rows - 1) * line_bytes(m.code, m.stride) +
         line_bytes(m.code, m.cols);
}
// Where line `line` (a multiple of the code's lines) of w begins.
CPUMOE_INLINE const char* line_at(const WeightView& w, int64_t line) {
  const Code c = w.format->code;
  return static_cast<const char*>(w.data) + line / code_block(c).lines * line_bytes(c, w.stride);
}
// Where feature n begins: its line, or its block in line 0.
CPUMOE_INLINE const char* feature_at(const WeightView& w, int64_t n) {
  if (w.layout == Layout::rows) return line_at(w, n);
  return static_cast<const char*>(w.data) + line_bytes(w.format->code, n);
}
// Words of GPTQ and AWQ, which were published in the columns layout only.
CPUMOE_INLINE bool columns_only(Code c) { return c >= Code::u4_gptq && c <= Code::u4_awq; }
// Whether codes are multiplied as integers: not floats, nor codes that were never published in
// columns.
CPUMOE_INLINE bool has_integers(Code c, Layout layout) {
  return layout == Layout::rows ? !is_float(c) && c != Code::e4m3 : columns_only(c);
}
// Features [n0, n0 + n) of w. n0 must be a multiple of feature_step(w).
WeightView features_of(const WeightView& w, int64_t n0, int64_t n);
// Features that cannot be told apart by an address: those of a block, a scale or a byte of zeros.
int64_t feature_step(const WeightView& w);

// Bytes of the codes, scales and zero points.
int64_t weight_bytes(const WeightView& w);

// Empty, or what must hold for the format to lie in this layout ("in format q4_k must be ...").
std::string layout_fault(const Format& f, Layout layout);
// Empty, or what must hold for w to be read ("scales must be [4, 2] ...; got ..."): format and data
// present, the stride holds a line of whole blocks, scales and zeros of the grid's shape and a code
// that is listed above.
std::string weight_fault(const WeightView& w);

// Reference decoders, any format: W[n, k], or elements [i0, i1) of line `line`, as fp32. Slow; the
// oracle of every kernel test.
float decode_weight(const WeightView& w, int64_t n, int64_t k);
void decode_line(const WeightView& w, int64_t line, int64_t i0, int64_t i1, float* out);

// One element of a matrix of scales (any code above) or of zero points.
float scale_at(const MatrixView& scales, int64_t row, int64_t col);
int32_t zero_at(const MatrixView& zeros, int64_t row, int64_t col);

}  // namespace cpumoe
