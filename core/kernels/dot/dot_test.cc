// Every row of kernels.inc that this CPU (or CPUMOE_ISA) may use, against float64 arithmetic on the
// decoded weights.
#include "kernels/dot/dot.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"
#include "kernels/testing/sizes.h"
#include "kernels/testing/tolerance.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::dot_bound;
using testing::fill_random;
using testing::guarded_bytes;
using testing::GuardedBuffer;
using testing::Rng;
using testing::sizes_near;

IsaSet test_isa() {
  const char* forced = std::getenv("CPUMOE_ISA");
  return usable_isa(forced != nullptr ? forced : "");
}

std::vector<DotKernel> kernels_under_test() {
  int count = 0;
  const DotKernel* all = dot_kernels(&count);
  std::vector<DotKernel> out;
  for (int i = 0; i < count; ++i) {
    if (test_isa().has(all[i].isa)) out.push_back(all[i]);
  }
  return out;
}

// Where input k of token m lies, from the layout diagrams, written independently of the kernels.
int64_t act_position(const std::string& layout, int64_t m, int64_t k, int64_t inputs) {
  const int64_t line = (inputs + 15) / 16 * 16;
  if (layout == "rows") return m * line + k;
  if (layout == "rows_even_odd") return m * line + k / 16 * 16 + k % 2 * 8 + k % 16 / 2;
  CHECK_EQ(layout, std::string("panels8"));
  return m / 8 * inputs * 8 + k * 8 + m % 8;
}

// Weights that end at a guard page, with NaNs between the lines, and tokens gathered by index.
struct Problem {
  const DotKernel& kernel;
  int64_t n, k, m, stride;
  GuardedBuffer weights, source, act;
  WeightView view;
  std::vector<int32_t> index;
  MatrixView x;

  Problem(const DotKernel& kernel, int64_t n, int64_t k, int64_t m, int64_t gap, Code x_code,
          Rng& rng)
      : kernel(kernel),
        n(n),
        k(k),
        m(m),
        stride(line_length() + gap),
        weights(weight_span()),
        source(size_t((m + 2) * k) * code_bits(x_code) / 8),
        act(guarded_bytes(kernel.act_bytes(m, k))) {
    view = {find_format(code_name(kernel.code)), kernel.layout, n, k, stride, weights.data()};
    const int64_t lines = kernel.layout == Layout::rows ? n : k;
    for (int64_t i = 0; i < lines && line_length() > 0; ++i) {
      fill_random(weights.data() + i * stride * element(), kernel.code, line_length(), 1, rng);
    }
    fill_random(source.data(), x_code, (m + 2) * k, 1, rng);
    x = {source.data(), x_code, m + 2, k, k};
    for (int64_t i = 0; i < m; ++i) index.push_back(int32_t(rng.below(m + 2)));
  }
  int64_t element() const { return int64_t(code_bits(kernel.code)) / 8; }
  int64_t line_length() const { return kernel.layout == Layout::rows ? k : n; }
  size_t weight_span() const {
    const int64_t lines = kernel.layout == Layout::rows ? n : k;
    return lines == 0 || line_length() == 0
               ? 0
               : size_t(((lines - 1) * stride + line_length()) * element());
  }
  void set_weight(int64_t i, int64_t j, float v) {
    const int64_t at = kernel.layout == Layout::rows ? i * stride + j : j * stride + i;
    store_from_float(weights.data(), kernel.code, at, v);
  }
  float token(int64_t i, int64_t j) const {
    return load_as_float(x.data, x.code, index[size_t(i)] * x.stride + j);
  }
  void set_token(int64_t i, int64_t j, float v) {
    store_from_float(source.data(), x.code, index[size_t(i)] * x.stride + j, v);
  }
  void pack() { kernel.pack({x, index.data(), 0, m, m, act.data()}); }

