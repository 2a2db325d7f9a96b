#include "formats/format.h"

#include <cstddef>

#include "base/error.h"
#include "formats/gguf.h"

namespace cpumoe {
namespace {

constexpr Format kFormats[] = {
#define CPUMOE_FORMAT(name, code, scale_rows, scale_cols, zeros, act_class) \
  {#name, Code::code, scale_rows, scale_cols, ZeroRule::zeros, ActClass::act_class},
#include "formats/formats.inc"
#undef CPUMOE_FORMAT
};

// Feature of nibble j of an AWQ word, and back.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

uint32_t word_at(const char* p, int64_t i) {
  uint32_t u;
  memcpy(&u, p + i * 4, 4);
  return u;
}

// Code i of a plain code's line, as a number. `line` counts from the block's first.
float plain_code(Code c, const char* p, int64_t line, int64_t i) {
  const uint8_t* u = reinterpret_cast<const uint8_t*>(p);
  switch (c) {
    case Code::e4m3:
      return e4m3_to_float(u[i]);
    case Code::e8m0:
      return e8m0_to_float(u[i]);
    case Code::s8:
      return float(int8_t(u[i]));
    case Code::u8:
      return float(u[i]);
    case Code::u4:
      return float(u[i / 2] >> (i % 2 * 4) & 15);
    case Code::e2m1:
      return e2m1_to_float(uint32_t(u[i / 2]) >> (i % 2 * 4));
    case Code::u3: {
      const uint8_t* b = u + i / 8 * 3;
      return float((uint32_t(b[0]) | uint32_t(b[1]) << 8 | uint32_t(b[2]) << 16) >> (i % 8 * 3) &
                   7);
    }
    case Code::u2:
      return float(u[i / 4] >> (i % 4 * 2) & 3);
    case Code::u4_gptq:
      return float(word_at(p, i) >> (line * 4) & 15);
    case Code::u8_gptq:
      return float(word_at(p, i) >> (line * 8) & 255);
    case Code::u4_awq:
      return float(word_at(p, i / 8) >> (kAwqNibble[i % 8] * 4) & 15);
    default:
      return load_as_float(p, c, i);
  }
}

float middle_of(Code c) {
  switch (c) {
    case Code::u8:
    case Code::u8_gptq:
      return 128;
    case Code::u3:
      return 4;
    case Code::u2:
      return 2;
    default:
      return 8;
  }
}

int64_t groups(int64_t extent, int32_t size) { return ceil_div(extent, size); }

bool is_scale(Code c) { return is_float(c) || c == Code::e8m0 || c == Code::e4m3; }
bool is_zero(Code c) {
  return c == Code::u8 || c == Code::u4 || c == Code::u2 || c == Code::u4_awq;
}

// Elements of a matrix with a line of `cols` begin at this byte.
int64_t matrix_line_bytes(const MatrixView& m) { return line_bytes(m.code, m.stride); }

std::string grid_fault(const char* what, const MatrixView& m, int64_t rows, int64_t cols) {
  if (m.data == nullptr) return concat(what, " must be present, [", rows, ", ", cols, "]; got none");
  if (m.rows != rows || m.cols != cols)
    return concat(what, " must be [", rows, ", ", cols, "]; got [", m.rows, ", ", m.cols, "]");
  const int64_t block = code_block(m.code).elements;
  if (rows > 1 && (m.stride < cols || m.stride % block != 0)) {
    return concat(what, " must have a stride of at least ", cols, " elements in whole blocks of ",
                  block, "; got ", m.stride);
  }
  return "";
}

}  // namespace

const char* zero_rule_name(ZeroRule rule) {
  switch (rule) {
    case ZeroRule::none:
      return "none";
    case ZeroRule::middle:
      return "middle";
    case ZeroRule::stored:
      return "stored";
    case ZeroRule::stored_less_one:
      return "stored_less_one";
  }
  return "";
}

const Format* formats(int* count) {
  *count = int(sizeof kFormats / sizeof kFormats[0]);
  return kFormats;
}

const Format* find_format(std::string_view name) {
  for (const Format& f : kFormats) {
    if (name == f.name) return &f;
  }
  return nullptr;
}

float scale_at(const MatrixView& s, int64_t row, int64_t col) {
  return plain_code(s.code, static_cast<const char*>(s.data) + row * matrix_line_bytes(s), 0, col);
}

int32_t zero_at(const MatrixView& z, int64_t row, int64_t col) {
  const char* line = static_cast<const char*>(z.data) + row * matrix_line_bytes(z);
  return int32_t(plain_code(z.code, line, 0, col));
}

void decode_line(const WeightView& w, int64_t line, int64_t i0, int64_t i1, float* out) {
  const Format& f = *w.format;
  const CodeBlock block = code_block(f.code);
  const char* base = line_at(w, line / block.lines * block.lines);
  if (is_gguf(f.code)) {
    float values[kMaxBlock];
    for (int64_t i = i0; i < i1;) {
      decode_gguf_block(f.code, base + i / block.elements * block.bytes, values);
      const int64_t end = min64(i1, (i / block.elements + 1) * block.elements);
      for (; i < end; ++i) *out++ = values[i % block.elements];
    }
    return;
  }
  if (is_float(f.code)) {
    for (int64_t i = i0; i < i1; ++i) *out++ = load_as_float(base, f.code, i);
    return;
  }
  const bool rows = w.layout == Layout::rows;
  const int64_t line_group = f.scaled() ? line / (rows ? f.scale_rows : f.scale_cols) : 0;
  const int64_t group = !f.scaled() ? 0 : rows ? f.scale_cols : f.scale_rows;
  for (int64_t i = i0; i < i1; ++i) {
    float v = plain_code(f.code, base, line % block.lines, i);
    if (f.scaled()) {
      if (f.zeros == ZeroRule::middle) v -= middle_of(f.code);
      if (f.stored_zeros()) {
        v -= float(zero_at(w.zeros, line_group, i / group) +
                   (f.zeros == ZeroRule::stored_less_one ? 1 : 0));
      }
      const float scale = scale_at(w.scales, line_group, i / group) * w.global_scale;
      v *= scale;
    }
    *out++ = v;
  }
}

float decode_weight(const WeightView& w, int64_t n, int64_t k) {
  float v;
  if (w.layout == Layout::rows) {
    decode_line(w, n, k, k + 1, &v);
  } else {
    decode_line(w, k, n, n + 1, &v);
  }
  return v;
}

int64_t feature_step(const WeightView& w) {
  const Format& f = *w.format;
  if (f.scaled() && f.scale_rows != 1) return f.scale_rows == kWhole ? 1 : f.scale_rows;
  if (w.layout == Layout::rows) return 1;
  const int64_t zeros = f.stored_zeros() ? code_block(w.zeros.code).elements : 1;
  return max64(code_block(f.code).elements, zeros);
}

WeightView features_of(const WeightView& w, int64_t n0, int64_t n) {
  WeightView part = w;
  part.n = n;
  part.data = feature_at(w, n0);
  const int32_t size = w.format->scale_rows;
  for (MatrixView* m : {&part.scales, &part.zeros}) {
    if (m->data == nullptr) continue;
    const int64_t g0 = n0 / size, count = groups(n, size);
    const char* data = static_cast<const char*>(m->data);
    if (w.layout == Layout::rows) {
      m->data = data + g0 * matrix_line_bytes(*m);
      m->rows = count;
    } else {
      m->data = data + line_bytes(m->code, g0);
      m->cols = count;
    }
  }
  return part;
}

int64_t weight_bytes(const WeightView& w) {
  const Code c = w.format->code;
  const int64_t lines = w.layout == Layout::rows ? w.n : w.k;
  const int64_t length = w.layout == Layout::rows ? w.k : w.n;
  int64_t bytes = ceil_div(lines, code_block(c).lines) * line_bytes(c, length);
  for (const MatrixView* m : {&w.scales, &w.zeros}) {
    if (m->data != nullptr) bytes += m->rows * line_bytes(m->code, m->cols);
  }
  return bytes;
}

std::string layout_fault(const Format& f, Layout layout) {
  const bool rows = layout == Layout::rows;
  if (columns_only(f.code) && rows)
    return concat("in format ", f.name, " must be in columns layout; got rows");
  if (!rows && (is_gguf(f.code) || f.code == Code::u3))
    return concat("in format ", f.name, " must be in rows layout; got columns");
  return "";
}

std::string weight_fault(const WeightView& w) {
  if (w.format == nullptr) return "must have a format; got none";
  if (w.data == nullptr) return "must have data; got a null pointer";
  const Format& f = *w.format;
  const CodeBlock b = code_block(f.code);
  const bool rows = w.layout == Layout::rows;
  const int64_t length = rows ? w.k : w.n, lines = rows ? w.n : w.k;
  const std::string misplaced = layout_fault(f, w.layout);
  if (!misplaced.empty()) return misplaced;
  if (w.stride < length || w.stride % b.elements != 0) {
    return concat("in ", rows ? "rows" : "columns", " layout must have a stride of at least ",
                  length, " elements in whole blocks of ", b.elements, "; got ", w.stride);
  }
  if ((is_gguf(f.code) && length % b.elements != 0) || lines % b.lines != 0) {
    return concat("in format ", f.name, " must hold whole blocks of ", b.elements * b.lines,
                  " inputs; got ", w.k);
  }
  if (!f.scaled()) return "";
  const int64_t along = groups(w.n, f.scale_rows), across = groups(w.k, f.scale_cols);
  const int64_t r = rows ? along : across, c = rows ? across : along;
  std::string fault = grid_fault("scales", w.scales, r, c);
  if (fault.empty() && !is_scale(w.scales.code))
    fault = concat("scales must be fp32, fp16, bf16, e8m0 or e4m3; got ", code_name(w.scales.code));
  if (!fault.empty() || !f.stored_zeros()) return fault;
  fault = grid_fault("zeros", w.zeros, r, c);
  if (fault.empty() && !is_zero(w.zeros.code))
    fault = concat("zeros must be u8, u4, u2 or u4_awq; got ", code_name(w.zeros.code));
  return fault;
}

}  // namespace cpumoe
