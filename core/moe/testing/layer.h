// Random experts behind guard pages, and the float64 operator with its error bound. For tests only.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"
#include "kernels/dot/quantize.h"
#include "kernels/testing/tolerance.h"
#include "kernels/testing/weights.h"
#include "machine/machine.h"
#include "moe/moe.h"

namespace cpumoe::testing {

enum class Fusion : uint8_t { separate, fused, interleaved, ungated };

struct LayerShape {
  int64_t experts = 6, hidden = 97, inter = 33;
  const char* format = "fp32";
  Layout layout = Layout::rows;
  Fusion fusion = Fusion::separate;
  bool biases = false;
  ActKind kind = ActKind::silu;
  float limit = std::numeric_limits<float>::infinity();
};

// Experts with storage: every matrix of every expert ends at its own guard page.
struct Layer {
  LayerShape shape;
  std::vector<WeightView> gate, up, down;
  std::vector<VectorView> gate_bias, up_bias, down_bias;
  std::vector<GuardedBuffer> storage;
  std::vector<int64_t> owner;  // expert of each buffer
  std::vector<RandomWeights> quantized;

  Layer(const LayerShape& s, uint64_t seed) : shape(s) {
    Rng rng(seed);
    const Format* format = find_format(s.format);
    const bool rows = s.layout == Layout::rows, gated = s.fusion != Fusion::ungated;
    const bool fused = s.fusion == Fusion::fused, inter2 = s.fusion == Fusion::interleaved;
    const auto matrix = [&](int64_t e, int64_t n, int64_t k) {
      if (!is_float(format->code)) {
        const Code scales = format->scale_cols == 16 ? Code::e4m3 : Code::bf16;
        quantized.push_back(random_weights(*format, s.layout, n, k, {0, scales}, rng));
        return quantized.back().view;
      }
      const int64_t size = int64_t(code_bits(format->code)) / 8;
      storage.emplace_back(size_t(n * k * size));
      owner.push_back(e);
      fill_random(storage.back().data(), format->code, n * k, 1 / std::sqrt(float(k)), rng);
      return WeightView{format, s.layout, n, k, rows ? k : n, storage.back().data()};
    };
    const auto bias = [&](int64_t e, int64_t n, Code code, int64_t step) {
      storage.emplace_back(size_t((n - 1) * step + 1) * code_bits(code) / 8);
      owner.push_back(e);
      fill_random(storage.back().data(), code, (n - 1) * step + 1, 0.5f, rng);
      return VectorView{storage.back().data(), code, n, step};
    };
    storage.reserve(size_t(s.experts * 6));
    for (int64_t e = 0; e < s.experts; ++e) {
      gate.push_back(matrix(e, fused || inter2 ? 2 * s.inter : s.inter, s.hidden));
      if (fused) {  // both are views into one [2I, H] or [H, 2I]
        up.push_back(features_of(gate.back(), s.inter, s.inter));
        gate.back() = features_of(gate.back(), 0, s.inter);
      } else if (gated && !inter2) {
        up.push_back(matrix(e, s.inter, s.hidden));
      }
      down.push_back(matrix(e, s.hidden, s.inter));
      if (!s.biases) continue;
      gate_bias.push_back(bias(e, inter2 ? 2 * s.inter : s.inter, Code::f32, 1));
      if (gated && !inter2) up_bias.push_back(bias(e, s.inter, Code::bf16, 2));
      down_bias.push_back(bias(e, s.hidden, Code::f16, 1));
    }
  }
  ExpertsView view() const {
    ExpertsView v;
    v.experts = shape.experts;
    v.hidden = shape.hidden;
    v.inter = shape.inter;
    v.interleaved = shape.fusion == Fusion::interleaved;
    v.gate = gate;
    v.up = up;
    v.down = down;
    v.gate_bias = gate_bias;
    v.up_bias = up_bias;
    v.down_bias = down_bias;
    v.act.kind = shape.kind;
    v.act.limit = shape.limit;
    return v;
  }
};

// A value and how far an fp32 computation of it may be off.
struct Bounded {
  double value = 0, error = 0;
};

inline double element(const VectorView& v, int64_t i) {
  return double(load_as_float(v.data, v.code, i * v.step));
}

// W[n, :] . x + bias: the error of the sum, and what the errors of x become. Codes with scales meet
// a few roundings more than one product each (scale times global scale, times the activation's
// scale, zero points apart): weight_parts is what they are relative to.
inline Bounded dot(const WeightView& w, int64_t n, const std::vector<Bounded>& x,
                   const double* bias) {
  double sum = bias ? *bias : 0, magnitude = std::fabs(sum), carried = 0;
  const bool plain = is_float(w.format->code);
  const std::vector<double> parts = plain ? std::vector<double>() : weight_parts(w, n);
  std::vector<float> line(static_cast<size_t>(w.k));
  if (w.layout == Layout::rows) {
    decode_line(w, n, 0, w.k, line.data());
  } else {
    for (int64_t k = 0; k < w.k; ++k) line[size_t(k)] = decode_weight(w, n, k);
  }
  for (int64_t k = 0; k < w.k; ++k) {
    const double v = double(line[size_t(k)]);
    const double size = plain ? std::fabs(v) : parts[size_t(k)];
    sum += v * x[size_t(k)].value;
    magnitude += size * (std::fabs(x[size_t(k)].value) + x[size_t(k)].error);
    carried += std::fabs(v) * x[size_t(k)].error;
  }
  return {sum, carried + dot_bound(w.k + 1 + (plain ? 0 : 8), magnitude)};
}

// What class bf16 makes of activations. Rounding keeps the order of numbers: it is the interval's ends
// that are rounded.
inline std::vector<Bounded> halved(const std::vector<Bounded>& x) {
  const auto half = [](double v) {
    uint16_t bits;
    store_from_float(&bits, Code::bf16, 0, float(v));
    return double(load_as_float(&bits, Code::bf16, 0));
  };
  std::vector<Bounded> out;
  for (const Bounded& v : x) {
    const double value = half(v.value);
    out.push_back({value, std::fmax(half(v.value + v.error) - value,
                                    value - half(v.value - v.error))});
  }
  return out;
}

// What class int8 makes of activations (quantize.h). A value whose error may carry it over the
// border between two codes may be off by a whole one.
inline std::vector<Bounded> quantized(const std::vector<Bounded>& x) {
  std::vector<Bounded> out;
  for (size_t g = 0; g < x.size(); g += size_t(kActGroup)) {
    const size_t end = std::min(x.size(), g + size_t(kActGroup));
    double amax = 0, error = 0;
    for (size_t i = g; i < end; ++i) {
      amax = std::fmax(amax, std::fabs(x[i].value));
      error = std::fmax(error, x[i].error);
    }
    if (amax < double(kActTiny)) {
      for (size_t i = g; i < end; ++i) out.push_back({0, amax + error + 127 * double(kActTiny)});
      continue;
    }
    const double scale = double(float(amax) / 127.0f), off = error / 127 + gamma(2) * scale;
    for (size_t i = g; i < end; ++i) {
      const double r = x[i].value / scale, code = std::nearbyint(r);
      const double doubt = (x[i].error + std::fabs(r) * off) / scale + gamma(4) * std::fabs(r);
      const bool border = 0.5 - std::fabs(r - code) <= doubt;
      out.push_back({code * scale, std::fabs(code) * off + (border ? scale + off : 0)});
    }
  }
  return out;
}

// f of act.h and its greatest slope within `error` of x.
inline Bounded activation(ActKind kind, double alpha, const Bounded& x) {
  const double v = x.value;
  double f = 0, slope = 1.13;  // silu, gelu and x sigmoid(alpha x) stay below
  switch (kind) {
    case ActKind::identity:
      f = v, slope = 1;
      break;
    case ActKind::silu:
      f = v / (1 + std::exp(-v));
      break;
    case ActKind::swiglu_oai:
      f = v / (1 + std::exp(-alpha * v));
      break;
    case ActKind::gelu_erf:
      f = 0.5 * v * std::erfc(-v * M_SQRT1_2);
      break;
    case ActKind::gelu_tanh:
      f = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
      break;
    case ActKind::relu:
      f = std::fmax(v, 0), slope = 1;
      break;
    case ActKind::relu2:
      f = v > 0 ? v * v : 0, slope = 2 * (std::fabs(v) + x.error);
      break;
  }
  const double carried = slope * x.error;
  return {f, carried + gamma(8) * (std::fabs(f) + carried) + 4 * kTiny};  // 4 ulp: 8 roundoffs
}

inline Bounded clamped(Bounded x, double low, double high) {
  return {std::fmin(std::fmax(x.value, low), high), x.error};
}

inline Bounded times(const Bounded& a, const Bounded& b) {
  const double error = a.error * (std::fabs(b.value) + b.error) + std::fabs(a.value) * b.error;
  return {a.value * b.value, error + gamma(1) * (std::fabs(a.value * b.value) + error) + kTiny};
}

// Expert e of one token: [hidden].
inline std::vector<Bounded> expert(const ExpertsView& x, int64_t e,
                                   const std::vector<Bounded>& tokens,
                                   std::optional<ActClass> act_class) {
  const size_t i = size_t(e);
  static const IsaSet isa = probe_machine().isa;
  const auto operand = [&](const WeightView& w, const std::vector<Bounded>& v) {
    const ActClass c = class_for(*w.format, w.layout, act_class, isa);
    return c == ActClass::fp32 ? v : c == ActClass::int8 ? quantized(v) : halved(v);
  };
  const std::vector<Bounded> in = operand(x.gate[i], tokens);
  const std::vector<Bounded> in_up = x.up.empty() ? in : operand(x.up[i], tokens);
  const auto bias = [](std::span<const VectorView> b, size_t at, int64_t n, double* value) {
    if (b.empty()) return static_cast<const double*>(nullptr);
    *value = element(b[at], n);
    return static_cast<const double*>(value);
  };
  std::vector<Bounded> mid, out;
  double b = 0;
  for (int64_t n = 0; n < x.inter; ++n) {
    const int64_t g = x.interleaved ? 2 * n : n;
    Bounded gate = dot(x.gate[i], g, in, bias(x.gate_bias, i, g, &b));
    if (!x.gated()) {
      mid.push_back(activation(x.act.kind, double(x.act.alpha), gate));
      continue;
    }
    Bounded up = x.interleaved ? dot(x.gate[i], g + 1, in, bias(x.gate_bias, i, g + 1, &b))
                               : dot(x.up[i], n, in_up, bias(x.up_bias, i, n, &b));
    const double limit = double(x.act.limit);
    gate = clamped(gate, -INFINITY, limit);
    up = clamped(up, -limit, limit);
    if (x.act.kind == ActKind::swiglu_oai) {
      up.value += 1;
      up.error += gamma(1) * (std::fabs(up.value) + up.error);
    }
    mid.push_back(times(activation(x.act.kind, double(x.act.alpha), gate), up));
  }
  mid = operand(x.down[i], mid);
  for (int64_t n = 0; n < x.hidden; ++n) {
    out.push_back(dot(x.down[i], n, mid, bias(x.down_bias, i, n, &b)));
  }
  return out;
}

// Unit roundoff of a code, and half the spacing of its subnormals.
inline Bounded rounded(const Bounded& x, Code code) {
  const double u = code == Code::bf16 ? 0x1p-8 : code == Code::f16 ? 0x1p-11 : 0;
  const double tiny = code == Code::f16 ? 0x1p-25 : kTiny;
  return {x.value, x.error + u * (std::fabs(x.value) + x.error) + tiny};
}

// The operator in float64: out [tokens * hidden]. `base`: what is in out before, or null.
inline std::vector<Bounded> reference(std::span<const MoeBlock> blocks, const MatrixView& x,
                                      Code out_code, const std::vector<double>* base = nullptr,
                                      std::optional<ActClass> act_class = {}) {
  const size_t hidden = size_t(x.cols);
  std::vector<Bounded> out(size_t(x.rows) * hidden);
  std::vector<double> magnitude(out.size());
  std::vector<int64_t> terms(size_t(x.rows), 1);
  for (size_t i = 0; base && i < out.size(); ++i) {
    out[i].value = (*base)[i];
    magnitude[i] = std::fabs((*base)[i]);
  }
  for (const MoeBlock& block : blocks) {
    const RoutingPlan& plan = *block.plan;
    for (int64_t e = 0; e < plan.experts; ++e) {
      for (int32_t p = plan.offsets[size_t(e)]; p < plan.offsets[size_t(e) + 1]; ++p) {
        const size_t t = size_t(plan.token[size_t(p)]);
        std::vector<Bounded> in(hidden);
        for (size_t i = 0; i < hidden; ++i) {
          in[i].value = double(load_as_float(x.data, x.code, int64_t(t) * x.stride + int64_t(i)));
        }
        const Bounded weight{double(plan.weight[size_t(p)]), 0};
        const std::vector<Bounded> y = expert(*block.experts, e, in, act_class);
        for (size_t i = 0; i < hidden; ++i) {
          const Bounded v = times(y[i], weight);
          out[t * hidden + i].value += v.value;
          out[t * hidden + i].error += v.error;
          magnitude[t * hidden + i] += std::fabs(v.value) + v.error;
        }
        ++terms[t];
      }
    }
  }
  for (size_t i = 0; i < out.size(); ++i) {
    out[i].error += gamma(terms[i / hidden]) * magnitude[i];
    out[i] = rounded(out[i], out_code);
  }
  return out;
}

}  // namespace cpumoe::testing