  // The tile of [n0, n1) x [m0, m1) as [feature][token].
  std::vector<float> run(int64_t n0, int64_t n1, int64_t m0, int64_t m1) const {
    const bool n_major = kernel.order == TileOrder::n_major;
    const int64_t features = round_up(n1 - n0, kernel.n_block),
                  tokens = round_up(m1 - m0, kernel.m_block);
    const int64_t c_stride = round_up(n_major ? tokens : features, 16);
    GuardedBuffer c(size_t((n_major ? features : tokens) * c_stride) * 4);
    GuardedBuffer scratch(guarded_bytes(kernel.scratch_bytes(n1 - n0, m1 - m0, k)));
    kernel.run({&view, n0, n1, const_cast<GuardedBuffer&>(act).data(), m, m0, m1, c.as<float>(),
                c_stride, scratch.data()});
    std::vector<float> out;
    for (int64_t i = 0; i < n1 - n0; ++i) {
      for (int64_t j = 0; j < m1 - m0; ++j) {
        out.push_back(c.as<float>()[n_major ? i * c_stride + j : j * c_stride + i]);
      }
    }
    return out;
  }
};

bool same_bits(float a, float b) { return float_to_bits(a) == float_to_bits(b); }

void check_against_float64(const DotKernel& kernel, int64_t n, int64_t k, int64_t m, Rng& rng) {
  const Code codes[] = {Code::f32, Code::f16, Code::bf16};
  Problem p(kernel, n, k, m, rng.below(2) * rng.below(20), codes[rng.below(3)], rng);
  p.pack();
  const std::vector<float> got = p.run(0, n, 0, m);
  std::vector<double> x(size_t(m * k)), w(static_cast<size_t>(k));
  for (int64_t i = 0; i < m * k; ++i) x[size_t(i)] = p.token(i / k, i % k);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) w[size_t(j)] = decode_weight(p.view, i, j);
    for (int64_t t = 0; t < m; ++t) {
      double want = 0, magnitude = 0;
      for (int64_t j = 0; j < k; ++j) {
        const double product = w[size_t(j)] * x[size_t(t * k + j)];
        want += product;
        magnitude += std::fabs(product);
      }
      const double error = std::fabs(double(got[size_t(i * m + t)]) - want);
      CHECK_MSG(error <= dot_bound(k, magnitude),
                kernel.name << " n=" << n << " k=" << k << " m=" << m << " at " << i << "," << t
                            << " got " << got[size_t(i * m + t)] << " want " << want);
    }
  }
}

TEST(products_match_float64_around_every_block) {
  const std::vector<int64_t> ks = sizes_near({1, 8, 16, 32, 64, 256}),
                             ns = sizes_near({3, 12, 24, 96, 192});
  const std::vector<int64_t> ms = sizes_near({3, 5, 8, 16, 24, 32, 48});
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(1);
    for (const int64_t m : ms) {
      for (const int64_t k : ks) {
        for (const int64_t n : {1, 17, 97}) check_against_float64(kernel, n, k, m, rng);
      }
      for (const int64_t n : ns) {
        for (const int64_t k : {9, 33}) check_against_float64(kernel, n, k, m, rng);
      }
    }
    check_against_float64(kernel, 1100, 40, 3, rng);  // past the widest slice of columns
    check_against_float64(kernel, 40, 1100, 9, rng);
  }
}

TEST(slices_and_other_tokens_change_no_bit) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(2);
    const int64_t n = 200, k = 300, m = 37;
    Problem p(kernel, n, k, m, 3, Code::f32, rng);
    p.pack();
    const std::vector<float> whole = p.run(0, n, 0, m);
    for (int64_t n0 = 0; n0 < n;) {
      const int64_t n1 = min64(n, n0 + kernel.n_block * (1 + rng.below(6)));
      for (int64_t m0 = 0; m0 < m;) {
        const int64_t m1 = min64(m, m0 + kernel.m_block * (1 + rng.below(5)));
        const std::vector<float> part = p.run(n0, n1, m0, m1);
        for (int64_t i = n0; i < n1; ++i) {
          for (int64_t t = m0; t < m1; ++t) {
            const float got = part[size_t((i - n0) * (m1 - m0) + t - m0)];
            CHECK_MSG(same_bits(got, whole[size_t(i * m + t)]),
                      kernel.name << " slice " << n0 << ".." << n1 << " x " << m0 << ".." << m1);
          }
        }
        m0 = m1;
      }
      n0 = n1;
    }
    // One token alone, through its own packing.
    Problem one(kernel, n, k, 1, 3, Code::f32, rng);
    std::memcpy(one.weights.data(), p.weights.data(), p.weight_span());
    for (int64_t j = 0; j < k; ++j) one.set_token(0, j, p.token(m - 1, j));
    one.pack();
    const std::vector<float> alone = one.run(0, n, 0, 1);
    for (int64_t i = 0; i < n; ++i)
      CHECK(same_bits(alone[size_t(i)], whole[size_t(i * m + m - 1)]));
  }
}

