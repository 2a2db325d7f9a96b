// Reference kernel: one row at a time, the same blocks of keys as the vector kernels.
#include <cfloat>
#include <cmath>

#include "kernels/attend/attend.h"

namespace cpumoe::scalar {
namespace {

template <Code C>
void append(const AppendArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int64_t l = within_slab(a.slabs, a.position + t);
    const int64_t shift = slab_shift(a.slabs, a.position + t);
    const int64_t block = l / kKeyBlock * kKeyBlock * a.head_dim + l % kKeyBlock;
    char* const k_cache = static_cast<char*>(a.k_cache) + shift;
    for (int64_t d = 0; d < a.head_dim; ++d) {
      store_from_float(k_cache, C, block + d * kKeyBlock, a.k[t * a.stride + d]);
    }
    for (int64_t d = 0; a.v != nullptr && d < a.value_dim; ++d) {
      store_from_float(static_cast<char*>(a.v_cache) + shift, C,
                       l * value_stride(a.value_dim) + d, a.v[t * a.stride + d]);
    }
  }
}

// Scores of the seen keys [lo, hi) of one row; p[l - block] for l in the block.
template <Code C>
void scores(const AttendArgs& a, const float* q, int64_t block, int64_t lo, int64_t hi, float* p) {
  for (int64_t b = lo / kKeyBlock * kKeyBlock; b < hi; b += kKeyBlock) {
    float s[kKeyBlock] = {};
    const char* keys = static_cast<const char*>(a.k_cache) + slab_shift(a.slabs, b);
    const int64_t first = within_slab(a.slabs, b) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) {
      const float x = q[d] * a.scale;
      for (int64_t j = 0; j < kKeyBlock; ++j) {
        s[j] += x * load_as_float(keys, C, first + d * kKeyBlock + j);
      }
    }
    for (int64_t j = 0; j < kKeyBlock; ++j) {
      p[b - block + j] = a.softcap > 0 ? a.softcap * std::tanh(s[j] / a.softcap) : s[j];
    }
  }
}

// V[l, d].
template <Code C>
float value(const AttendArgs& a, int64_t l, int64_t d) {
  const int64_t shift = slab_shift(a.slabs, l);
  l = within_slab(a.slabs, l);
  if (a.v_cache != nullptr) {
    return load_as_float(static_cast<const char*>(a.v_cache) + shift, C,
                         l * value_stride(a.value_dim) + d);
  }
  return load_as_float(static_cast<const char*>(a.k_cache) + shift, C,
                       (l / kKeyBlock * a.head_dim + d) * kKeyBlock + l % kKeyBlock);
}

template <Code C>
void attend(const AttendArgs& a) {
  const int64_t lanes = value_stride(a.value_dim);
  float* acc = static_cast<float*>(a.scratch);
  float p[kScoreBlock];
  for (int64_t r = 0; r < a.tokens * a.group; ++r) {
    const int64_t i = r / a.group, g = r % a.group, last = a.position + i;
    const float* q = a.q + i * a.q_stride + g * a.head_dim;
    const int64_t end = min64(a.key1, last + 1);
    const int64_t begin = a.window > 0 ? max64(a.key0, last - a.window + 1) : a.key0;
    float top = a.sinks != nullptr ? a.sinks[g] : -FLT_MAX;
    float sum = a.sinks != nullptr ? 1.0f : 0.0f;
    for (int64_t d = 0; d < lanes; ++d) acc[d] = 0;
    for (int64_t block = a.key0; block < end; block += kScoreBlock) {
      const int64_t lo = max64(block, begin), hi = min64(block + kScoreBlock, end);
      if (lo >= hi) continue;
      scores<C>(a, q, block, lo, hi, p);
      float higher = top;
      for (int64_t l = lo; l < hi; ++l) {
        if (p[l - block] > higher) higher = p[l - block];
      }
      const float shrink = std::exp(top - higher);
      top = higher;
      sum *= shrink;
      for (int64_t d = 0; d < a.value_dim; ++d) acc[d] *= shrink;
      for (int64_t l = lo; l < hi; ++l) {
        const float w = std::exp(p[l - block] - top);
        sum += w;
        for (int64_t d = 0; d < a.value_dim; ++d) acc[d] += w * value<C>(a, l, d);
      }
    }
    if (a.out != nullptr) {
      float* out = a.out + i * a.out_stride + g * a.value_dim;
      for (int64_t d = 0; d < a.value_dim; ++d) out[d] = acc[d] / sum;
    } else {
      float* state = a.state + r * state_stride(a.value_dim);
      for (int64_t d = 0; d < lanes; ++d) state[d] = acc[d];
      state[lanes] = top;
      state[lanes + 1] = sum;
    }
  }
}

}  // namespace

void attend_f32(const AttendArgs& a) { attend<Code::f32>(a); }
void attend_f16(const AttendArgs& a) { attend<Code::f16>(a); }
void attend_bf16(const AttendArgs& a) { attend<Code::bf16>(a); }
void append_f32(const AppendArgs& a) { append<Code::f32>(a); }
void append_f16(const AppendArgs& a) { append<Code::f16>(a); }
void append_bf16(const AppendArgs& a) { append<Code::bf16>(a); }

}  // namespace cpumoe::scalar
