#include "kernels/act/act.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/testing/tolerance.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr ActKind kKinds[] = {ActKind::identity,  ActKind::silu, ActKind::gelu_erf,
                              ActKind::gelu_tanh, ActKind::relu, ActKind::relu2,
                              ActKind::swiglu_oai};
constexpr double kUlps = 4;  // the contract of act.h

std::vector<const ActKernel*> kernels() {
  const char* forced = std::getenv("CPUMOE_ISA");
  const IsaSet isa = usable_isa(forced ? forced : "");
  std::vector<const ActKernel*> out;
  int count = 0;
  const ActKernel* all = act_kernels(&count);
  for (int i = 0; i < count; ++i) {
    if (isa.has(all[i].isa)) out.push_back(&all[i]);
  }
  return out;
}

double reference(ActKind kind, double x, double alpha) {
  switch (kind) {
    case ActKind::identity:
      return x;
    case ActKind::silu:
      return x < -800 ? -0.0 : x / (1 + std::exp(-x));
    case ActKind::swiglu_oai:
      return alpha * x < -600 ? -0.0 : x / (1 + std::exp(-alpha * x));
    case ActKind::gelu_erf:
      return 0.5 * x * std::erfc(-x * M_SQRT1_2);
    case ActKind::gelu_tanh: {
      const double w = 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
      return w < -600 ? -0.0 : x / (1 + std::exp(-w));
    }
    case ActKind::relu:
      return x > 0 ? x : 0;
    case ActKind::relu2:
      return x > 0 ? x * x : 0;
  }
  return 0;
}

double ulp(double v) {
  int e = 0;
  std::frexp(v, &e);
  return std::ldexp(1.0, std::max(e, -125) - 24);
}

ActArgs plain(ActKind kind, const float* gate, int64_t len, float* out) {
  ActArgs a{};
  a.act.kind = kind;
  a.gate = gate;
  a.lines = 1;
  a.len = len;
  a.in_stride = a.out_stride = len;
  a.out = out;
  return a;
}

std::vector<float> sweep() {
  std::vector<float> x = {0.0f,
                          -0.0f,
                          1e-45f,
                          -1e-45f,
                          1.17549435e-38f,
                          -1.17549435e-38f,
                          3.40282347e+38f,
                          -3.40282347e+38f,
                          88.7f,
                          -88.7f,
                          -103.9f,
                          -104.1f};
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 7919) {
    const float f = bits_to_float(uint32_t(bits));
    if (std::isfinite(f)) x.push_back(f);
  }
  for (int i = -200000; i <= 200000; ++i) {
    x.push_back(float(i) * 6.1e-4f);  // [-122, 122]
    x.push_back(float(i) * 2.3e-5f);  // [-4.6, 4.6]
  }
  return x;
}

TEST(every_kind_is_within_the_bound) {
  const std::vector<float> x = sweep();
  std::vector<float> y(x.size());
  for (const ActKernel* k : kernels()) {
    for (ActKind kind : kKinds) {
      for (float alpha : {1.702f, -0.3f}) {
        if (kind != ActKind::swiglu_oai && alpha < 0) continue;
        std::fill(y.begin(), y.end(), kNan);
        ActArgs a = plain(kind, x.data(), int64_t(x.size()), y.data());
        a.act.alpha = alpha;
        k->run(a);
        double worst = 0;
        float where = 0;
        for (size_t i = 0; i < x.size(); ++i) {
          const double r = reference(kind, x[i], alpha);
          const double e = testing::ulp_error(y[i], r);
          if (!(e <= worst)) {
            worst = e;
            where = x[i];
          }
        }
        if (std::getenv("CPUMOE_TEST_VERBOSE")) {
          printf("%s kind %d alpha %g: worst %.2f ulp at %.9g\n", k->name, int(kind), alpha, worst,
                 where);
        }
        CHECK_MSG(worst <= kUlps,
                  k->name << " kind " << int(kind) << ": " << worst << " ulp at " << where);
      }
    }
  }
}

TEST(nan_and_infinity) {
  const float x[] = {kNan, kInf, -kInf, 1.0f, -kNan, 2.0f, kNan, 3.0f, kInf};
  for (const ActKernel* k : kernels()) {
    for (ActKind kind : kKinds) {
      float y[9];
      k->run(plain(kind, x, 9, y));
      for (int i = 0; i < 9; ++i) CHECK_EQ(std::isnan(x[i]), std::isnan(y[i]));
      CHECK_EQ(y[1], kInf);
      CHECK_EQ(y[8], kInf);
      CHECK_EQ(y[2], (kind == ActKind::identity ? -kInf : 0.0f));  // the limit, as f(-large) = -0
    }
  }
}

