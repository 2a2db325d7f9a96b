#include "kernels/attend/attend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"
#include "kernels/testing/sizes.h"
#include "kernels/testing/tolerance.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::gamma;
using testing::GuardedBuffer;
using testing::kRoundoff;
using testing::Rng;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<const AttendKernel*> kernels() {
  const char* forced = std::getenv("CPUMOE_ISA");
  const IsaSet isa = usable_isa(forced ? forced : "");
  std::vector<const AttendKernel*> out;
  int count = 0;
  const AttendKernel* all = attend_kernels(&count);
  for (int i = 0; i < count; ++i) {
    if (isa.has(all[i].isa)) out.push_back(&all[i]);
  }
  return out;
}

// One head's cache and queries, all guarded; `keys` tokens appended from fp32. With a shared_dim V
// is that many leading elements of K.
struct Case {
  const AttendKernel* kernel;
  int64_t keys, tokens, group, head_dim, value_dim;
  bool shared;
  int64_t window = 0;
  float softcap = 0;
  std::vector<float> sinks;
  std::vector<float> k, v;
  GuardedBuffer k_cache, v_cache, q, out, scratch;

  Case(const AttendKernel* kernel, int64_t keys, int64_t tokens, int64_t group, int64_t head_dim,
       Rng& rng, float scale = 1, int64_t shared_dim = 0)
      : kernel(kernel),
        keys(keys),
        tokens(tokens),
        group(group),
        head_dim(head_dim),
        value_dim(shared_dim > 0 ? shared_dim : head_dim),
        shared(shared_dim > 0),
        k(size_t(keys * head_dim)),
        v(k.size()),
        k_cache(size_t(key_elements(keys, head_dim)) * code_bits(kernel->code) / 8),
        v_cache(size_t(value_elements(keys, value_dim)) * code_bits(kernel->code) / 8),
        q(size_t(tokens * group * head_dim) * 4),
        out(size_t(tokens * group * value_dim) * 4),
        scratch(testing::guarded_bytes(
            size_t(attend_scratch_bytes(tokens * group, head_dim, value_dim)))) {
    testing::fill_random(k.data(), Code::f32, int64_t(k.size()), scale, rng);
    testing::fill_random(v.data(), Code::f32, int64_t(v.size()), 1, rng);
    testing::fill_random(q.data(), Code::f32, tokens * group * head_dim, scale, rng);
    // A fresh cache is zero; the lanes of keys past the end keep NaNs to be discarded.
    const int64_t lanes = value_stride(value_dim);
    for (int64_t i = 0; i < keys * lanes; ++i) store_from_float(v_cache.data(), kernel->code, i, 0);
  }
  void append(int64_t from, int64_t count) {
    AppendArgs a{};
    a.k = k.data() + from * head_dim;
    a.v = shared ? nullptr : v.data() + from * head_dim;
    a.tokens = count;
    a.head_dim = a.stride = head_dim;
    a.value_dim = value_dim;
    a.position = from;
    a.k_cache = k_cache.data();
    a.v_cache = shared ? nullptr : v_cache.data();
    kernel->append(a);
  }
  int64_t position() const { return keys - tokens; }
  AttendArgs args(int64_t key0, int64_t key1) {
    AttendArgs a{};
    a.q = q.as<float>();
    a.q_stride = group * head_dim;
    a.out_stride = group * value_dim;
    a.tokens = tokens;
    a.group = group;
    a.head_dim = head_dim;
    a.value_dim = value_dim;
    a.position = position();
    a.k_cache = k_cache.data();
    a.v_cache = shared ? nullptr : v_cache.data();
    a.key0 = key0;
    a.key1 = key1;
    a.window = window;
    a.scale = 1 / std::sqrt(float(head_dim));
    a.softcap = softcap;
    a.sinks = sinks.empty() ? nullptr : sinks.data();
    a.out = out.as<float>();
    a.scratch = scratch.data();
    return a;
  }
  double key(int64_t l, int64_t d) const { return stored(k, l, d); }
  double value(int64_t l, int64_t d) const { return stored(shared ? k : v, l, d); }
  double stored(const std::vector<float>& x, int64_t l, int64_t d) const {
    char e[4];
    store_from_float(e, kernel->code, 0, x[size_t(l * head_dim + d)]);
    return double(load_as_float(e, kernel->code, 0));
  }
};

