// Every row of kernels.inc that this CPU (or CPUMOE_ISA) may use, against float64 arithmetic on the
// decoded weights and on the activations as the kernel's class rounds them.
#include "kernels/dot/dot.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/dot_problem.h"
#include "kernels/testing/sizes.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::dot_bound;
using testing::flushed_dot_bound;
using testing::fill_random;
using testing::formats_of;
using testing::GuardedBuffer;
using testing::kernels_under_test;
using testing::Problem;
using testing::quantized_dot_bound;
using testing::random_format;
using testing::Rng;
using testing::same_bits;
using testing::sizes_near;
using testing::weight_parts;

constexpr Code kTokenCodes[] = {Code::f32, Code::f16, Code::bf16};

void check_against_float64(const DotKernel& kernel, int64_t n, int64_t k, int64_t m, Rng& rng) {
  Problem p(kernel, random_format(kernel.code, rng), n, k, m, kTokenCodes[rng.below(3)], rng);
  p.pack();
  const std::vector<float> got = p.run(0, p.n, 0, m);
  std::vector<std::vector<double>> x;
  for (int64_t t = 0; t < m; ++t) x.push_back(p.rounded(t));
  std::vector<float> line(static_cast<size_t>(p.k));
  std::vector<double> w(static_cast<size_t>(p.k));
  for (int64_t i = 0; i < p.n; ++i) {
    if (p.view().layout == Layout::rows) {  // a block at a time
      decode_line(p.view(), i, 0, p.k, line.data());
      std::copy(line.begin(), line.end(), w.begin());
    } else {
      for (int64_t j = 0; j < p.k; ++j) w[size_t(j)] = decode_weight(p.view(), i, j);
    }
    const bool exact = kernel.act_class != ActClass::int8;  // of fp32 weights as decoded
    const std::vector<double> parts = exact ? w : weight_parts(p.view(), i);
    for (int64_t t = 0; t < m; ++t) {
      double want = 0, magnitude = 0, largest = 0;
      for (size_t j = 0; j < w.size(); ++j) {
        want += w[j] * x[size_t(t)][j];
        magnitude += std::fabs(parts[j] * x[size_t(t)][j]);
        largest = std::fmax(largest, std::fmax(std::fabs(w[j]), std::fabs(x[size_t(t)][j])));
      }
      const double error = std::fabs(double(got[size_t(i * m + t)]) - want);
      // rows_scaled and its kin: scales meet sums, not weights.
      const bool plain = exact && std::string(kernel.act_layout).rfind("rows_scaled", 0) != 0;
      const double bound = kernel.act_class == ActClass::bf16
                               ? flushed_dot_bound(p.k, magnitude, largest)
                           : plain ? dot_bound(p.k, magnitude)
                                   : quantized_dot_bound(p.k, magnitude);
      CHECK_MSG(error <= bound, kernel.name << " " << p.view().format->name << " n=" << p.n
                                            << " k=" << p.k << " m=" << m << " at " << i << "," << t
                                            << " got " << got[size_t(i * m + t)] << " want " << want
                                            << " bound " << bound);
    }
  }
}