// All shapes of a tile against one application at a time, with biases, limits and canaries.
TEST(tiles_biases_and_edges) {
  const int64_t in_stride = 48, out_stride = 32;
  for (const ActKernel* k : kernels()) {
    for (ActKind kind : kKinds) {
      for (int shape = 0; shape < 64; ++shape) {
        const bool gated = shape & 1, interleaved = shape & 2, by_line = shape & 4;
        const bool bias = shape & 8, limit = shape & 16, in_place = shape & 32;
        if ((interleaved && (!gated || in_place)) || (limit && !gated)) continue;
        for (int64_t len : {0, 1, 3, 7, 8, 9, 15, 16, 17, 23}) {
          const int64_t lines = 3;
          std::vector<float> gate(size_t(in_stride * 6)), up(gate.size()), gb(32), ub(32);
          uint32_t s = 12345;
          const auto draw = [&] {
            s = s * 1664525u + 1013904223u;
            return float(int32_t(s)) * 0x1p-29f;
          };
          for (float& v : gate) v = draw();
          for (float& v : up) v = draw();
          for (float& v : gb) v = draw();
          for (float& v : ub) v = draw();
          std::vector<float> out(size_t(in_stride * 6), -7.0f);
          if (in_place) out = gate;
          ActArgs a{};
          a.act.kind = kind;
          if (limit) a.act.limit = 1.25f;
          a.gate = in_place ? out.data() : gate.data();
          a.up = gated && !interleaved ? up.data() : nullptr;
          a.lines = lines;
          a.len = len;
          a.in_stride = in_stride;
          a.out_stride = in_place ? in_stride : out_stride;
          a.interleaved = interleaved;
          a.features_are_lines = by_line;
          a.gate_bias = bias ? gb.data() : nullptr;
          a.up_bias = bias && gated ? ub.data() : nullptr;
          a.out = out.data();
          const std::vector<float> before = out;
          k->run(a);
          for (int64_t i = 0; i < lines; ++i) {
            for (int64_t j = 0; j < a.out_stride; ++j) {
              const size_t o = size_t(i * a.out_stride + j);
              if (j >= len) {  // nothing past a line is written
                CHECK_EQ(out[o], before[o]);
                continue;
              }
              float g = 0, u = 0;
              if (interleaved && by_line) {
                g = gate[size_t(2 * i * in_stride + j)];
                u = gate[size_t((2 * i + 1) * in_stride + j)];
              } else if (interleaved) {
                g = gate[size_t(i * in_stride + 2 * j)];
                u = gate[size_t(i * in_stride + 2 * j + 1)];
              } else {
                g = gate[size_t(i * in_stride + j)];
                u = up[size_t(i * in_stride + j)];
              }
              const size_t f = size_t(by_line ? i : j);
              if (bias) {
                g += gb[f];
                u += ub[f];
              }
              if (limit) {
                g = std::min(g, 1.25f);
                u = std::clamp(u, -1.25f, 1.25f);
              }
              const double value = reference(kind, g, double(a.act.alpha));
              double want = value, bound = kUlps * ulp(value);
              if (gated) {
                const double factor = kind == ActKind::swiglu_oai ? double(u + 1.0f) : double(u);
                want = value * factor;
                bound = bound * std::fabs(factor) + ulp(want);
              }
              CHECK_MSG(std::fabs(out[o] - want) <= bound,
                        k->name << " kind " << int(kind) << " shape " << shape << " len " << len
                                << " at " << i << "," << j << ": " << out[o] << " not " << want);
            }
          }
        }
      }
    }
  }
}

TEST(names) {
  ActKind kind = ActKind::identity;
  CHECK(find_act("gelu_pytorch_tanh", &kind));
  CHECK(kind == ActKind::gelu_tanh);
  CHECK(find_act("silu", &kind));
  CHECK(kind == ActKind::silu);
  CHECK(!find_act("softsign", &kind));
  CHECK(kind == ActKind::silu);
}

TEST(selection_prefers_the_first_row_that_the_machine_runs) {
  CHECK_EQ(std::string(select_act(IsaSet{1})->name), "act_scalar");
  int count = 0;
  const ActKernel* all = act_kernels(&count);
  CHECK_EQ(std::string(select_act(IsaSet{~0u})->name), std::string(all[0].name));
}

}  // namespace
}  // namespace cpumoe