// Compares with float64. E bounds the relative error of one p before it is normalised:
//   the score: q * scale rounds once, head_dim products, and softcap's quotient, tanh and product
//   (an absolute error, which exp turns into a relative one);
//   the differences score - top and top - new top round once each, and add up to at most the range;
//   exp errs by 4 units at most, once per key and once per raised maximum with its products.
// Numerator and denominator both carry it, and their sums add gamma(keys + steps).
void check_rows(const Case& c, double extra_steps = 0) {
  const double scale = 1 / std::sqrt(float(c.head_dim));
  const double steps = std::ceil(double(c.keys) / kScoreBlock) + 1 + extra_steps;
  for (int64_t i = 0; i < c.tokens; ++i) {
    const int64_t last = c.position() + i;
    const int64_t first = c.window > 0 ? std::max<int64_t>(0, last - c.window + 1) : 0;
    for (int64_t g = 0; g < c.group; ++g) {
      const float* q = const_cast<Case&>(c).q.as<float>() + (i * c.group + g) * c.head_dim;
      std::vector<double> s;
      double score_error = 0, top = c.sinks.empty() ? -1e300 : double(c.sinks[size_t(g)]),
             low = 1e300;
      if (!c.sinks.empty()) low = top;
      for (int64_t l = first; l <= last; ++l) {
        double dot = 0, magnitude = 0;
        for (int64_t d = 0; d < c.head_dim; ++d) {
          dot += double(q[d]) * c.key(l, d);
          magnitude += std::fabs(double(q[d]) * c.key(l, d));
        }
        double error = gamma(c.head_dim + 1) * magnitude * scale, score = dot * scale;
        if (c.softcap > 0) {
          error += 16 * kRoundoff * c.softcap + 4 * kRoundoff * std::fabs(score);
          score = c.softcap * std::tanh(score / c.softcap);
        }
        score_error = std::max(score_error, error);
        s.push_back(score);
        top = std::max(top, score);
        low = std::min(low, score);
      }
      const double e = 2 * score_error + (top - low + 2 * score_error) * kRoundoff +
                       gamma(int64_t(6 * steps) + 4 + (last - first + 1));
      double sum = c.sinks.empty() ? 0 : std::exp(double(c.sinks[size_t(g)]) - top);
      for (const double x : s) sum += std::exp(x - top);
      for (int64_t d = 0; d < c.value_dim; ++d) {
        double want = 0, magnitude = 0;
        for (int64_t l = first; l <= last; ++l) {
          const double p = std::exp(s[size_t(l - first)] - top) / sum;
          want += p * c.value(l, d);
          magnitude += p * std::fabs(c.value(l, d));
        }
        const float got = const_cast<Case&>(c).out.as<float>()[(i * c.group + g) * c.value_dim + d];
        const double bound = (std::exp(2 * e) - 1) * magnitude + kRoundoff * std::fabs(want);
        CHECK_MSG(std::fabs(got - want) <= bound,
                  c.kernel->name << " keys " << c.keys << " tokens " << c.tokens << " group "
                                 << c.group << " head_dim " << c.head_dim << " token " << i
                                 << " head " << g << " d " << d << ": " << got << " not " << want
                                 << " +- " << bound);
      }
    }
  }
}

// The same bits from a cache in slabs, each K of some keys and then V of them, with a gap behind.
TEST(slabs_hold_the_same) {
  Rng rng(7);
  for (const AttendKernel* kernel : kernels()) {
    for (bool shared : {false, true}) {
      for (int64_t tokens : {1, 3, 20}) {
        const int64_t keys = 200, group = 2, head_dim = 24, slab = kScoreBlock;
        Case c(kernel, keys, tokens, group, head_dim, rng, 1, shared ? 16 : 0);
        c.append(0, keys);
        for (int64_t window : {0, 70}) {
          c.window = window;
          kernel->run(c.args(0, keys));
          const float* out = c.out.as<float>();
          const std::vector<float> want(out, out + tokens * group * c.value_dim);

          const int64_t element = int64_t(code_bits(kernel->code)) / 8;
          const int64_t k_bytes = key_elements(slab, head_dim) * element;
          const int64_t v_bytes = shared ? 0 : value_elements(slab, head_dim) * element;
          const Slabs slabs{slab, k_bytes + v_bytes + 64};
          std::vector<char> cache(size_t(ceil_div(keys, slab) * slabs.bytes));
          for (int64_t from = 0; from < keys; from += 50) {  // pieces that cross the slabs
            AppendArgs a{};
            a.k = c.k.data() + from * head_dim;
            a.v = shared ? nullptr : c.v.data() + from * head_dim;
            a.tokens = 50;
            a.head_dim = a.stride = head_dim;
            a.value_dim = c.value_dim;
            a.position = from;
            a.k_cache = cache.data();
            a.v_cache = shared ? nullptr : cache.data() + k_bytes;
            a.slabs = slabs;
            kernel->append(a);
          }
          AttendArgs a = c.args(0, keys);
          a.k_cache = cache.data();
          a.v_cache = shared ? nullptr : cache.data() + k_bytes;
          a.slabs = slabs;
          a.next = cache.data();
          std::fill_n(c.out.as<float>(), want.size(), -1.0f);
          kernel->run(a);
          CHECK_MSG(std::memcmp(c.out.as<float>(), want.data(), want.size() * sizeof(float)) == 0,
                    kernel->name << " shared " << shared << " tokens " << tokens << " window "
                                 << window);
        }
      }
    }
  }
}

