// Reference kernels: plain loops, any number of tokens, activations in `rows`.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"

namespace cpumoe::scalar {
namespace {

template <Code C>
void rows(const DotArgs& a) {
  const WeightView& w = *a.w;
  const float* act = static_cast<const float*>(a.act);
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* x = act + Rows::pos(m, 0, w.k);
    for (int64_t n = a.n0; n < a.n1; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < w.k; ++k) sum += load_as_float(w.data, C, n * w.stride + k) * x[k];
      a.c[(m - a.m0) * a.c_stride + (n - a.n0)] = sum;
    }
  }
}

template <Code C>
void columns(const DotArgs& a) {
  const WeightView& w = *a.w;
  const float* act = static_cast<const float*>(a.act);
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const float* x = act + Rows::pos(m, 0, w.k);
    float* c = a.c + (m - a.m0) * a.c_stride;
    for (int64_t n = a.n0; n < a.n1; ++n) c[n - a.n0] = 0;
    for (int64_t k = 0; k < w.k; ++k) {
      for (int64_t n = a.n0; n < a.n1; ++n) {
        c[n - a.n0] += load_as_float(w.data, C, k * w.stride + n) * x[k];
      }
    }
  }
}

constexpr int64_t kPart = 256;  // elements decoded at a time; whole blocks of every code

// Any code in class fp32, and every code in class int8, whose sums run in groups of kActGroup.
// value(x, k): activation k of the token, without its scale; scale(x, k): of k's group.
template <class Value, class Scale>
CPUMOE_INLINE void rows_decoded(const DotArgs& a, Value value, Scale scale) {
  const WeightView& w = *a.w;
  float part[kPart];
  for (int64_t n = a.n0; n < a.n1; ++n) {
    for (int64_t m = a.m0; m < a.m1; ++m) a.c[(m - a.m0) * a.c_stride + (n - a.n0)] = 0;
    for (int64_t k0 = 0; k0 < w.k; k0 += kPart) {
      const int64_t count = min64(kPart, w.k - k0);
      decode_line(w, n, k0, k0 + count, part);
      for (int64_t m = a.m0; m < a.m1; ++m) {
        float& c = a.c[(m - a.m0) * a.c_stride + (n - a.n0)];
        for (int64_t g = 0; g < count; g += kActGroup) {
          float sum = 0;
          for (int64_t i = g; i < min64(count, g + kActGroup); ++i) {
            sum += part[i] * value(m, k0 + i);
          }
          c += sum * scale(m, k0 + g);
        }
      }
    }
  }
}
template <class Value, class Scale>
CPUMOE_INLINE void columns_decoded(const DotArgs& a, Value value, Scale scale) {
  const WeightView& w = *a.w;
  float part[kPart];
  for (int64_t n0 = a.n0; n0 < a.n1; n0 += kPart) {
    const int64_t count = min64(kPart, a.n1 - n0);
    for (int64_t m = a.m0; m < a.m1; ++m) {
      for (int64_t i = 0; i < count; ++i) a.c[(m - a.m0) * a.c_stride + (n0 - a.n0) + i] = 0;
    }
    for (int64_t k = 0; k < w.k; ++k) {
      decode_line(w, k, n0, n0 + count, part);
      for (int64_t m = a.m0; m < a.m1; ++m) {
        float* c = a.c + (m - a.m0) * a.c_stride + (n0 - a.n0);
        const float x = value(m, k) * scale(m, k);
        for (int64_t i = 0; i < count; ++i) c[i] += part[i] * x;
      }
    }
  }
}

template <Layout L>
void decoded(const DotArgs& a) {
  const float* act = static_cast<const float*>(a.act);
  const auto value = [&](int64_t m, int64_t k) { return act[Rows::pos(m, k, a.w->k)]; };
  const auto scale = [](int64_t, int64_t) { return 1.0f; };
  L == Layout::rows ? rows_decoded(a, value, scale) : columns_decoded(a, value, scale);
}
template <Layout L>
void decoded_int8(const DotArgs& a) {
  const char* act = static_cast<const char*>(a.act);
  const auto value = [&](int64_t m, int64_t k) {
    return float(int8_t(act[Int8Rows::code(m, k, a.w->k)]));
  };
  const auto scale = [&](int64_t m, int64_t k) {
    return load_as_float(act + Int8Rows::scale(m, k / kActGroup, a.w->k), Code::f32, 0);
  };
  L == Layout::rows ? rows_decoded(a, value, scale) : columns_decoded(a, value, scale);
}