TEST(nan_and_infinity_reach_their_own_outputs_only) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              inf = std::numeric_limits<float>::infinity();
  for (const DotKernel& kernel : kernels_under_test()) {
    for (const int64_t m : {1, 3, 8, 13, 26}) {
      for (const int64_t k : {5, 16, 37, 270}) {
        Rng rng(3);
        const int64_t n = 29;
        Problem p(kernel, n, k, m, 1, Code::f32, rng);
        for (int64_t t = 0; t < m; ++t) p.index[size_t(t)] = int32_t(t);
        for (int64_t j = 0; j < k; ++j) p.set_weight(5, j, 1);
        p.set_weight(2, k - 1, nan);
        p.set_weight(n - 1, 0, inf);
        p.set_token(m - 1, k - 1, inf);
        for (int64_t t = 0; t < m; ++t) p.set_token(t, 0, t % 2 == 0 ? 0.0f : -1.0f);
        p.pack();
        const std::vector<float> got = p.run(0, n, 0, m);
        const auto at = [&](int64_t i, int64_t t) { return got[size_t(i * m + t)]; };
        for (int64_t t = 0; t < m; ++t) {
          CHECK(std::isnan(at(2, t)));
          if (t < m - 1) {
            CHECK_MSG(
                t % 2 == 0 ? std::isnan(at(n - 1, t)) : at(n - 1, t) == -inf,
                kernel.name << " inf * " << (t % 2 == 0 ? 0 : -1) << " gave " << at(n - 1, t));
            for (int64_t i = 0; i < n - 1; ++i) CHECK(i == 2 || std::isfinite(at(i, t)));
          }
        }
        CHECK_EQ(at(5, m - 1), inf);
      }
    }
  }
}

TEST(empty_slices_write_nothing_and_no_inputs_give_zero) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(4);
    Problem p(kernel, 20, 7, 9, 0, Code::f32, rng);
    p.pack();
    CHECK(p.run(16, 16, 0, 9).empty());
    CHECK(p.run(0, 20, 8, 8).empty());
    Problem none(kernel, 20, 0, 9, 0, Code::f32, rng);
    none.pack();
    for (const float v : none.run(0, 20, 0, 9)) CHECK(same_bits(v, 0.0f));
  }
}

// Checks act against want(m, k) bit for bit, and that padding inputs and tokens are zero.
template <class F>
void check_act(const DotKernel& kernel, const float* act, int64_t m, int64_t k, F want) {
  const int64_t floats = int64_t(kernel.act_bytes(m, k)) / 4;
  std::vector<float> expected(static_cast<size_t>(floats), 0.0f);
  for (int64_t t = 0; t < m; ++t) {
    for (int64_t j = 0; j < k; ++j) {
      expected[size_t(act_position(kernel.act_layout, t, j, k))] = want(t, j);
    }
  }
  for (int64_t i = 0; i < floats; ++i) {
    CHECK_MSG(same_bits(act[i], expected[size_t(i)]),
              kernel.name << " m=" << m << " k=" << k << " float " << i << " of " << floats << ": "
                          << act[i] << " for " << expected[size_t(i)]);
  }
}