TEST(products_match_float64_around_every_block) {
  const std::vector<int64_t> ks = sizes_near({1, 8, 16, 32, 64, 256}),
                             ns = sizes_near({3, 12, 24, 96, 192});
  const std::vector<int64_t> ms = sizes_near({3, 5, 8, 16, 24, 32, 48});
  for (const DotKernel& kernel : kernels_under_test()) {
    if (!is_float(kernel.code)) continue;
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

TEST(quantised_products_match_float64_around_every_block) {
  for (const DotKernel& kernel : kernels_under_test()) {
    if (is_float(kernel.code)) continue;
    Rng rng(2);
    const int64_t ns[] = {1, 7, 8, 9, 16, 17, 33, 50};
    for (const int64_t m : {1, 2, 4, 5, 8, 9, 17, 25}) {
      for (const int64_t k : sizes_near({16, 32, 48, 64, 128, 256, 512, 768})) {
        check_against_float64(kernel, ns[rng.below(8)], k, m, rng);
      }
    }
    for (const int64_t m : {1, 4, 9}) {  // past spans that are taken at a time
      check_against_float64(kernel, 10, 5000, m, rng);
      check_against_float64(kernel, 300, 70, m, rng);
    }
  }
}

TEST(slices_and_other_tokens_change_no_bit) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(3);
    const testing::RandomFormat format = random_format(kernel.code, rng);
    const int64_t m = 37;
    Problem p(kernel, format, 200, 300, m, Code::f32, rng);
    p.pack();
    const int64_t n = p.n, k = p.k, step = kernel.n_block;
    const std::vector<float> whole = p.run(0, n, 0, m);
    for (int64_t n0 = 0; n0 < n;) {
      const int64_t n1 = min64(n, n0 + step * (1 + rng.below(6)));
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
    Problem one(kernel, format, 1, k, 1, Code::f32, rng);
    one.weights.view = p.view();
    one.n = n;
    for (int64_t j = 0; j < k; ++j) one.set_token(0, j, p.token(m - 1, j));
    one.pack();
    const std::vector<float> alone = one.run(0, n, 0, 1);
    for (int64_t i = 0; i < n; ++i)
      CHECK(same_bits(alone[size_t(i)], whole[size_t(i * m + m - 1)]));
  }
}

void set_weight(Problem& p, int64_t i, int64_t j, float v) {
  const bool rows = p.kernel.layout == Layout::rows;
  store_from_float(p.weights.codes.data(), p.kernel.code,
                   rows ? i * p.view().stride + j : j * p.view().stride + i, v);
}

TEST(nan_and_infinity_reach_their_own_outputs_only) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              inf = std::numeric_limits<float>::infinity();
  for (const DotKernel& kernel : kernels_under_test()) {
    if (!is_float(kernel.code) || kernel.act_class == ActClass::int8) continue;
    for (const int64_t m : {1, 3, 8, 13, 26}) {
      for (const int64_t k : {5, 16, 37, 270}) {
        Rng rng(4);
        const int64_t n = 29;
        Problem p(kernel, {formats_of(kernel.code)[0], {.gap = 1}}, n, k, m, Code::f32, rng);
        for (int64_t t = 0; t < m; ++t) p.index[size_t(t)] = int32_t(t);
        for (int64_t j = 0; j < k; ++j) set_weight(p, 5, j, 1);
        set_weight(p, 2, k - 1, nan);
        set_weight(p, n - 1, 0, inf);
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

TEST(nan_scales_and_tokens_reach_their_own_outputs_only) {
  for (const DotKernel& kernel : kernels_under_test()) {
    for (const Format* format : formats_of(kernel.code)) {
      const bool own_scale = !format->scaled() || format->scale_rows == 1;
      for (const int64_t m : {1, 3, 4, 7, 18}) {
        Rng rng(5);
        const int64_t n = 24, k = rng.below(2) == 0 ? 600 : 520;
        Problem p(kernel, {format, {.scales = Code::f16}}, n, k, m, Code::f32, rng);
        for (int64_t t = 0; t < m; ++t) p.index[size_t(t)] = int32_t(t);
        const int64_t feature = rng.below(n), token = m - 1;
        const int64_t at = rng.below(2) == 0 ? 0 : p.k - 1;  // beside the row before, or after
        const bool has_nan = own_scale && set_nan(p.weights, feature, at);
        p.set_token(token, p.k - 2, rng.below(2) == 0 ? INFINITY : NAN);
        p.pack();
        const std::vector<float> got = p.run(0, n, 0, m);
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t t = 0; t < m; ++t) {
            const bool bad = (has_nan && i == feature) || t == token;
            // A product of an infinity stays one in class fp32 unless the weight is 0.
            const float v = got[size_t(i * m + t)];
            CHECK_MSG(bad ? !std::isfinite(v) : std::isfinite(v),
                      kernel.name << " " << format->name << " m=" << m << " at " << i << "," << t
                                  << " got " << v);
          }
        }
      }
    }
  }
}

TEST(empty_slices_write_nothing_and_no_inputs_give_zero) {
  for (const DotKernel& kernel : kernels_under_test()) {
    Rng rng(6);
    const testing::RandomFormat format = random_format(kernel.code, rng);
    Problem p(kernel, format, 24, 7, 9, Code::f32, rng);
    p.pack();
    CHECK(p.run(16, 16, 0, 9).empty());
    CHECK(p.run(0, 20, 8, 8).empty());
    Problem none(kernel, format, 24, 0, 9, Code::f32, rng);
    none.pack();
    for (const float v : none.run(0, 24, 0, 9)) CHECK(same_bits(v, 0.0f));
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

}  // namespace
}  // namespace cpumoe