TEST(append_writes_the_documented_layout) {
  Rng rng(1);
  for (const AttendKernel* kernel : kernels()) {
    for (int64_t head_dim : {1, 5, 8, 16, 20, 64}) {
      Case c(kernel, 37, 1, 1, head_dim, rng);
      c.append(0, 3);
      c.append(3, 14);
      c.append(17, 20);
      for (int64_t l = 0; l < c.keys; ++l) {
        for (int64_t d = 0; d < head_dim; ++d) {
          const int64_t at = (l / kKeyBlock * head_dim + d) * kKeyBlock + l % kKeyBlock;
          CHECK_EQ(double(load_as_float(c.k_cache.data(), kernel->code, at)), c.key(l, d));
          CHECK_EQ(
              double(load_as_float(c.v_cache.data(), kernel->code, l * value_stride(head_dim) + d)),
              c.value(l, d));
        }
        for (int64_t d = head_dim; d < value_stride(head_dim); ++d) {
          CHECK_EQ(load_as_float(c.v_cache.data(), kernel->code, l * value_stride(head_dim) + d),
                   0);
        }
      }
    }
  }
}

TEST(shapes_agree_with_float64) {
  Rng rng(2);
  for (const AttendKernel* kernel : kernels()) {
    for (int64_t head_dim : {1, 8, 12, 16, 33, 64}) {
      for (int64_t keys : testing::sizes_near({16, 64, 130})) {
        for (int64_t tokens : {1, 2, 5, 17}) {
          if (tokens > keys) continue;
          const int64_t group = 1 + rng.below(4);
          Case c(kernel, keys, tokens, group, head_dim, rng);
          c.append(0, keys);
          kernel->run(c.args(0, keys));
          check_rows(c);
        }
      }
    }
    for (int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13}) {  // every number of rows in a tile
      Case c(kernel, 100, 1, group, 128, rng);
      c.append(0, 100);
      kernel->run(c.args(0, 100));
      check_rows(c);
    }
  }
}

TEST(window_softcap_and_sinks) {
  Rng rng(3);
  for (const AttendKernel* kernel : kernels()) {
    for (int64_t window : {0, 1, 7, 64, 90}) {
      for (int mode = 0; mode < 4; ++mode) {
        Case c(kernel, 150, 20, 3, 24, rng, 3);
        c.window = window;
        if (mode & 1) c.softcap = 2;
        if (mode & 2) c.sinks = {0.5f, -2, 6};
        c.append(0, 150);
        kernel->run(c.args(0, 150));
        check_rows(c);
        if (window == 0) continue;  // keys that no token sees may be left out
        kernel->run(c.args((c.position() - window + 1) / kKeyBlock * kKeyBlock, 150));
        check_rows(c);
      }
    }
  }
}

TEST(values_shared_with_keys) {
  Rng rng(8);
  for (const AttendKernel* kernel : kernels()) {
    for (int64_t value_dim : {1, 8, 15, 16, 33, 64}) {
      for (int64_t rope_dim : {0, 2, 8, 17}) {
        for (int64_t keys : testing::sizes_near({16, 64, 130})) {
          const int64_t tokens = std::min<int64_t>(keys, 1 + rng.below(4)),
                        group = 1 + rng.below(9);
          Case c(kernel, keys, tokens, group, value_dim + rope_dim, rng, 1, value_dim);
          if (rng.below(2) == 1) c.window = 1 + rng.below(20);
          c.append(0, keys);
          kernel->run(c.args(0, keys));
          check_rows(c);
        }
      }
    }
    Case deep(kernel, 300, 2, 16, 512 + 64, rng, 1, 512);  // DeepSeek's latent
    deep.append(0, 300);
    kernel->run(deep.args(0, 300));
    check_rows(deep);
  }
}