TEST(pack_gathers_bit_for_bit) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(5);
    for (const Code code : {Code::f32, Code::f16, Code::bf16}) {
      for (const int64_t m : sizes_near({8, 16})) {
        for (const int64_t k : sizes_near({8, 16, 32})) {
          Problem p(kernel, 1, k, m, 0, code, rng);
          for (int64_t m0 = 0; m0 < m; m0 += kernel.m_block) {
            kernel.pack({p.x, p.index.data(), m0, min64(m, m0 + kernel.m_block), m, p.act.data()});
          }
          check_act(kernel, p.act.as<float>(), m, k,
                    [&](int64_t t, int64_t j) { return p.token(t, j); });
          kernel.pack({p.x, nullptr, 0, m, m, p.act.data()});
          check_act(kernel, p.act.as<float>(), m, k,
                    [&](int64_t t, int64_t j) { return load_as_float(p.x.data, code, t * k + j); });
        }
      }
    }
  }
}

// Cuts 0..size at random multiples of `step`.
std::vector<int64_t> cuts(int64_t size, int64_t step, Rng& rng) {
  std::vector<int64_t> out{0};
  while (out.back() < size) out.push_back(min64(size, out.back() + step * (1 + rng.below(4))));
  return out;
}

TEST(store_mid_places_tiles_bit_for_bit) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(6);
    for (const TileOrder order : {TileOrder::n_major, TileOrder::m_major}) {
      for (const int64_t m : sizes_near({4, 8, 16, 24})) {
        for (const int64_t k : sizes_near({8, 16, 48})) {
          for (const int64_t step : {1, 8}) {  // tiles of any kernel: blocks of 1 or 8 tokens
            std::vector<float> mid(size_t(m * k));
            fill_random(mid.data(), Code::f32, m * k, 1, rng);
            GuardedBuffer act(guarded_bytes(kernel.act_bytes(m, k)));
            const std::vector<int64_t> ms = cuts(m, step, rng), ks = cuts(k, step, rng);
            for (size_t a = 0; a + 1 < ms.size(); ++a) {
              for (size_t b = 0; b + 1 < ks.size(); ++b) {
                const int64_t tokens = ms[a + 1] - ms[a], features = ks[b + 1] - ks[b];
                const bool n_major = order == TileOrder::n_major;
                const int64_t stride = round_up(n_major ? tokens : features, 16);
                const int64_t lines = n_major ? features : round_up(tokens, step);
                GuardedBuffer tile(size_t(lines * stride) * 4);
                for (int64_t t = 0; t < tokens; ++t) {
                  for (int64_t f = 0; f < features; ++f) {
                    tile.as<float>()[n_major ? f * stride + t : t * stride + f] =
                        mid[size_t((ms[a] + t) * k + ks[b] + f)];
                  }
                }
                kernel.store_mid({tile.as<float>(), order, stride, ks[b], ks[b + 1], ms[a],
                                  ms[a + 1], m, k, act.data()});
              }
            }
            check_act(kernel, act.as<float>(), m, k,
                      [&](int64_t t, int64_t j) { return mid[size_t(t * k + j)]; });
          }
        }
      }
    }
  }
}

