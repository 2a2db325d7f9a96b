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

}  // namespace

void dot_plain_rows_f32(const DotArgs& a) { rows<Code::f32>(a); }
void dot_plain_rows_f16(const DotArgs& a) { rows<Code::f16>(a); }
void dot_plain_rows_bf16(const DotArgs& a) { rows<Code::bf16>(a); }
void dot_plain_columns_f32(const DotArgs& a) { columns<Code::f32>(a); }
void dot_plain_columns_f16(const DotArgs& a) { columns<Code::f16>(a); }
void dot_plain_columns_bf16(const DotArgs& a) { columns<Code::bf16>(a); }

size_t scratch_plain(int64_t, int64_t, int64_t) { return 0; }

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