TEST(scores_far_apart) {
  Rng rng(4);
  for (const AttendKernel* kernel : kernels()) {
    Case c(kernel, 200, 3, 2, 64, rng, 20);  // scores of +-3000: most p underflow
    c.append(0, 200);
    kernel->run(c.args(0, 200));
    check_rows(c);
  }
}

TEST(parts_merge_to_the_whole) {
  Rng rng(5);
  for (const AttendKernel* kernel : kernels()) {
    for (int64_t window : {0, 40}) {
      for (const int64_t shared_dim : {0, 12}) {
        Case c(kernel, 300, 4, 3, 20, rng, 2, shared_dim);
        c.window = window;
        c.sinks = {1, -1, 0};
        c.append(0, 300);
        const int64_t rows = c.tokens * c.group, stride = state_stride(c.value_dim), parts = 4;
        std::vector<float> states(size_t(parts * rows * stride), kNan);
        for (int64_t p = 0; p < parts; ++p) {  // the last part is empty, the first may see nothing
          AttendArgs a = c.args(p * 128, std::min<int64_t>(300, (p + 1) * 128));
          if (p > 0) a.sinks = nullptr;
          a.out = nullptr;
          a.state = states.data() + p * rows * stride;
          kernel->run(a);
        }
        MergeArgs m{states.data(),        parts, c.tokens, c.group, c.value_dim, c.out.as<float>(),
                    c.group * c.value_dim};
        attend_merge(m);
        check_rows(c, parts + 1);
      }
    }
  }
}

TEST(a_row_does_not_depend_on_its_neighbours) {
  Rng rng(6);
  for (const AttendKernel* kernel : kernels()) {
    Case c(kernel, 90, 11, 4, 48, rng);
    c.append(0, 90);
    kernel->run(c.args(0, 90));
    for (int64_t i = 0; i < c.tokens; ++i) {
      AttendArgs a = c.args(0, c.position() + i + 1);
      std::vector<float> alone(size_t(c.group * c.head_dim));
      a.tokens = 1;
      a.position += i;
      a.q += i * a.q_stride;
      a.out = alone.data();
      kernel->run(a);
      for (size_t j = 0; j < alone.size(); ++j) {
        CHECK_EQ(alone[j], c.out.as<float>()[size_t(i) * alone.size() + j]);
      }
    }
  }
}

TEST(nan_and_infinity) {
  Rng rng(7);
  for (const AttendKernel* kernel : kernels()) {
    for (const float bad : {kNan, kInf}) {
      Case c(kernel, 80, 3, 2, 16, rng);
      c.k[size_t(78 * c.head_dim + 3)] = bad;  // seen by the last two tokens only
      for (int64_t r = 0; r < 6; ++r) c.q.as<float>()[r * c.head_dim + 3] = 1;
      c.append(0, 80);
      kernel->run(c.args(0, 80));
      for (int64_t r = 0; r < 6; ++r) {
        for (int64_t d = 0; d < c.head_dim; ++d) {
          CHECK_EQ(std::isnan(c.out.as<float>()[r * c.head_dim + d]), r >= 2);
        }
      }
    }
    // -Inf scores weigh nothing, unless there is nothing else.
    Case c(kernel, 4, 1, 1, 16, rng);
    for (int64_t l = 0; l < 4; ++l) c.k[size_t(l * 16)] = -kInf;
    c.q.as<float>()[0] = 1;
    c.append(0, 4);
    kernel->run(c.args(0, 4));
    CHECK(std::isnan(c.out.as<float>()[0]));
    c.k[32] = 0.25f;
    c.append(0, 4);
    kernel->run(c.args(0, 4));
    for (int64_t d = 0; d < 16; ++d) CHECK_EQ(double(c.out.as<float>()[d]), c.value(2, d));
  }
}

TEST(selection) {
  CHECK_EQ(std::string(select_attend(Code::bf16, IsaSet{1})->name), "attend_bf16_scalar");
  int count = 0;
  const AttendKernel* all = attend_kernels(&count);
  CHECK_EQ(std::string(select_attend(Code::f32, IsaSet{~0u})->name), std::string(all[0].name));
  CHECK(select_attend(Code::f32, IsaSet{0}) == nullptr);
}

}  // namespace
}  // namespace cpumoe