TEST(store_out_scales_and_adds_bit_for_bit) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(7);
    const bool n_major = kernel.order == TileOrder::n_major;
    for (int flags = 0; flags < 16; ++flags) {
      for (const int64_t m : sizes_near({4, 8, 16})) {
        for (const int64_t n : sizes_near({8, 16, 24})) {
          const int64_t n0 = kernel.n_block, m0 = kernel.m_block, out_stride = n0 + n;
          const int64_t stride = round_up(n_major ? m : n, 16);
          const int64_t lines = n_major ? n : round_up(m, kernel.m_block);
          GuardedBuffer tile(size_t(lines * stride) * 4), out(size_t((m0 + m) * out_stride) * 4);
          fill_random(tile.data(), Code::f32, lines * stride, 1, rng);
          fill_random(out.data(), Code::f32, (m0 + m) * out_stride, 1, rng);
          std::vector<float> bias(static_cast<size_t>(n)), scale(size_t(m0 + m)),
              want(out.size() / 4);
          fill_random(bias.data(), Code::f32, n, 1, rng);
          fill_random(scale.data(), Code::f32, m0 + m, 1, rng);
          std::memcpy(want.data(), out.data(), out.size());
          std::vector<int32_t> index;
          for (int64_t i = 0; i < m0 + m; ++i) index.push_back(int32_t(m0 + m - 1 - i));
          StoreOutArgs a{tile.as<float>(), stride,          n0,      n0 + n,  m0,
                         m0 + m,           nullptr,         nullptr, nullptr, out.as<float>(),
                         out_stride,       (flags & 8) != 0};
          if ((flags & 1) != 0) a.bias = bias.data();
          if ((flags & 2) != 0) a.scale = scale.data();
          if ((flags & 4) != 0) a.index = index.data();
          for (int64_t t = 0; t < m; ++t) {
            for (int64_t f = 0; f < n; ++f) {
              float v = tile.as<float>()[n_major ? f * stride + t : t * stride + f];
              if (a.bias != nullptr) v += bias[size_t(f)];
              if (a.scale != nullptr) v *= scale[size_t(m0 + t)];
              const int64_t row = a.index != nullptr ? index[size_t(m0 + t)] : m0 + t;
              float& w = want[size_t(row * out_stride + n0 + f)];
              w = a.accumulate ? w + v : v;
            }
          }
          kernel.store_out(a);
          for (size_t i = 0; i < want.size(); ++i) {
            CHECK_MSG(
                same_bits(want[i], out.as<float>()[i]),
                kernel.name << " flags=" << flags << " m=" << m << " n=" << n << " float " << i);
          }
        }
      }
    }
  }
}

TEST(list_is_well_formed) {
  int count = 0;
  const DotKernel* all = dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const DotKernel& k = all[i];
    CHECK_GE(k.m_min, 1);
    CHECK_LE(k.m_min, k.m_max);
    CHECK(k.m_block >= 1 && k.n_block >= 1 && k.n_slice % k.n_block == 0);
    CHECK_EQ(k.act_bytes(0, 5), size_t(0));
    for (int j = 0; j < i; ++j) CHECK_NE(std::string(k.name), std::string(all[j].name));
  }
}

IsaSet set_of(std::initializer_list<Isa> isas) {
  IsaSet s{0};
  for (const Isa i : isas) s.mask |= 1u << unsigned(i);
  return s;
}

TEST(selection_golden_table) {
  struct Golden {
    const char* set;
    Code code;
    Layout layout;
    int64_t m;
    const char* name;
  };
  const Golden golden[] = {
#include "kernels/dot/selection_golden.inc"
  };
  for (const Golden& g : golden) {
    const bool wide = std::string(g.set) == "avx2";
    const IsaSet isa = wide ? set_of({Isa::scalar, Isa::avx2}) : set_of({Isa::scalar});
    if (wide && !test_isa().has(Isa::avx2)) continue;
    const DotKernel* k = select_dot({g.code, g.layout, ActClass::fp32, g.m}, isa);
    CHECK(k != nullptr);
    CHECK_EQ(std::string(k->name), std::string(g.name));
  }
}

TEST(refusal_names_every_candidate) {
  std::string why;
  CHECK(select_dot({Code::bf16, Layout::rows, ActClass::fp32, 4}, IsaSet{0}, &why) == nullptr);
  CHECK(why.find("bf16 weights in rows layout, class fp32 and 4 tokens") != std::string::npos);
  int count = 0;
  const DotKernel* all = dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    CHECK_EQ(why.find(all[i].name) != std::string::npos, all[i].code == Code::bf16);
  }
  CHECK(why.find("scalar_plain_rows_bf16 needs scalar, which may not be used") !=
        std::string::npos);
  CHECK(why.find("scalar_plain_columns_bf16 reads the columns layout") != std::string::npos);
}

}  // namespace
}  // namespace cpumoe