// Inputs [k0, k1) of token m, read by get(k), into its line.
template <class F>
CPUMOE_INLINE void write_int8_line(char* dst, int64_t m, int64_t k0, int64_t k1, int64_t inputs,
                                   F get) {
  for (int64_t k = k0; k < k1; k += kActGroup) {
    float x[kActGroup];
    int8_t codes[kActGroup];
    const int64_t count = min64(kActGroup, k1 - k);
    for (int64_t i = 0; i < count; ++i) x[i] = get(k + i);
    const float scale = quantize_group(x, count, codes);
    memcpy(dst + Int8Rows::code(m, k, inputs), codes, kActGroup);
    memcpy(dst + Int8Rows::scale(m, k / kActGroup, inputs), &scale, 4);
  }
  if (k1 != inputs) return;
  const int64_t end = Int8Rows::scale(m, ceil_div(inputs, kActGroup), inputs);
  memset(dst + end, 0, size_t(Int8Rows::code(m + 1, 0, inputs) - end));
}

template <Layout L, Code C>
CPUMOE_INLINE void plain(const DotArgs& a) {
  if constexpr (!is_float(C)) {
    decoded<L>(a);
  } else if constexpr (L == Layout::rows) {
    rows<C>(a);
  } else {
    columns<C>(a);
  }
}

}  // namespace

#define CPUMOE_CODE(code, layout)                                                          \
  void dot_plain_##layout##_##code(const DotArgs& a) { plain<Layout::layout, Code::code>(a); } \
  void dot_plain_int8_##layout##_##code(const DotArgs& a) { decoded_int8<Layout::layout>(a); }
#include "kernels/dot/codes.inc"
#undef CPUMOE_CODE

size_t scratch_plain(int64_t, int64_t, int64_t) { return 0; }
size_t scratch_plain_int8(int64_t, int64_t, int64_t) { return 0; }

void pack_rows(const PackArgs& a) {
  float* dst = static_cast<float*>(a.dst);
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    float* line = dst + Rows::pos(m, 0, inputs);
    for (int64_t k = 0; k < inputs; ++k) {
      line[k] = load_as_float(a.src.data, a.src.code, row * a.src.stride + k);
    }
    for (int64_t k = inputs; k < round_up(inputs, 16); ++k) line[k] = 0;
  }
}

void mid_rows(const StoreMidArgs& a) {
  float* dst = static_cast<float*>(a.dst);
  const bool n_major = a.order == TileOrder::n_major;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    for (int64_t n = a.n0; n < a.n1; ++n) {
      const int64_t i =
          n_major ? (n - a.n0) * a.stride + (m - a.m0) : (m - a.m0) * a.stride + (n - a.n0);
      dst[Rows::pos(m, n, a.k)] = a.tile[i];
    }
    if (a.n1 != a.k) continue;
    for (int64_t k = a.k; k < round_up(a.k, 16); ++k) dst[Rows::pos(m, k, a.k)] = 0;
  }
}

void pack_int8_rows(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    write_int8_line(static_cast<char*>(a.dst), m, 0, inputs, inputs, [&](int64_t k) {
      return load_as_float(a.src.data, a.src.code, row * a.src.stride + k);
    });
  }
}

void mid_int8_rows(const StoreMidArgs& a) {
  const bool n_major = a.order == TileOrder::n_major;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    write_int8_line(static_cast<char*>(a.dst), m, a.n0, a.n1, a.k, [&](int64_t n) {
      const int64_t i = n - a.n0, j = m - a.m0;
      return a.tile[n_major ? i * a.stride + j : j * a.stride + i];
    });
  }
}

void out_m_major(const StoreOutArgs& a) {
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m;
    const float* tile = a.tile + (m - a.m0) * a.stride;
    for (int64_t n = a.n0; n < a.n1; ++n) {
      float v = tile[n - a.n0];
      if (a.bias != nullptr) v += a.bias[n - a.n0];
      if (a.scale != nullptr) v *= a.scale[m];
      float* out = a.out + row * a.out_stride + n;
      *out = a.accumulate ? *out + v : v;
    }
  }
}

}  // namespace cpumoe::scalar
